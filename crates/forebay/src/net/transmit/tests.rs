//! Sends of several packets: all of them leave, once, or none does.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::Duration;

use forebay_rx::Packet;
use forebay_rx::sink::{Sink, SinkCounters, SinkError};
use forebay_stack::network::neighbours::{
    ANSWERED_MAX, NeighbourObservation, Neighbours, Replaces,
};
use forebay_stack::network::{Identity, Prefix};
use forebay_sys::interface::InterfaceIndex;
use rustix::io::Errno;

use super::super::NetConfig;
use super::super::rig::{Recording, device, host, host_on, pool};
use super::super::shared::NetState;
use super::*;

const THEIRS: [u8; 6] = [2, 0, 0, 0, 0, 2];
const SENT: &str = "10.9.0.1:53";
const TO: &str = "10.9.0.2:4000";

/// Sink that keeps all packets, as a device does until they are sent.
#[derive(Clone, Default)]
struct Keeping(Arc<Mutex<Vec<Packet>>>, Arc<SinkCounters>);

impl Sink for Keeping {
    fn send(&mut self, packets: &mut Vec<Packet>) -> Result<(), SinkError> {
        self.0.lock().unwrap().append(packets);
        Ok(())
    }

    fn counters(&self) -> &Arc<SinkCounters> {
        &self.1
    }
}

impl Keeping {
    fn take(&self) -> Vec<Packet> {
        take(&mut self.0.lock().unwrap())
    }

    /// Payload lengths of what was sent; the memory is free again.
    fn payload_lens(&self) -> Vec<usize> {
        self.take().iter().map(|packet| packet.view().payload().len()).collect()
    }
}

struct Rig {
    queue: TransmitQueue,
    sink: Keeping,
    on: Identity,
}

impl Rig {
    fn new(frames: u32, neighbours: DeviceNeighbours) -> Self {
        let sink = Keeping::default();
        let queue = queue_over(Box::new(sink.clone()), frames, neighbours);
        Self { queue, sink, on: identity() }
    }

    fn gather(&mut self, len: usize, gso_size: u16) -> io::Result<Gathered> {
        gather(&mut self.queue.transmitter(), &self.on, len, gso_size)
    }

    fn flush(&mut self) {
        assert_eq!(flush(&self.queue), Flushed::All);
    }
}

fn queue_over(sink: Box<dyn Sink>, frames: u32, neighbours: DeviceNeighbours) -> TransmitQueue {
    let of_all = (Arc::new(FragmentIds::new([1; 16])), Arc::default());
    TransmitQueue::new(pool(frames), true, of_all, Clock::machine(), vec![(sink, neighbours)])
}

fn flush(queue: &TransmitQueue) -> Flushed {
    let (sent, result) = queue.flush(0);
    result.unwrap();
    sent
}

fn identity() -> Identity {
    let prefix = Prefix { address: SENT.parse::<SocketAddr>().unwrap().ip(), bits: 24 };
    Identity {
        mac: Some([2, 0, 0, 0, 0, 1]),
        addresses: vec![prefix],
        mtu: 1500,
        ..Identity::default()
    }
}

fn gather(
    transmitter: &mut Transmitter,
    on: &Identity,
    len: usize,
    gso_size: u16,
) -> io::Result<Gathered> {
    let between = Between { source: SENT.parse().unwrap(), destination: TO.parse().unwrap() };
    let marks = SentMarks { gso_size, may_fragment: gso_size == 0, ..SentMarks::default() };
    transmitter.gather(0, on, between, None, &vec![7; len], marks)
}

fn errno(result: io::Result<Gathered>) -> Option<Errno> {
    Errno::from_io_error(&result.unwrap_err())
}

#[test]
fn udp_15_gso_without_memory_sends_nothing() {
    let mut rig = Rig::new(10, DeviceNeighbours::NoLink);
    assert_eq!(rig.gather(5500, 1000).unwrap(), Gathered::Yes);
    rig.flush();
    // Six frames are at the device: four are free, for six more datagrams.
    let refused = rig.gather(5500, 1000).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::WouldBlock);
    rig.flush();
    assert_eq!(rig.sink.payload_lens(), [1000, 1000, 1000, 1000, 1000, 500], "once only");
    assert_eq!(rig.gather(5500, 1000).unwrap(), Gathered::Yes);
    rig.flush();
    assert_eq!(rig.sink.payload_lens(), [1000, 1000, 1000, 1000, 1000, 500]);
    // More than there can ever be: no wait helps.
    assert_eq!(errno(rig.gather(11_000, 1000)), Some(Errno::NOBUFS));
    assert_eq!(errno(rig.gather(16_000, 0)), Some(Errno::NOBUFS), "nor for fragments");
    rig.flush();
    assert_eq!((rig.sink.payload_lens().len(), rig.queue.transmitter().frames_away()), (0, 0));
}

#[test]
fn udp_15_gso_fits_in_one_datagram() {
    let mut rig = Rig::new(128, DeviceNeighbours::NoLink);
    assert_eq!(rig.gather(65_507, 1000).unwrap(), Gathered::Yes);
    assert_eq!(errno(rig.gather(65_508, 1000)), Some(Errno::MSGSIZE));
    assert_eq!(errno(rig.gather(4000, 1473)), Some(Errno::MSGSIZE));
    rig.flush();
    assert_eq!(rig.sink.payload_lens().iter().sum::<usize>(), 65_507);
}

#[test]
fn udp_14_send_to_unresolved_arrives_whole() {
    let learned = Arc::new(Mutex::new(Neighbours::new([3; 16])));
    // A datagram in seven fragments, and one payload of nine datagrams.
    for (len, gso_size, count) in [(10_000, 0, 7), (8500, 1000, 9)] {
        *learned.lock().unwrap() = Neighbours::new([3; 16]);
        let mut rig = Rig::new(64, DeviceNeighbours::Own(Arc::clone(&learned)));
        assert_eq!(rig.gather(len, gso_size).unwrap(), Gathered::Yes);
        rig.flush();
        assert_eq!(rig.sink.take().len(), 1, "the solicitation");
        let mut released = Vec::new();
        learned.lock().unwrap().hear(&answer(), 1, &mut released);
        assert_eq!(released.len(), count);
        assert!(released.iter().all(|packet| packet.frame.data()[..6] == THEIRS));
        drop(released);
        assert_eq!(rig.queue.transmitter().frames_away(), 0);
    }
}

/// Another CPU may receive the answer between the look-up and the wait.
#[test]
fn udp_14_neighbour_resolved_meanwhile_is_used() {
    let learned = Arc::new(Mutex::new(Neighbours::new([3; 16])));
    let mut rig = Rig::new(64, DeviceNeighbours::Own(Arc::clone(&learned)));
    assert_eq!(rig.gather(100, 0).unwrap(), Gathered::Yes);
    learned.lock().unwrap().hear(&answer(), 1, &mut Vec::new());
    rig.flush();
    rig.sink.take();
    let mut transmitter = rig.queue.transmitter();
    assert!(transmitter.take_held());
    let between = Between { source: SENT.parse().unwrap(), destination: TO.parse().unwrap() };
    let on = identity();
    let link_addresses = on.mac.map(|from| LinkAddresses { to: [0; 6], from });
    transmitter
        .compose_pieces(&[7; 200], 0, link_addresses, between, SentMarks::default())
        .unwrap();
    transmitter.hold(0, answer().address);
    assert!(!transmitter.take_held());
    drop(transmitter);
    rig.flush();
    let sent = rig.sink.take();
    assert_eq!(sent.len(), 1);
    assert_eq!(sent[0].frame.data()[..6], THEIRS);
    assert_eq!(learned.lock().unwrap().drops().neigh_dead, 0);
}

/// Answer of the neighbour.
fn answer() -> NeighbourObservation {
    NeighbourObservation {
        address: TO.parse::<SocketAddr>().unwrap().ip(),
        mac: Some(THEIRS),
        is_welcome: false,
        replaces: Replaces::WhenSettled,
        is_confirmed: true,
    }
}

/// However long nothing was sent before.
#[test]
fn udp_14_wait_begins_with_the_send() {
    let learned = Arc::new(Mutex::new(Neighbours::new([3; 16])));
    let mut rig = Rig::new(8, DeviceNeighbours::Own(Arc::clone(&learned)));
    let idle_since_ns = rig.queue.transmitter().clock.now_ns();
    thread::sleep(Duration::from_millis(20));
    assert_eq!(rig.gather(100, 0).unwrap(), Gathered::Yes);
    rig.flush();
    rig.sink.take();
    let (mut asks, mut dropped, mut released) = (Vec::new(), Vec::new(), Vec::new());
    let mut learned = learned.lock().unwrap();
    // As long after the last send as an unanswered packet waits.
    let now_ns = idle_since_ns + 3_010_000_000;
    learned.tick(&rig.on, now_ns, &mut pool(8), &mut asks, &mut dropped);
    assert_eq!((asks.len(), dropped.len()), (1, 0), "asked again");
    learned.hear(&answer(), now_ns, &mut released);
    assert_eq!(released.len(), 1);
}

/// Packets that wait for their neighbour are not for the sink.
#[test]
fn tcp_36_nothing_gathered_counts_as_sent() {
    let learned = Arc::new(Mutex::new(Neighbours::new([3; 16])));
    let mut rig = Rig::new(8, DeviceNeighbours::Own(learned));
    assert_eq!(rig.gather(100, 0).unwrap(), Gathered::Yes);
    let mark = rig.queue.transmitter().mark();
    assert!(!rig.queue.transmitter().has_sent(mark), "the solicitation is not sent yet");
    rig.flush();
    assert!(rig.queue.transmitter().has_sent(mark));
    let mark = rig.queue.transmitter().mark();
    assert_eq!(rig.gather(200, 0).unwrap(), Gathered::Yes);
    assert!(rig.queue.transmitter().has_sent(mark), "no solicitation again so soon");
}

/// Segments that wait for their next hop leave as soon as it is known, before later ones.
#[test]
fn tcp_15_waiting_segments_leave_in_order() {
    let state = host(vec![vec![Box::<Recording>::default()]], NetConfig::TCP);
    let mut plain = Rig::new(8, DeviceNeighbours::NoLink);
    for len in 1..=4 {
        assert_eq!(plain.gather(len, 0).unwrap(), Gathered::Yes);
    }
    plain.flush();
    let mut packets = plain.sink.take();
    let nobodys = InterfaceIndex(i32::MAX.unsigned_abs());
    let mut rig = Rig::new(8, DeviceNeighbours::of_kernel(nobodys, None).unwrap());
    let gather = |count, packets: &mut Vec<Packet>| {
        let mut first = packets.drain(..count).collect();
        rig.queue.transmitter().gather_segments(&mut first, None, &state);
    };
    gather(2, &mut packets);
    gather(1, &mut packets);
    assert!(rig.queue.transmitter().has_unresolved());
    let now_ns = rig.queue.transmitter().clock.now_ns();
    let there = TO.parse::<SocketAddr>().unwrap().ip();
    rig.queue.transmitter().paths[0].neighbours.remember(there, THEIRS, now_ns);
    gather(1, &mut packets);
    assert!(!rig.queue.transmitter().has_unresolved());
    rig.flush();
    assert_eq!(rig.sink.payload_lens(), [1, 2, 3, 4]);
}

/// Segments of these lengths from a port, without link header.
fn segments(plain: &mut Rig, from: u16, lens: &[usize]) -> Vec<Packet> {
    let source = SocketAddr::new(SENT.parse::<SocketAddr>().unwrap().ip(), from);
    let between = Between { source, destination: TO.parse().unwrap() };
    for &len in lens {
        let (marks, payload) = (SentMarks::default(), vec![7; len]);
        let mut transmitter = plain.queue.transmitter();
        transmitter.gather(0, &plain.on, between, None, &payload, marks).unwrap();
    }
    plain.flush();
    plain.sink.take()
}

/// Way of packets from the neighbour.
fn way_back(on: &Identity) -> WayBack {
    let link_addresses = LinkAddresses { from: on.mac.unwrap(), to: THEIRS };
    WayBack { source: TO.parse::<SocketAddr>().unwrap().ip(), link_addresses }
}

/// A host with the identity of the rig.
fn host_with_link() -> Arc<NetState> {
    let on = device(0);
    on.identity.store(Arc::new(identity()));
    let sinks = vec![vec![Box::<Recording>::default() as Box<dyn Sink>]];
    host_on(vec![on], sinks, NetConfig::TCP, |_| DeviceNeighbours::NoLink)
}

/// A payload with a segment size is refused above the MTU, even one that is not longer than a segment.
#[test]
fn udp_15_segments_are_never_fragmented() {
    let between = Between { source: SENT.parse().unwrap(), destination: TO.parse().unwrap() };
    let form = |len, gso_size| {
        let marks = SentMarks { gso_size, may_fragment: true, ..SentMarks::default() };
        SendForm::of(len, marks, between, 1500).map_err(|error| error.raw_os_error())
    };
    let too_long = Some(Errno::MSGSIZE.raw_os_error());
    assert!(matches!(form(1473, 0), Ok(SendForm::Fragments)));
    assert!(matches!(form(1472, 1473), Ok(SendForm::Whole)));
    for (len, gso_size) in [(1473, 1473), (1474, 1473), (4000, 65_535)] {
        assert!(matches!(form(len, gso_size), Err(error) if error == too_long), "{len} {gso_size}");
    }
}

/// Without DF each datagram has its own identification, also those that leave as one packet.
#[test]
fn udp_18_routers_fragment_by_own_ids() {
    let mut rig = Rig::new(32, DeviceNeighbours::NoLink);
    let between = Between { source: SENT.parse().unwrap(), destination: TO.parse().unwrap() };
    let mut send = |len, gso_size, may_routers_fragment| {
        let marks = SentMarks { gso_size, may_routers_fragment, ..SentMarks::default() };
        let mut transmitter = rig.queue.transmitter();
        transmitter.gather(0, &rig.on, between, None, &vec![7; len], marks).unwrap();
        drop(transmitter);
        rig.flush();
        let sent = rig.sink.take();
        let bytes = sent[0].frame.data();
        (u16::from_be_bytes([bytes[4], bytes[5]]), bytes[6])
    };
    assert_eq!(send(100, 0, false), (0, 0x40));
    let (first, flags) = send(100, 0, true);
    assert_eq!(flags, 0);
    assert_eq!(send(3500, 1000, true), (first.wrapping_add(1), 0));
    assert_eq!(send(0, 0, true), (first.wrapping_add(5), 0), "after four");
}

/// The datagrams of other flows wait on: their neighbour may not be where the answer goes.
#[test]
fn udp_14_answer_follows_waiting_datagrams() {
    let learned = Arc::new(Mutex::new(Neighbours::new([3; 16])));
    let mut rig = Rig::new(32, DeviceNeighbours::Own(Arc::clone(&learned)));
    let [first, other] = [SENT, "10.9.0.1:54"].map(|source| Between {
        source: source.parse().unwrap(),
        destination: TO.parse().unwrap(),
    });
    let send = |rig: &Rig, between, back, len| {
        let marks = SentMarks { may_fragment: true, ..SentMarks::default() };
        let mut transmitter = rig.queue.transmitter();
        transmitter.gather(0, &rig.on, between, back, &vec![7; len], marks).unwrap();
    };
    for (flow, len) in [(first, 100), (first, 10_000), (other, 300)] {
        send(&rig, flow, None, len);
    }
    rig.flush();
    assert_eq!(rig.sink.take().len(), 1, "the solicitation");
    send(&rig, first, Some(way_back(&rig.on)), 200);
    rig.flush();
    let sent = rig.sink.take();
    assert!(sent.iter().all(|packet| packet.frame.data()[..6] == THEIRS));
    let lens: Vec<_> = sent.iter().map(|packet| packet.view().payload().len()).collect();
    assert_eq!((lens.len(), lens[0], lens[8]), (9, 100, 200));
    assert_eq!(learned.lock().unwrap().waiting(), 1);
}

/// Segments of other flows wait on.
#[test]
fn tcp_15_answer_follows_waiting_segments() {
    let state = host_with_link();
    let learned = Arc::new(Mutex::new(Neighbours::new([3; 16])));
    let nobodys = InterfaceIndex(i32::MAX.unsigned_abs());
    let kernels = DeviceNeighbours::of_kernel(nobodys, None).unwrap();
    for neighbours in [DeviceNeighbours::Own(Arc::clone(&learned)), kernels] {
        let mut plain = Rig::new(8, DeviceNeighbours::NoLink);
        let mut rig = Rig::new(8, neighbours);
        let mut gather = |rig: &Rig, from, lens: &[usize], back| {
            let mut packets = segments(&mut plain, from, lens);
            rig.queue.transmitter().gather_segments(&mut packets, back, &state);
        };
        gather(&rig, 53, &[1, 2], None);
        gather(&rig, 54, &[3], None);
        rig.flush();
        rig.sink.take(); // a solicitation
        gather(&rig, 53, &[4], Some(way_back(&identity())));
        rig.flush();
        let sent = rig.sink.take();
        assert!(sent.iter().all(|packet| packet.frame.data()[..6] == THEIRS));
        let lens: Vec<_> = sent.iter().map(|packet| packet.view().payload().len()).collect();
        assert_eq!(lens, [1, 2, 4]);
        let waits = rig.queue.transmitter().has_unresolved();
        assert!(waits || learned.lock().unwrap().waiting() == 1);
        learned.lock().unwrap().close(&mut Vec::new());
    }
}

/// Another transmitter must not send what comes after them.
#[test]
fn tcp_36_waiting_segments_are_not_sent() {
    let state = host(vec![vec![Box::<Recording>::default()]], NetConfig::TCP);
    let mut plain = Rig::new(8, DeviceNeighbours::NoLink);
    let [mut packets, mut others] = [53, 54].map(|from| segments(&mut plain, from, &[100]));
    let nobodys = InterfaceIndex(i32::MAX.unsigned_abs());
    let mut rig = Rig::new(8, DeviceNeighbours::of_kernel(nobodys, None).unwrap());
    let clock = Clock::virtual_at_zero();
    rig.queue.transmitter().clock = clock.clone();
    assert!(rig.queue.transmitter().gather_segments(&mut packets, None, &state));
    let mark = rig.queue.transmitter().segment_mark(None, true);
    let has_sent = |rig: &Rig| rig.queue.transmitter().has_sent_segments(mark);
    assert!(!has_sent(&rig));
    let of_datagrams = rig.queue.transmitter().mark();
    assert!(rig.queue.transmitter().has_sent(of_datagrams), "datagrams do not wait there");
    rig.queue.transmitter().gather_answers(0, 1500, &mut others, |to| panic!("{to}"));
    let of_others = rig.queue.transmitter().segment_mark(None, false);
    let of_both = rig.queue.transmitter().segment_mark(Some(mark), false);
    assert!(!rig.queue.transmitter().has_sent_segments(of_others));
    rig.flush();
    assert!(rig.queue.transmitter().has_sent_segments(of_others), "another shard does not wait");
    assert!(!has_sent(&rig) && !rig.queue.transmitter().has_sent_segments(of_both));
    clock.advance_to(1_000_000);
    let there = TO.parse::<SocketAddr>().unwrap().ip();
    rig.queue.transmitter().paths[0].neighbours.remember(there, THEIRS, 1_000_000);
    rig.queue.transmitter().retry_unresolved(&state);
    assert!(!rig.queue.transmitter().has_unresolved() && !has_sent(&rig));
    rig.flush();
    assert!(has_sent(&rig) && rig.queue.transmitter().has_sent_segments(of_both));
    let later = rig.queue.transmitter().segment_mark(Some(of_both), false);
    assert!(rig.queue.transmitter().has_sent_segments(later));
}

#[test]
fn tcp_15_segments_wait_256_ms_at_most() {
    let state = host(vec![vec![Box::<Recording>::default()]], NetConfig::TCP);
    let mut plain = Rig::new(8, DeviceNeighbours::NoLink);
    let mut packets = segments(&mut plain, 53, &[100]);
    let nobodys = InterfaceIndex(i32::MAX.unsigned_abs());
    let rig = Rig::new(8, DeviceNeighbours::of_kernel(nobodys, None).unwrap());
    let clock = Clock::virtual_at_zero();
    rig.queue.transmitter().clock = clock.clone();
    rig.queue.transmitter().gather_segments(&mut packets, None, &state);
    let waited_ns = (0..).step_by(500_000).find(|&now_ns| {
        clock.advance_to(now_ns);
        rig.queue.transmitter().retry_unresolved(&state);
        !rig.queue.transmitter().has_unresolved()
    });
    assert_eq!(waited_ns, Some(255_500_000));
}

#[test]
fn tcp_13_answers_go_back_as_they_came() {
    let mut plain = Rig::new(8, DeviceNeighbours::NoLink);
    assert_eq!(plain.gather(100, 0).unwrap(), Gathered::Yes);
    plain.flush();
    let answer = plain.sink.take().remove(0);
    let [ours, theirs] = [SENT, TO].map(|address| address.parse::<SocketAddr>().unwrap().ip());
    let mut rig =
        Rig::new(8, DeviceNeighbours::Own(Arc::new(Mutex::new(Neighbours::new([3; 16])))));
    let our_mac = rig.on.mac.unwrap();
    let link_addresses = LinkAddresses { from: our_mac, to: THEIRS };
    let back = WayBack { source: theirs, link_addresses };
    assert!(back.leads_to(theirs, &rig.on) && !back.leads_to(ours, &rig.on));
    let other_device = Identity { mac: Some(THEIRS), ..rig.on.clone() };
    assert!(!back.leads_to(theirs, &other_device));

    rig.queue.transmitter().gather_back(0, &rig.on, answer, back);
    rig.flush();
    let sent = rig.sink.take();
    let [_solicitation, sent] = &sent[..] else { panic!("{sent:?}") };
    assert_eq!(sent.frame.data()[..12], *[THEIRS, our_mac].as_flattened());
    let swapped = LinkAddresses { from: THEIRS, to: our_mac };
    assert_eq!(WayBack::of(sent, ours).unwrap().link_addresses, swapped);
}

/// Answers to spoofed addresses leave as their packets came, and cost few solicitations and no neighbour.
#[test]
fn tcp_13_spoofed_segments_solicit_few() {
    let learned = Arc::new(Mutex::new(Neighbours::new([3; 16])));
    let mut rig = Rig::new(8, DeviceNeighbours::Own(Arc::clone(&learned)));
    assert_eq!(rig.gather(100, 0).unwrap(), Gathered::Yes);
    learned.lock().unwrap().hear(&answer(), rig.queue.transmitter().now_ns, &mut Vec::new());
    rig.flush();
    rig.sink.take();
    let from = rig.on.mac.unwrap();
    let mut plain = Rig::new(8, DeviceNeighbours::NoLink);
    let (mut answers, mut asks) = (0, 0);
    for number in 0..10_000u16 {
        assert_eq!(plain.gather(100, 0).unwrap(), Gathered::Yes);
        plain.flush();
        let [high, low] = number.to_be_bytes();
        let source = IpAddr::from([10, 9, 64 + high, low]);
        let link_addresses = LinkAddresses { from, to: [2, 9, 9, 9, high, low] };
        let packet = plain.sink.take().remove(0);
        let back = WayBack { source, link_addresses };
        rig.queue.transmitter().gather_back(0, &rig.on, packet, back);
        rig.flush();
        for sent in rig.sink.take() {
            match sent.frame.data()[..6] == link_addresses.to {
                true => answers += 1,
                false => asks += 1,
            }
        }
    }
    assert_eq!((answers, asks), (10_000, ANSWERED_MAX));
    assert_eq!(rig.gather(100, 0).unwrap(), Gathered::Yes);
    rig.flush();
    assert_eq!(rig.sink.payload_lens(), [100], "the neighbour is known");
}

#[test]
fn tcp_36_sink_in_use_delays_nobody() {
    let (gate, lens) = (Arc::new(Barrier::new(2)), Arc::<Mutex<Vec<usize>>>::default());
    let sink = Recording {
        lens: Arc::clone(&lens),
        gate: Some(Arc::clone(&gate)),
        counters: Arc::default(),
    };
    let queue = queue_over(Box::new(sink), 8, DeviceNeighbours::NoLink);
    let on = identity();
    let gather = |len| gather(&mut queue.transmitter(), &on, len, 0).unwrap();
    gather(100);
    let mark = queue.transmitter().mark();
    thread::scope(|scope| {
        let user = scope.spawn(|| flush(&queue));
        gate.wait();
        // The sink is in use: its user sends this, too, and this thread goes on.
        gather(200);
        assert_eq!(flush(&queue), Flushed::All);
        assert!(lens.lock().unwrap().is_empty());
        assert!(!queue.transmitter().has_sent(mark));
        gate.wait();
        assert_eq!(user.join().unwrap(), Flushed::All);
    });
    assert_eq!(*lens.lock().unwrap(), [100, 200]);
    assert!(queue.transmitter().has_sent(mark));
    assert_eq!(queue.transmitter().frames_away(), 0);
}

#[test]
fn tcp_36_threads_send_as_gathered() {
    const THREADS: usize = 4;
    const EACH: usize = 300;
    let sink = Recording::default();
    let lens = Arc::clone(&sink.lens);
    // Room for all: a flush that does not reach the end leaves its packets.
    let queue = queue_over(Box::new(sink), 2048, DeviceNeighbours::NoLink);
    let (on, next) = (identity(), AtomicUsize::new(1));
    let send = || {
        for _ in 0..EACH {
            let mut transmitter = queue.transmitter();
            let len = next.fetch_add(1, Ordering::Relaxed);
            gather(&mut transmitter, &on, len, 0).unwrap();
            drop(transmitter);
            if flush(&queue) == Flushed::Part {
                flush(&queue);
            }
        }
    };
    thread::scope(|scope| (0..THREADS).for_each(|_| drop(scope.spawn(send))));
    flush(&queue);
    assert!(lens.lock().unwrap().iter().copied().eq(1..=THREADS * EACH));
    assert_eq!(queue.transmitter().frames_away(), 0);
}

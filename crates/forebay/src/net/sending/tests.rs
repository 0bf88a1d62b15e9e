//! Order, devices and errors of datagrams that sockets send.

use std::sync::{Arc, Barrier};
use std::thread;

use std::net::Ipv6Addr;
use std::sync::atomic::AtomicUsize;
use std::time::Instant;

use forebay_rx::Handler;
use forebay_rx::parse::Link;
use forebay_stack::Host;
use forebay_stack::network::neighbours::{ANSWERED_MAX, NeighbourDrops};
use forebay_stack::socket::SocketId;
use forebay_stack::socket::table::Binding;
use forebay_sys::interface::InterfaceIndex;

use super::super::host::CpuHost;
use super::super::neighbours::DeviceNeighbours;
use super::super::rig::{Recording, device, host, host_on, neighbour, own_address, pool, received};
use super::super::shared::{NetDevice, NetState};
use super::super::wake::Wake;
use super::super::{NetConfig, stacks};
use super::*;

fn bound(state: &Arc<NetState>, local: SocketAddr) -> Endpoint {
    let wake = Arc::<Wake>::default();
    let binding = Binding::new(SocketId(0), local);
    let entry = state.bind(binding, 1 << 20, Arc::clone(&wake) as _).unwrap();
    Endpoint::new(Arc::clone(state), entry, wake, None)
}

/// A host with a device that only this process has, where neighbours are learned.
fn learning_host(sink: Recording, mac: [u8; 6]) -> Arc<NetState> {
    let on = device(0);
    let identity = Identity { mac: Some(mac), ..Identity::clone(&on.identity.load()) };
    on.identity.store(Arc::new(identity));
    let own = |on: &NetDevice| DeviceNeighbours::Own(Arc::clone(&on.learned));
    host_on(vec![on], vec![vec![Box::new(sink)]], NetConfig::TCP, own)
}

/// A thread that goes on to another CPU uses the transmitter there, once the other has sent what the
/// socket gave to it.
#[test]
fn udp_19_migration_keeps_order_of_datagrams() {
    let gate = Arc::new(Barrier::new(2));
    let [mut first, second] = [(), ()].map(|()| Recording::default());
    first.gate = Some(Arc::clone(&gate));
    let lens = Arc::clone(&first.lens);
    let second = Recording { lens: Arc::clone(&lens), ..second };
    let state = host(vec![vec![Box::new(first)], vec![Box::new(second)]], NetConfig::TCP);
    let socket = bound(&state, SocketAddr::new(own_address(0), 53));
    let send_by = |index, len: usize| {
        let payload = vec![7; len];
        let datagram = Transmit::new(&payload, neighbour(0));
        socket.send_by(index, &datagram, Flush::Now).unwrap()
    };
    thread::scope(|scope| {
        let user = scope.spawn(|| send_by(CpuIndex(0), 100));
        gate.wait();
        // The sink is in use: both calls return at once.
        send_by(CpuIndex(0), 200);
        send_by(CpuIndex(1), 300);
        let early = std::mem::take(&mut *lens.lock().unwrap());
        gate.wait();
        user.join().unwrap();
        assert!(early.is_empty(), "{early:?} overtook what the first CPU sends");
    });
    send_by(CpuIndex(1), 400);
    assert_eq!(*lens.lock().unwrap(), [100, 200, 300, 400]);
    assert_eq!(state.send_frames_away(), 0);
}

#[test]
fn rfs_6_answer_left_to_another_is_unsent() {
    let gate = Arc::new(Barrier::new(2));
    let sink = Recording { gate: Some(Arc::clone(&gate)), ..Recording::default() };
    let state = host(vec![vec![Box::new(sink)]], NetConfig::TCP);
    let socket = bound(&state, SocketAddr::new(own_address(0), 53));
    let send = |len: usize| {
        let payload = vec![7; len];
        let datagram = Transmit::new(&payload, neighbour(0));
        socket.send_by(CpuIndex(0), &datagram, Flush::Now).unwrap();
    };
    thread::scope(|scope| {
        let other = scope.spawn(|| send(100));
        gate.wait(); // the other thread is in the sink
        send(200);
        let gathered = state.transmitter_of(CpuIndex(0)).mark();
        let has_sent = || state.transmitter_of(CpuIndex(0)).has_sent(gathered);
        assert!(!has_sent());
        gate.wait();
        other.join().unwrap();
        assert!(has_sent());
    });
}

#[test]
fn udp_21_bound_socket_sends_by_its_device() {
    let sinks = [(); 2].map(|()| Recording::default());
    let lens = sinks.each_ref().map(|sink| Arc::clone(&sink.lens));
    let sinks = sinks.into_iter().map(|sink| Box::new(sink) as _).collect();
    let state = host(vec![sinks], NetConfig::TCP);
    let socket = bound(&state, SocketAddr::new(own_address(1), 53));
    for to in [SocketAddr::from(([192, 0, 2, 9], 4000)), neighbour(1)] {
        let datagram = Transmit::new(&[7; 100], to);
        socket.send_by(CpuIndex(0), &datagram, Flush::Now).unwrap();
    }
    let lens = lens.map(|lens| lens.lock().unwrap().clone());
    assert_eq!(lens, [vec![], vec![100; 2]], "by each device");
}

#[test]
fn udp_21_chosen_source_leads_to_groups() {
    let sinks = [(); 2].map(|()| Recording::default());
    let lens = sinks.each_ref().map(|sink| Arc::clone(&sink.lens));
    let sinks = sinks.into_iter().map(|sink| Box::new(sink) as _).collect();
    let state = host(vec![sinks], NetConfig::TCP);
    let socket = bound(&state, SocketAddr::from(([0; 4], 53)));
    for (index, payload) in [(1, [7; 100].as_slice()), (0, &[7; 200])] {
        let IpAddr::V4(source) = own_address(index) else { unreachable!("of IPv4") };
        socket.options.set_group_source_v4(Some(source));
        let datagram = Transmit::new(payload, SocketAddr::from(([239, 1, 2, 3], 4000)));
        socket.send_by(CpuIndex(0), &datagram, Flush::Now).unwrap();
    }
    let lens = lens.map(|lens| lens.lock().unwrap().clone());
    assert_eq!(lens, [vec![200], vec![100]], "by each device");
}

/// An error of the length or the route leaves the peer's to a later call.
#[test]
fn udp_7_refused_arguments_leave_peers_error() {
    let state = host(vec![vec![Box::<Recording>::default()]], NetConfig::TCP);
    let socket = bound(&state, SocketAddr::new(own_address(0), 53));
    socket.options.may_broadcast.store(false, Ordering::Relaxed);
    let send = |len: usize, gso_size, to: SocketAddr| {
        let payload = vec![7; len];
        let datagram = Transmit { gso_size, ..Transmit::new(&payload, to) };
        let sent = socket.send_by(CpuIndex(0), &datagram, Flush::Now);
        sent.map_err(|error| Errno::from_io_error(&error))
    };
    let _ = socket.queue.refuse();
    let broadcast = SocketAddr::from(([10, 9, 0, 255], 9));
    assert_eq!(send(100, 0, broadcast), Err(Some(Errno::ACCESS)));
    assert_eq!(send(3000, 0, neighbour(0)), Err(Some(Errno::MSGSIZE)));
    assert_eq!(send(1290, 10, neighbour(0)), Err(None), "the peer's");
    assert_eq!(send(1290, 10, neighbour(0)), Err(Some(Errno::INVAL)));
    assert_eq!(send(1280, 10, neighbour(0)), Ok(1280));
}

#[test]
fn udp_22_link_local_sender_has_scope() {
    let mut on = device(0);
    on.kernels = Some(InterfaceIndex(7));
    let sinks = vec![vec![Box::new(Recording::default()) as _]];
    let state = host_on(vec![on], sinks, NetConfig::TCP, |_| DeviceNeighbours::NoLink);
    let socket = bound(&state, "[::]:53".parse().unwrap());
    let [from, to] = [9, 1].map(|last| Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, last));
    let builder = etherparse::PacketBuilder::ipv6(from.octets(), to.octets(), 64);
    let packet = received(&mut pool(1), Link::Ip, builder.udp(4000, 53));
    let expected = ["[fe80::9%7]:4000", "[fe80::1%7]:53"].map(|text| text.parse().unwrap());
    let received = socket.read_message(&packet, &mut [0; 3]);
    assert_eq!([received.source, received.destination], expected);
    let datagram = Datagram::of(packet, 7);
    assert_eq!([datagram.source(), datagram.destination()], expected);
}

/// A CPU that sleeps wakes, and repeats the solicitation though no packet comes.
#[test]
fn promise_8_waiting_send_wakes_a_cpu() {
    let state = learning_host(Recording::default(), [2; 6]);
    let rings = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&rings);
    let ring = move || {
        counted.fetch_add(1, Ordering::Relaxed);
    };
    state.tcp.set_wakers(vec![Arc::new(ring)]);
    let socket = bound(&state, SocketAddr::new(own_address(0), 53));
    let mut host = CpuHost::new(CpuIndex(0), Arc::clone(&state));
    assert_eq!(host.sleep_max_ns(), None);
    let datagram = Transmit::new(&[7; 100], neighbour(0));
    socket.send_by(CpuIndex(0), &datagram, Flush::Now).unwrap();
    assert_eq!(rings.load(Ordering::Relaxed), 1);
    let mut stack = stacks(&state, vec![None], None).remove(0);
    assert!(stack.sleep_max_ns().is_some());
    state.end();
    assert_eq!(stack.sleep_max_ns(), None);
}

/// Requests from spoofed addresses are answered as they came. They cost few solicitations, and nobody that is waited for.
#[test]
fn udp_25_spoofed_requests_solicit_few() {
    const OURS: [u8; 6] = [2, 0, 0, 0, 0, 1];
    const THEIRS: [u8; 6] = [2, 9, 9, 9, 9, 9];
    let sink = Recording::default();
    let lens = Arc::clone(&sink.lens);
    let state = learning_host(sink, OURS);
    let socket = bound(&state, SocketAddr::new(own_address(0), 53));
    socket.options.is_nonblocking.store(true, Ordering::Relaxed);
    let send = |to| {
        let datagram = Transmit::new(&[7; 100], to);
        socket.send_by(CpuIndex(0), &datagram, Flush::Now).unwrap();
        std::mem::take(&mut *lens.lock().unwrap())
    };
    let began = Instant::now();
    assert_eq!(send(neighbour(0)).len(), 1, "the solicitation");
    let (mut answers, mut asks, mut pool) = (0, 0, pool(1));
    for number in 0..10_000u16 {
        let [high, low] = number.to_be_bytes();
        let source = [10, 9, 64 + high, low];
        let builder = etherparse::PacketBuilder::ethernet2(THEIRS, OURS);
        let builder = builder.ipv4(source, [10, 9, 0, 1], 64).udp(4000, 53);
        let packet = received(&mut pool, Link::Ethernet, builder);
        let request = socket.read_message(&packet, &mut [0; 3]);
        pool.put(packet.frame);
        let sent = send(request.source);
        answers += sent.iter().filter(|&&len| len == 100).count();
        asks += sent.iter().filter(|&&len| len != 100).count();
    }
    let elapsed_s = usize::try_from(began.elapsed().as_secs()).unwrap() + 1;
    assert_eq!(answers, 10_000);
    assert!(asks <= (1 + elapsed_s) * ANSWERED_MAX as usize, "{asks} in {elapsed_s} s");
    let neighbours = state.devices[0].learned();
    assert_eq!((neighbours.waiting(), neighbours.drops()), (1, NeighbourDrops::default()));
}

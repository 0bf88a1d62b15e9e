//! Neighbour messages passed through the network layer: answers are sent, and observations
//! reported.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use etherparse::{ArpOperation, Icmpv6Type};
use forebay_buf::Pool;
use forebay_rx::delivery::Batch;
use forebay_rx::{CpuId, Handler, RxQueue};
use forebay_stack::network::neighbours::{Neighbours, Resolved};
use forebay_stack::network::{
    NetworkConfig, NetworkCounters, NetworkDrop, NetworkLayer, NetworkVerdict,
};
use forebay_stack::socket::reclaim::BufferReclaimer;
use forebay_stack::{Host, Stack};
use forebay_testkit::host::{FixedHost, SentPackets};

use crate::neighbours::rig::{
    ALL, OURS, THEIRS, advertisement, arp_message, identity, ip, packet, pool, pools, read_arp,
    read_ndisc, solicitation,
};

#[test]
fn answered_request_teaches_its_sender() {
    let mut pool = pool(8);
    let mut network =
        NetworkLayer::new(NetworkConfig::default(), Arc::new(NetworkCounters::default()));
    let mut neighbours = Neighbours::default();
    let by_arp = arp_message(ALL, ArpOperation::REQUEST, "10.9.0.2", "10.9.0.1");
    for (request, from) in [(by_arp, "10.9.0.2"), (solicitation().bytes(), "fd00::2")] {
        let packet = packet(&mut pool, &request);
        let received = network.receive(packet, &identity(), 0, &mut pool);
        let NetworkVerdict::Heard(answer, heard) = received else { panic!("{received:?}") };
        assert!(heard.is_answer);
        match from {
            "fd00::2" => {
                let kind = read_ndisc(&answer).kind;
                assert!(matches!(kind, Icmpv6Type::NeighborAdvertisement(_)), "{kind:?}");
            }
            _ => assert_eq!(read_arp(&answer).0, [THEIRS, OURS]),
        }
        pool.put(answer.frame);
        neighbours.hear(&heard.sighting.unwrap(), 0, &mut Vec::new());
        let found = neighbours.resolve(ip(from), &identity(), 1, &mut pool);
        assert!(matches!(found, Resolved::Mac(THEIRS)), "{found:?}");
    }
    assert_eq!(pool.in_use(), 0);
}

#[test]
fn arp_answers_heard_unless_foreign() {
    let mut pool = pool(8);
    let mut network =
        NetworkLayer::new(NetworkConfig::default(), Arc::new(NetworkCounters::default()));
    let by_arp = arp_message(OURS, ArpOperation::REPLY, "10.9.0.2", "10.9.0.1");
    for answer in [by_arp, advertisement(true, true).bytes()] {
        let packet = packet(&mut pool, &answer);
        let received = network.receive(packet, &identity(), 0, &mut pool);
        let NetworkVerdict::Heard(_, heard) = received else { panic!("{received:?}") };
        let told = heard.sighting.unwrap();
        assert!(told.is_confirmed && !told.is_welcome && !heard.is_answer);
    }
    let from_afar = crate::neighbours::rig::Ndisc { hop_limit: 254, ..advertisement(true, true) };
    let packet = packet(&mut pool, &from_afar.bytes());
    let received = network.receive(packet, &identity(), 0, &mut pool);
    assert!(matches!(received, NetworkVerdict::Dropped(_, NetworkDrop::IpInhdr)), "{received:?}");
    assert_eq!(network.counters().drops.get(NetworkDrop::IpInhdr), 1);
}

/// Stack of a host for which a packet waits until 10.9.0.2 answers, at time 1; and the pool of another CPU, which sent it.
fn waiting_stack() -> (Pool, Stack, SentPackets, Arc<AtomicU64>) {
    let [mut pool, of_stack] = pools(8);
    let mut host = FixedHost::new(identity(), Vec::new(), Vec::new());
    *host.pool.get_mut().unwrap() = of_stack;
    let (sent, now_ns) = (host.sent.clone(), Arc::clone(&host.now_ns));
    let mut held =
        vec![packet(&mut pool, &arp_message(ALL, ArpOperation::REQUEST, "10.9.0.1", "10.9.0.2"))];
    let mut neighbours = host.neighbours(0);
    let resolved = neighbours.resolve(ip("10.9.0.2"), &identity(), 1, &mut pool);
    let Resolved::Ask(question) = resolved else { panic!("nothing is known yet") };
    pool.put(question.frame);
    neighbours.hold(ip("10.9.0.2"), &mut held, 1, &mut Vec::new());
    drop(neighbours);
    let network = NetworkLayer::new(NetworkConfig::default(), Arc::default());
    let relief = BufferReclaimer::new(None, None, Arc::default());
    (pool, Stack::new(CpuId(0), 0, network, relief, Box::new(host)), sent, now_ns)
}

fn handle(stack: &mut Stack, pool: &mut Pool, bytes: &[u8]) {
    let mut packets = vec![packet(pool, bytes)];
    stack.handle(&mut Batch {
        cpu: CpuId(0),
        rx_queue: RxQueue(0),
        packets: &mut packets,
        notes: &[],
        pool,
    });
}

/// The answer comes in the first batch for long, in the same turn that looks for those who gave none.
#[test]
fn promise_8_late_answer_releases_packets() {
    let (mut pool, mut stack, sent, now_ns) = waiting_stack();
    now_ns.store(3_000_000_001, Ordering::Relaxed);
    stack.tick(3_000_000_001);
    let answer = arp_message(OURS, ArpOperation::REPLY, "10.9.0.2", "10.9.0.1");
    handle(&mut stack, &mut pool, &answer);
    stack.tick(3_000_000_002);
    let released = sent.take();
    assert_eq!(released.len(), 1, "{released:?}");
    assert_eq!(released[0].frame.data()[..6], THEIRS);
    released.into_iter().for_each(|packet| pool.put(packet.frame));
    assert_eq!(pool.in_use(), 0);
}

/// Ticks every 50 ms from a time on, until another. Returns the times, in ms, at which the stack sent a packet.
fn ticks(
    stack: &mut Stack,
    (sent, now_ns): (&SentPackets, &AtomicU64),
    ms: Range<u64>,
) -> Vec<u64> {
    let mut times = Vec::new();
    for now_ms in ms.step_by(50) {
        now_ns.store(now_ms * 1_000_000, Ordering::Relaxed);
        // The engine's time is another one.
        stack.tick(7_000_000_000 + now_ms * 1_000_000);
        times.extend(sent.take().iter().map(|_| now_ms));
    }
    times
}

#[test]
fn promise_8_solicitations_repeat_without_packets() {
    let (mut pool, mut stack, sent, now_ns) = waiting_stack();
    assert!(stack.sleep_max_ns().is_some_and(|ns| ns <= 100_000_000));
    let times = ticks(&mut stack, (&sent, &now_ns), 0..2950);
    let [first, second] = times[..] else { panic!("{times:?}") };
    assert!((1000..1200).contains(&first) && (2000..2400).contains(&second), "{times:?}");
    assert!(stack.sleep_max_ns().is_some_and(|ns| ns <= 100_000_000));
    assert!(ticks(&mut stack, (&sent, &now_ns), 2950..3250).is_empty());
    pool.collect();
    assert_eq!((stack.sleep_max_ns(), pool.in_use()), (None, 0), "it is given up");
}

#[test]
fn promise_8_fragments_expire_without_packets() {
    let (mut pool, mut stack, sent, now_ns) = waiting_stack();
    ticks(&mut stack, (&sent, &now_ns), 0..4000);
    assert_eq!(stack.sleep_max_ns(), None);
    let mut bytes = Vec::new();
    let builder = etherparse::PacketBuilder::ethernet2(THEIRS, OURS);
    let builder = builder.ipv4([10, 9, 0, 2], [10, 9, 0, 1], 64);
    builder.udp(1, 2).write(&mut bytes, &[0; 64]).unwrap();
    let (mut header, _) = etherparse::Ipv4Header::from_slice(&bytes[14..]).unwrap();
    (header.dont_fragment, header.more_fragments) = (false, true);
    header.header_checksum = header.calc_header_checksum();
    bytes[14..34].copy_from_slice(&header.to_bytes());
    handle(&mut stack, &mut pool, &bytes);
    assert_eq!(stack.network().fragments().frames(), 1);
    assert!(stack.sleep_max_ns().is_some());
    ticks(&mut stack, (&sent, &now_ns), 4000..33_900);
    assert_eq!(stack.network().fragments().frames(), 1);
    ticks(&mut stack, (&sent, &now_ns), 33_900..34_300);
    assert_eq!(stack.network().fragments().frames(), 0);
    pool.collect();
    assert_eq!((stack.sleep_max_ns(), pool.in_use()), (None, 0));
}

/// A neighbour message behind a fragment header with this place and flag.
fn behind_fragment_header(bytes: &[u8], place: u16, data: Range<usize>) -> Vec<u8> {
    let (headers, message) = bytes.split_at(54);
    let message = &message[data];
    let mut headers = headers.to_vec();
    headers[18..20].copy_from_slice(&u16::try_from(message.len() + 8).unwrap().to_be_bytes());
    headers[20] = 44;
    let [high, low] = place.to_be_bytes();
    [headers.as_slice(), &[58, 0, high, low, 0, 0, 0, 7], message].concat()
}

/// RFC 6980, section 5 (`ndisc_suppress_frag_ndisc`): filters on the way do not look behind the header of a fragment.
#[test]
fn promise_13_fragmented_neighbour_messages_ignored() {
    let mut pool = pool(8);
    let counters = Arc::new(NetworkCounters::default());
    let mut network = NetworkLayer::new(NetworkConfig::default(), Arc::clone(&counters));
    for bytes in [solicitation().bytes(), advertisement(true, true).bytes()] {
        let len = bytes.len() - 54;
        let atomic = vec![behind_fragment_header(&bytes, 0, 0..len)];
        let parts = [(1, 0..24), (24, 24..len)];
        let two = parts.map(|(place, data)| behind_fragment_header(&bytes, place, data)).to_vec();
        for fragments in [atomic, two] {
            let before = counters.drops.get(NetworkDrop::Ipv6NdiscFrag);
            for fragment in fragments {
                let packet = packet(&mut pool, &fragment);
                match network.receive(packet, &identity(), 0, &mut pool) {
                    NetworkVerdict::Dropped(packet, NetworkDrop::Ipv6NdiscFrag) => {
                        pool.put(packet.frame);
                    }
                    NetworkVerdict::Kept => {}
                    other => panic!("{other:?}"),
                }
            }
            assert_eq!(counters.drops.get(NetworkDrop::Ipv6NdiscFrag), before + 1);
        }
    }
}

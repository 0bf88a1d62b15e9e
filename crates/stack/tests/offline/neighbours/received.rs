//! Neighbour messages passed through the network layer: answers are sent, and observations
//! reported.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use etherparse::{ArpOperation, Icmpv6Type};
use forebay_rx::delivery::Batch;
use forebay_rx::{CpuId, Handler, RxQueue};
use forebay_stack::network::neighbours::{Neighbours, Resolved};
use forebay_stack::network::{
    NetworkConfig, NetworkCounters, NetworkDrop, NetworkLayer, NetworkVerdict,
};
use forebay_stack::socket::reclaim::BufferReclaimer;
use forebay_stack::{Host, Stack};
use forebay_testkit::host::FixedHost;

use crate::neighbours::rig::{
    ALL, OURS, THEIRS, advertisement, arp_message, identity, ip, packet, pool, read_arp,
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

/// The answer comes in the first batch for long, in the same turn that looks for those who gave none.
#[test]
fn promise_8_late_answer_releases_packets() {
    let mut pool = pool(8);
    let host = FixedHost::new(identity(), Vec::new(), Vec::new());
    let (sent, now_ns) = (host.sent.clone(), Arc::clone(&host.now_ns));
    let mut held =
        vec![packet(&mut pool, &arp_message(ALL, ArpOperation::REQUEST, "10.9.0.1", "10.9.0.2"))];
    let mut neighbours = host.neighbours(0);
    let Resolved::Ask(question) = neighbours.resolve(ip("10.9.0.2"), &identity(), 1, &mut pool)
    else {
        panic!("nothing is known yet")
    };
    pool.put(question.frame);
    neighbours.hold(ip("10.9.0.2"), &mut held, 1, &mut Vec::new());
    drop(neighbours);
    let network = NetworkLayer::new(NetworkConfig::default(), Arc::default());
    let relief = BufferReclaimer::new(None, None, Arc::default());
    let mut stack = Stack::new((CpuId(0), 0), network, relief, Box::new(host));
    now_ns.store(3_000_000_001, Ordering::Relaxed);
    let answer = arp_message(OURS, ArpOperation::REPLY, "10.9.0.2", "10.9.0.1");
    let mut packets = vec![packet(&mut pool, &answer)];
    stack.handle(&mut Batch {
        cpu: CpuId(0),
        rx_queue: RxQueue(0),
        packets: &mut packets,
        notes: &[],
        pool: &mut pool,
    });
    let released = sent.take();
    assert_eq!(released.len(), 1, "{released:?}");
    assert_eq!(released[0].frame.data()[..6], THEIRS);
    released.into_iter().for_each(|packet| pool.put(packet.frame));
    assert_eq!(pool.in_use(), 0);
}

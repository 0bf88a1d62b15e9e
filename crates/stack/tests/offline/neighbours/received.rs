//! Neighbour messages passed through the network layer: answers are sent, and observations
//! reported.

use std::sync::Arc;

use etherparse::{ArpOperation, Icmpv6Type};
use forebay_stack::network::neighbours::{Neighbours, Resolved};
use forebay_stack::network::{
    NetworkConfig, NetworkCounters, NetworkDrop, NetworkLayer, NetworkVerdict,
};

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

//! Fragments that come by several devices.

use std::net::Ipv6Addr;
use std::sync::Arc;

use forebay_buf::Pool;
use forebay_rx::delivery::Batch;
use forebay_rx::{CpuId, Handler, RxQueue};
use forebay_stack::Stack;
use forebay_stack::network::{Identity, NetworkConfig, NetworkCounters, NetworkLayer};
use forebay_stack::socket::reclaim::BufferReclaimer;
use forebay_testkit::host::FixedHost;

use crate::neighbours::rig::identity;
use crate::reassembly::frames::{Datagram, IP, Version, packet, pool};

/// Hosts of several links may have the same link-local address (`ipv6_frag_rcv`).
#[test]
fn promise_13_fragments_of_links_do_not_mix() {
    for (to, devices, is_whole) in [
        ("fe80::1", [0, 1], false),
        ("ff02::1", [1, 0], false),
        ("fd00::1", [0, 1], true),
        ("fe80::1", [1, 1], true),
        ("ff02::1", [1, 1], true),
    ] {
        let counters = Arc::<NetworkCounters>::default();
        let network = NetworkLayer::new(NetworkConfig::default(), Arc::clone(&counters));
        let mut host = FixedHost::new(Identity { mac: None, ..identity() }, Vec::new(), Vec::new());
        host.devices = 2;
        let relief = BufferReclaimer::new(None, None, Arc::default());
        let mut stack = Stack::new(CpuId(0), 0, network, relief, Box::new(host));
        let mut pool = pool(8, 1);
        let to: Ipv6Addr = to.parse().unwrap();
        for (piece, device) in
            Datagram::new(Version::V6, 1, 3, 92).pieces(56).iter_mut().zip(devices)
        {
            piece[IP + 24..IP + 40].copy_from_slice(&to.octets());
            handle(&mut stack, &mut pool, piece, device);
        }
        assert_eq!(counters.ip6.reasm_oks.get(), u64::from(is_whole), "{to} {devices:?}");
        let waiting = if is_whole { 0 } else { 2 };
        assert_eq!(stack.network().fragments().frames(), waiting);
    }
}

fn handle(stack: &mut Stack, pool: &mut Pool, bytes: &[u8], queue: u16) {
    let mut packets = vec![packet(pool, bytes)];
    let (cpu, rx_queue) = (CpuId(0), RxQueue(queue));
    stack.handle(&mut Batch { cpu, rx_queue, packets: &mut packets, notes: &[], pool });
}

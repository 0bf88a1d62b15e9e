//! A flow that moves between CPUs while its fragments wait: each fragment may arrive on another
//! CPU.

use std::collections::BTreeSet;
use std::sync::{Arc, Barrier};
use std::thread;

use forebay_buf::Pool;
use forebay_stack::network::reassembly::{Fragments, FragmentsConfig};
use forebay_stack::network::{
    Identity, NetworkConfig, NetworkCounters, NetworkLayer, NetworkVerdict, Prefix,
};
use proptest::prelude::*;

use crate::reassembly::frames::{Datagram, Version, packet, pools};

/// One CPU: its memory, and its own part of the network layer.
struct Cpu {
    pool: Pool,
    network: NetworkLayer,
    identity: Identity,
}

impl Cpu {
    /// Creates a CPU for each pool; they share the waiting fragments.
    fn all(pools: Vec<Pool>) -> Vec<Self> {
        let fragments = Arc::new(Fragments::shared(FragmentsConfig::default(), pools.len()));
        let prefix = |address: &str, bits| Prefix { address: address.parse().unwrap(), bits };
        let addresses = vec![prefix("10.9.0.1", 8), prefix("fd00::1", 16)];
        let identity = Identity { addresses, mtu: 1500, ..Identity::default() };
        let cpu = |pool| {
            let (config, counters) = (NetworkConfig::default(), Arc::<NetworkCounters>::default());
            let network = NetworkLayer::with_fragments(Arc::clone(&fragments), config, counters);
            Self { pool, network, identity: identity.clone() }
        };
        pools.into_iter().map(cpu).collect()
    }

    /// Processes a fragment from any queue; returns the bytes of the datagram that it completes.
    fn receive(&mut self, packet: forebay_rx::Packet) -> Option<Vec<u8>> {
        match self.network.receive(packet, &self.identity, 1, &mut self.pool) {
            NetworkVerdict::Kept => None,
            NetworkVerdict::Datagram(packet) => {
                let bytes = packet.fragments().flatten().copied().collect();
                self.pool.put(packet.frame);
                Some(bytes)
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Checks that no fragments wait, no packets were dropped, and all memory was returned.
fn all_is_well(mut cpus: Vec<Cpu>) {
    for cpu in &mut cpus {
        cpu.pool.flush();
        assert_eq!(cpu.network.counters().drops.total(), 0);
        assert_eq!(cpu.network.fragments().frames(), 0);
        assert_eq!(cpu.network.fragments().held_bytes(), [0, 0]);
    }
    for cpu in &mut cpus {
        assert_eq!(cpu.pool.in_use(), 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// With fragments arriving on any CPUs, in any order, all datagrams are completed.
    #[test]
    fn promise_2_fragments_meet_whatever_cpus_got_them(
        shapes in proptest::collection::vec((any::<bool>(), 100usize..6000), 1..12),
        places in proptest::collection::vec((any::<prop::sample::Index>(), 0usize..64), 200),
        count in 1usize..9,
    ) {
        let mut cpus = Cpu::all(pools(count, 100, 1));
        let datagrams: Vec<_> = (0..)
            .zip(shapes)
            .map(|(from, (is_v4, len))| {
                let version = if is_v4 { Version::V4 } else { Version::V6 };
                Datagram::new(version, from, from.into(), len)
            })
            .collect();
        let mut pieces: Vec<_> = datagrams.iter().flat_map(|it| it.pieces(600)).collect();
        for (at, (index, _)) in places.iter().enumerate().take(pieces.len()) {
            let other = index.index(pieces.len());
            pieces.swap(at, other);
        }
        let mut whole = BTreeSet::new();
        for (piece, (_, place)) in pieces.iter().zip(places.iter().cycle()) {
            // The packet is in the memory of the polling CPU, and processed by another.
            let packet = packet(&mut cpus[place / 8 % count].pool, piece);
            whole.extend(cpus[place % count].receive(packet));
        }
        prop_assert!(datagrams.iter().all(|it| it.pieces(600).len() == 1 || whole.contains(&it.whole)));
        all_is_well(cpus);
    }
}

/// With concurrent threads that receive the fragments, all datagrams are completed.
#[test]
#[expect(clippy::disallowed_methods, reason = "the threads of CPUs")]
fn promise_2_fragments_meet_whatever_threads_have_them() {
    const CPUS: u16 = 4;
    const DATAGRAMS: u16 = 400;
    let datagram = |id: u16| Datagram::new(Version::V4, id, id.into(), 2000);
    let barrier = Arc::new(Barrier::new(CPUS.into()));
    let threads =
        Cpu::all(pools(CPUS.into(), 2000, 1)).into_iter().zip(0..CPUS).map(|(cpu, own)| {
            let barrier = Arc::clone(&barrier);
            thread::spawn(move || {
                let (mut cpu, mut whole) = (cpu, Vec::new());
                barrier.wait();
                for id in 0..DATAGRAMS {
                    // Four fragments, each on another CPU.
                    let piece = &datagram(id).pieces(504)[usize::from((own + id) % CPUS)];
                    let packet = packet(&mut cpu.pool, piece);
                    whole.extend(cpu.receive(packet));
                }
                (cpu, whole)
            })
        });
    let threads: Vec<_> = threads.collect();
    let (cpus, whole): (Vec<_>, Vec<_>) =
        threads.into_iter().map(|thread| thread.join().unwrap()).unzip();
    let whole: BTreeSet<_> = whole.into_iter().flatten().collect();
    assert!((0..DATAGRAMS).all(|id| whole.contains(&datagram(id).whole)));
    all_is_well(cpus);
}

//! A flood of fragments that never complete, a hundred times as many as valid ones: memory stays
//! within its limit, and valid datagrams get through.

use crate::reassembly::frames::{Datagram, Version, pool};
use crate::reassembly::{FragmentsConfig, ReassemblyLimits, Rig};

/// Flood fragments per valid one.
const FLOOD: u32 = 100;

const GOOD_DATAGRAMS: u32 = 60;

/// Limits at a quarter of the kernel's default: the flood is about ten times as large.
const LIMITS: ReassemblyLimits =
    ReassemblyLimits { high_thresh: 1 << 20, timeout_ns: 30_000_000_000, max_dist: 64 };

/// Sources of the flood.
#[derive(Clone, Copy, Debug)]
enum Flooder {
    /// One host.
    One,
    /// A few hosts.
    Some(u16),
    /// A new address for each fragment.
    Everybody,
}

impl Flooder {
    fn source(self, number: u32) -> u16 {
        let number = u16::try_from(number % 65_000).unwrap();
        match self {
            Self::One => 500,
            Self::Some(hosts) => 500 + number % hosts,
            Self::Everybody => 500 + number,
        }
    }
}

/// Number of valid datagrams that get through, of three fragments each, `at_once` of them
/// interleaved. The flood begins with the first valid fragment or, if several hosts take turns,
/// after each host has sent one.
fn good_under(cpus: usize, flooder: Flooder, version: Version, at_once: u32) -> u32 {
    let pieces = 3;
    let config = FragmentsConfig { ipv4: LIMITS, ipv6: LIMITS, seed: [5; 16] };
    let mut rig = Rig::of_cpus(cpus, config, pool(700, 2));
    let (mut number, mut through) = (0, 0);
    let calm = if at_once > 1 { 0 } else { FLOOD };
    for first in (0..GOOD_DATAGRAMS).step_by(at_once.try_into().unwrap()) {
        let good = (first..first + at_once)
            .map(|id| Datagram::new(version, u16::try_from(id - first).unwrap(), id, pieces * 400));
        let good: Vec<_> = good.map(|datagram| (datagram.pieces(408), datagram)).collect();
        for piece in 0..good[0].0.len() {
            for (pieces, datagram) in &good {
                for out in rig.add_all([&pieces[piece]]) {
                    assert!(out == datagram.whole);
                    through += 1;
                }
                for _ in 0..if first == 0 { calm } else { FLOOD } {
                    let bad = Datagram::new(version, flooder.source(number), number, 100);
                    number += 1;
                    assert!(rig.add_all([&bad.cut(0, 56)]).is_empty());
                    let bytes = rig.fragments.held_bytes();
                    assert!(bytes.iter().all(|&bytes| bytes <= LIMITS.high_thresh), "{bytes:?}");
                }
                rig.reasons();
            }
        }
    }
    rig.all_are_accounted_for();
    through
}

#[test]
fn fragment_flood_spares_good_datagrams() {
    for version in [Version::V4, Version::V6] {
        for flooder in [Flooder::One, Flooder::Some(3), Flooder::Some(200), Flooder::Everybody] {
            for cpus in [1, 8, 64] {
                let through = good_under(cpus, flooder, version, 1);
                assert_eq!(through, GOOD_DATAGRAMS, "{version:?} under {flooder:?}, {cpus} CPUs");
            }
        }
    }
}

/// Between two fragments of a valid datagram 600 flood fragments arrive, more than fit in memory.
#[test]
fn known_sources_pass_fragment_flood() {
    for flooder in [Flooder::One, Flooder::Some(200), Flooder::Everybody] {
        for cpus in [1, 8, 64] {
            let through = good_under(cpus, flooder, Version::V4, 6);
            assert_eq!(through, GOOD_DATAGRAMS, "under {flooder:?}, {cpus} CPUs");
        }
    }
}

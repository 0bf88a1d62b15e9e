//! Hostile frames, compared with the kernel's verdict.

use std::collections::BTreeMap;

use forebay_rx::parse::Verify;
use forebay_sys::random::Random;

use crate::network::kernel::{Delivered, Kernel, snmp};
use crate::network::local_addresses::Us;
use crate::network::{Test, bases, fragments, frames};

pub(crate) const TESTS: &[Test] = &[
    ("ten_thousand_hostile_frames_match_kernel", hostile_frames),
    ("header_bytes_may_be_anything", every_byte),
    ("any_addresses_and_options_are_accepted", address_pairs),
    ("hostile_fragments_match_kernel", hostile_fragments),
];

/// Frames per seed.
const FRAMES: u64 = 10_000;
/// Differences printed in full.
const SHOWN: usize = 10;
/// Frames printed before a difference, as they may be its cause.
const BEFORE: usize = 40;

/// Counters compared with the kernel's, some only as a sum:
/// - the kernel knows protocols that the stack does not (TCP, IGMP), which are unknown here;
/// - the stack has no routes, so an IPv6 packet to another host counts as an address error;
/// - the kernel verifies the checksum of a longer multicast datagram only if a socket receives it.
const COUNTERS: [&str; 27] = [
    "IpInReceives",
    "IpInHdrErrors",
    "IpInAddrErrors",
    "IpInDiscards",
    "IpInDelivers+IpInUnknownProtos",
    "IpReasmReqds",
    "IpReasmOKs",
    "IpReasmFails",
    "UdpInDatagrams",
    "UdpNoPorts",
    "UdpInErrors+UdpIgnoredMulti",
    "UdpInCsumErrors+UdpIgnoredMulti",
    "IcmpInMsgs",
    "IcmpInErrors",
    "IcmpInCsumErrors",
    "Ip6InReceives",
    "Ip6InHdrErrors",
    "Ip6InAddrErrors+Ip6InNoRoutes",
    "Ip6InTruncatedPkts",
    "Ip6InDelivers+Ip6InUnknownProtos",
    "Ip6ReasmReqds",
    "Ip6ReasmOKs",
    "Ip6ReasmFails",
    "Udp6InDatagrams",
    "Udp6NoPorts",
    "Udp6InErrors+Udp6IgnoredMulti",
    "Icmp6InCsumErrors",
];

/// The kernel and the stack, given the same frames.
struct Both {
    kernel: Kernel,
    /// The kernel's counters before the test.
    before: BTreeMap<String, u64>,
    us: Us,
    frames: u64,
    fates: BTreeMap<String, u64>,
    differences: Vec<Difference>,
}

/// A frame with different outcomes.
struct Difference {
    frame: Vec<u8>,
    number: u64,
    kernel: Vec<Delivered>,
    us: Vec<Delivered>,
    fate: String,
}

impl Both {
    fn new() -> Self {
        let (kernel, us) = (Kernel::new(), Us::new());
        kernel.join();
        let before = snmp();
        Self { kernel, before, us, frames: 0, fates: BTreeMap::new(), differences: Vec::new() }
    }

    fn offer(&mut self, frame: &[u8]) {
        let number = self.frames;
        self.frames += 1;
        let kernel = self.kernel.offer(frame);
        let verify = if number.is_multiple_of(2) { Verify::Checksums } else { Verify::Nothing };
        let (us, fate) = self.us.offer(frame, verify);
        *self.fates.entry(fate.clone()).or_default() += 1;
        if us != kernel {
            self.differences.push(Difference { frame: frame.to_vec(), number, kernel, us, fate });
        }
    }

    /// Prints the differences. Fails if there are any, or if anything was lost.
    fn end(self, seed: u64) {
        eprintln!("seed {seed}: {:#?}", self.fates);
        for difference in self.differences.iter().take(SHOWN) {
            let Difference { frame, number, kernel, us, fate } = difference;
            eprintln!("frame {number}: {}", hex::encode(frame));
            eprintln!("  the kernel: {}\n  we: {fate}, {}", shown(kernel), shown(us));
        }
        assert!(self.differences.is_empty(), "{} differences", self.differences.len());
        let after = snmp();
        let counted: BTreeMap<_, _> = self.us.counted().into_iter().collect();
        for names in COUNTERS {
            let names = names.split('+');
            let kernels: u64 = names.clone().map(|name| after[name] - self.before[name]).sum();
            let ours: u64 = names.clone().filter_map(|name| counted.get(name)).sum();
            let names: Vec<_> = names.collect();
            assert_eq!(ours, kernels, "we, and the kernel, counted {names:?}");
        }
        self.us.end(self.frames);
    }
}

fn shown(delivered: &[Delivered]) -> String {
    let shown = |Delivered { port, source, payload }: &Delivered| {
        format!("{} bytes from {source} to port {port}: {}", payload.len(), hex::encode(payload))
    };
    if delivered.is_empty() { "nothing".into() } else { delivered.iter().map(shown).collect() }
}

/// Seed: fixed, or as requested.
fn seed() -> u64 {
    std::env::var("FOREBAY_SEED").map_or(6, |seed| seed.parse().unwrap())
}

fn hostile_frames() {
    let (seed, mut both) = (seed(), Both::new());
    let mut random = Random::new(seed);
    for number in 0..FRAMES {
        both.offer(&frames::frame(&mut random, number));
    }
    both.end(seed);
}

/// Changes one byte at a time, to every value, with everything else valid.
fn every_byte() {
    let mut both = Both::new();
    for base in bases::bases() {
        for len in frames::ETHERNET_BYTES..base.frame.len() {
            both.offer(&base.frame[..len]);
        }
        for at in 0..base.header_len {
            for value in 0..=u8::MAX {
                let mut frame = base.frame.clone();
                frame[at] = value;
                base.sum_up(&mut frame);
                both.offer(&frame);
            }
        }
    }
    both.end(0);
}

fn address_pairs() {
    let mut both = Both::new();
    bases::address_pairs().iter().for_each(|frame| both.offer(frame));
    bases::options_in_a_row().iter().for_each(|frame| both.offer(frame));
    both.end(0);
}

fn hostile_fragments() {
    let (seed, mut both) = (seed(), Both::new());
    let mut random = Random::new(seed);
    let (mut number, mut shown) = (0, 0);
    while both.frames < FRAMES {
        let frames = fragments::frames(&mut random, number);
        number += 4;
        let before = both.differences.len();
        frames.iter().for_each(|frame| both.offer(frame));
        if both.differences.len() > before && shown < 3 && frames.len() < BEFORE {
            shown += 1;
            eprintln!("a difference among these frames:");
            frames
                .iter()
                .for_each(|frame| eprintln!("  {}", hex::encode(&frame[..frame.len().min(90)])));
        }
    }
    both.end(seed);
}

//! Reassembly: fragments wait for the rest of their datagram, in bounded memory and for a bounded
//! time.
//!
//! The rules are those of Linux 6.18 (`net/ipv4/{ip_fragment,inet_fragment}.c`,
//! `net/ipv6/reassembly.c`), so that the result is the datagram that a kernel socket would get:
//! duplicates are discarded, any overlap drops the whole datagram (RFC 5722, applied to IPv4 too),
//! and the headers are the first fragment's. The one difference is eviction when memory is full:
//! see [`held`].
//!
//! All fragments of a datagram have the same flow hash, that of their addresses, so they normally
//! reach the same CPU; but the flow may move to another CPU in between. Waiting fragments are
//! therefore per host: all CPUs share them, in [`shards`].

mod shards; //   incomplete datagrams of one IP version, for all CPUs
mod held; //     one shard of them, in bounded memory
mod fragment; // a fragment's position in its datagram
mod pieces; //   pieces of one datagram, by the kernel's rules
mod join; //     from a complete datagram to one packet

use std::sync::atomic::{AtomicU64, Ordering};

use forebay_buf::Pool;
use forebay_rx::packet::{Packet, Shape};
use forebay_rx::parse::Network;
use fragment::FragmentPart;
use held::Added;
use join::join;
use shards::{Shards, shards_for};

use super::NetworkDrop;

/// Memory and time limits for incomplete datagrams: the kernel's sysctls, with its defaults.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FragmentsConfig {
    /// `net.ipv4.ipfrag_*`.
    pub ipv4: ReassemblyLimits,
    /// `net.ipv6.ip6frag_*`.
    pub ipv6: ReassemblyLimits,
    /// Secret key of the hash used to look up datagrams.
    pub seed: [u8; 16],
}

/// The limits of one IP version.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReassemblyLimits {
    /// `ipfrag_high_thresh`, `ip6frag_high_thresh`: upper bound on the memory of waiting fragments,
    /// by `truesize`, in bytes. 0: no fragment is accepted.
    pub high_thresh: u32,
    /// `ipfrag_time`, `ip6frag_time`: longest time between the arrival of a datagram's first and
    /// last fragment, in ns.
    pub timeout_ns: u64,
    /// `ipfrag_max_dist`: upper bound on the fragments of the same source between two fragments of
    /// a datagram. 0: no bound.
    pub max_dist: u32,
}

impl Default for FragmentsConfig {
    fn default() -> Self {
        let ipv4 =
            ReassemblyLimits { high_thresh: 4 << 20, timeout_ns: 30_000_000_000, max_dist: 64 };
        let ipv6 = ReassemblyLimits { timeout_ns: 60_000_000_000, max_dist: 0, ..ipv4 };
        Self { ipv4, ipv6, seed: [0; 16] }
    }
}

/// Result of adding a fragment.
#[must_use]
#[derive(Debug)]
pub enum Reassembly {
    /// The fragment waits for the others.
    Waits,
    /// The datagram is complete: one packet, parsed again with checksums verified. It is in one
    /// frame if the pool has one that is large enough; else [in several](Shape::FragList).
    Complete(Packet),
    /// The fragment is dropped. If it invalidates its datagram, the other fragments are dropped as
    /// well.
    Dropped(Packet, NetworkDrop),
}

/// Failed reassemblies, counted as in the kernel: per datagram, not per fragment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Failures {
    /// `ReasmFails`: datagrams invalid, timed out, or evicted.
    pub fails: u64,
    /// `ReasmTimeout`: datagrams timed out; included in `fails`.
    pub timeouts: u64,
}

/// Fragments dropped along the way. The caller counts them and returns them to their pools.
#[derive(Debug, Default)]
pub struct GivenUp {
    /// Fragments, each with its drop reason.
    pub packets: Vec<(Packet, NetworkDrop)>,
    /// Failed datagrams, by IP version.
    pub failures: [Failures; 2],
}

impl GivenUp {
    fn add(&mut self, packets: Vec<Packet>, why: NetworkDrop) {
        self.packets.extend(packets.into_iter().map(|packet| (packet, why)));
    }

    fn failures_of(&mut self, network: Network) -> &mut Failures {
        let [ipv4, ipv6] = &mut self.failures;
        if network == Network::Ipv6 { ipv6 } else { ipv4 }
    }
}

/// Incomplete datagrams of a host, shared by its CPUs.
#[derive(Debug)]
pub struct Fragments {
    ipv4: Shards,
    ipv6: Shards,
    joined: AtomicU64,
}

impl Fragments {
    /// Creates an empty store for a host of one CPU.
    #[must_use]
    pub fn new(config: FragmentsConfig) -> Self {
        Self::shared(config, 1)
    }

    /// Creates an empty store for a host of `cpus` CPUs.
    #[must_use]
    pub fn shared(config: FragmentsConfig, cpus: usize) -> Self {
        let FragmentsConfig { ipv4, ipv6, seed } = config;
        let count = shards_for(cpus);
        Self {
            ipv4: Shards::new(Network::Ipv4, ipv4, seed, count),
            ipv6: Shards::new(Network::Ipv6, ipv6, seed, count),
            joined: AtomicU64::new(0),
        }
    }

    /// Adds a fragment: a packet whose [`Fragment`](forebay_rx::parse::Fragment) is `First` or
    /// `Later`, with a valid IP header and, in IPv6, valid extension headers before the fragment
    /// header.
    ///
    /// Other fragments may have to be dropped to make room; they are put into `given_up`. So every
    /// frame ever added is [held](Self::frames), [joined](Self::joined), or was given up. Frames
    /// not used in a completed datagram go back through `pool`.
    pub fn add(
        &self,
        packet: Packet,
        now_ns: u64,
        pool: &mut Pool,
        given_up: &mut GivenUp,
    ) -> Reassembly {
        let fragment = match FragmentPart::read(&packet) {
            Ok(fragment) if packet.shape() == Shape::Single => fragment,
            Ok(_) => return Reassembly::Dropped(packet, NetworkDrop::FragInvalid),
            Err(why) => return Reassembly::Dropped(packet, why),
        };
        let network = packet.headers.network;
        let shards = if network == Network::Ipv6 { &self.ipv6 } else { &self.ipv4 };
        let pieces = match shards.add(packet, &fragment, now_ns, given_up) {
            Added::Waits => return Reassembly::Waits,
            Added::Dropped(packet, why) => return Reassembly::Dropped(packet, why),
            Added::Whole(pieces) => pieces,
        };
        let frames = pieces.count();
        match join(pieces, pool) {
            Ok(packet) => {
                self.joined.fetch_add(frames.into(), Ordering::Relaxed);
                Reassembly::Complete(packet)
            }
            Err(no_datagram) => {
                given_up.failures_of(network).fails += 1;
                let mut packets = no_datagram.pieces.into_packets();
                let latest = packets.pop();
                given_up.add(packets, no_datagram.why);
                // A complete datagram has packets, and the packet just added is the last one.
                match latest {
                    Some(latest) => Reassembly::Dropped(latest, no_datagram.why),
                    None => Reassembly::Waits,
                }
            }
        }
    }

    /// Drops datagrams that were not complete in time, whichever CPU received their fragments.
    pub fn expire(&self, now_ns: u64, given_up: &mut GivenUp) {
        self.ipv4.expire(now_ns, given_up);
        self.ipv6.expire(now_ns, given_up);
    }

    /// Drops all waiting fragments, at shutdown.
    pub fn clear(&self, given_up: &mut GivenUp) {
        self.ipv4.clear(given_up);
        self.ipv6.clear(given_up);
    }

    /// Number of waiting frames.
    #[must_use]
    pub fn frames(&self) -> u32 {
        self.ipv4.usage().frames() + self.ipv6.usage().frames()
    }

    /// Number of frames that became part of a complete datagram.
    #[must_use]
    pub fn joined(&self) -> u64 {
        self.joined.load(Ordering::Relaxed)
    }

    /// Memory that waiting fragments occupy, by IP version: never more than its `high_thresh`.
    #[must_use]
    pub fn held_bytes(&self) -> [u32; 2] {
        [self.ipv4.usage().bytes(), self.ipv6.usage().bytes()]
    }
}

//! Fragments wait here until their datagram is whole, in bounded memory and for a bounded time.
//!
//! The rules are those of Linux 6.18 (`net/ipv4/{ip_fragment,inet_fragment}.c`,
//! `net/ipv6/reassembly.c`), so that what comes out is what a socket of the kernel would get:
//! duplicates are left out, any overlap ends the whole datagram (RFC 5722, in IPv4 too), headers are
//! the first fragment's. What differs is who goes when memory is full: see [`held`].
//!
//! All fragments of a datagram have the same flow hash, that of their addresses, so they come to CPUs
//! one after the other; but the flow may move between them. So what waits is the host's: all CPUs share
//! it, in [`shards`].

mod fragment;
mod held;
mod join;
mod pieces;
mod shards;

use std::sync::atomic::{AtomicU64, Ordering};

use fragment::Fragment;
use held::Added;
use join::join;
use mem::Pool;
use path::packet::{Packet, Shape};
use path::parse::Network;
use shards::{Shards, shards_for};

use super::NetworkDrop;

/// Limits on memory and time of fragments that wait: the kernel's sysctls, with its defaults.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FragmentsConfig {
    /// `net.ipv4.ipfrag_*`.
    pub ipv4: Limits,
    /// `net.ipv6.ip6frag_*`.
    pub ipv6: Limits,
    /// The secret under which datagrams are found.
    pub seed: [u8; 16],
}

/// The limits of one IP version.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// `ipfrag_high_thresh`, `ip6frag_high_thresh`: the most that waiting fragments may occupy, by
    /// their truesize, in bytes. 0: no fragment is taken.
    pub high_thresh: u32,
    /// `ipfrag_time`, `ip6frag_time`: how long a datagram may take from its first fragment to come
    /// to its last, in nanoseconds.
    pub timeout_ns: u64,
    /// `ipfrag_max_dist`: how many fragments of the same source may come between two of a datagram.
    /// 0: any number.
    pub max_dist: u32,
}

impl Default for FragmentsConfig {
    fn default() -> Self {
        let ipv4 = Limits { high_thresh: 4 << 20, timeout_ns: 30_000_000_000, max_dist: 64 };
        let ipv6 = Limits { timeout_ns: 60_000_000_000, max_dist: 0, ..ipv4 };
        Self { ipv4, ipv6, seed: [0; 16] }
    }
}

/// Outcome of a fragment.
#[must_use]
#[derive(Debug)]
pub enum Reassembly {
    /// The fragment waits for the others.
    Waits,
    /// The last one missing: the datagram as one packet, parsed anew with checksums verified.
    /// In one frame where the pool has one that is large enough; else [in several](Shape::FragList).
    Complete(Packet),
    /// The fragment is dropped. If it spoiled its datagram, the other fragments are among the dropped too.
    Dropped(Packet, NetworkDrop),
}

/// Datagrams that did not become whole, counted as the kernel counts them: not by fragments.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Failures {
    /// `ReasmFails`: those that were wrong, too late, or had to go.
    pub fails: u64,
    /// `ReasmTimeout`: those of them that were too late.
    pub timeouts: u64,
}

/// Fragments given up on the way, for the caller to count and to send home.
#[derive(Debug, Default)]
pub struct GivenUp {
    /// Fragments, and why.
    pub packets: Vec<(Packet, NetworkDrop)>,
    /// Datagrams, by IP version.
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

/// Fragments that wait, of a host: its CPUs share them.
#[derive(Debug)]
pub struct Fragments {
    ipv4: Shards,
    ipv6: Shards,
    joined: AtomicU64,
}

impl Fragments {
    /// None, for a host of one CPU.
    #[must_use]
    pub fn new(config: FragmentsConfig) -> Self {
        Self::shared(config, 1)
    }

    /// None, for a host of so many CPUs.
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

    /// Takes a fragment: a packet whose [`Fragment`](path::parse::Fragment) is `First` or `Later`,
    /// whose IP header is right, and whose IPv6 extension headers before the fragment header are.
    ///
    /// Others may have to go for it. They are put into `given_up`; so every frame that was ever added
    /// is [held](Self::frames), [joined](Self::joined), or was given up. Of a datagram that is
    /// complete, those frames that are not part of it go home through `pool`.
    pub fn add(
        &self,
        packet: Packet,
        now_ns: u64,
        pool: &mut Pool,
        given_up: &mut GivenUp,
    ) -> Reassembly {
        let fragment = match Fragment::read(&packet) {
            Ok(fragment) if packet.shape() == Shape::Single => fragment,
            Ok(_) => return Reassembly::Dropped(packet, NetworkDrop::FragInvalid),
            Err(why) => return Reassembly::Dropped(packet, why),
        };
        let network = packet.headers.network;
        let shards = if network == Network::Ipv6 { &self.ipv6 } else { &self.ipv4 };
        let pieces = match shards.add(packet, (&fragment, now_ns), given_up) {
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
                // What was whole has packets, and this one was the last to come.
                match latest {
                    Some(latest) => Reassembly::Dropped(latest, no_datagram.why),
                    None => Reassembly::Waits,
                }
            }
        }
    }

    /// Drops datagrams that were not complete in time, whichever CPU had them.
    pub fn expire(&self, now_ns: u64, given_up: &mut GivenUp) {
        self.ipv4.expire(now_ns, given_up);
        self.ipv6.expire(now_ns, given_up);
    }

    /// Drops all that waits: at the end.
    pub fn clear(&self, given_up: &mut GivenUp) {
        self.ipv4.clear(given_up);
        self.ipv6.clear(given_up);
    }

    /// Frames that wait.
    #[must_use]
    pub fn frames(&self) -> u32 {
        self.ipv4.usage().frames() + self.ipv6.usage().frames()
    }

    /// Frames that became part of a complete datagram.
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

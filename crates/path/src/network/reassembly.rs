//! Fragments wait here until their datagram is whole, in bounded memory and for a bounded time.
//!
//! The rules are those of Linux 6.18 (`net/ipv4/{ip_fragment,inet_fragment}.c`,
//! `net/ipv6/reassembly.c`), so that what comes out is what a socket of the kernel would get:
//! duplicates are left out, any overlap ends the whole datagram (RFC 5722, in IPv4 too), headers are
//! the first fragment's. What differs is who goes when memory is full: see [`held`].
//!
//! All fragments of a datagram have the same flow hash, that of their addresses, so they come to the
//! same CPU, and this is its own.

mod fragment;
mod held;
mod join;
mod pieces;

use mem::Pool;

use super::NetworkDrop;
use crate::packet::{Packet, Shape};
use crate::parse::Network;
use fragment::Fragment;
use held::{Added, Held};
use join::join;

/// How much may wait, and for how long: the kernel's sysctls, with its defaults.
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

/// What became of a fragment.
#[must_use]
#[derive(Debug)]
pub enum Reassembly {
    /// It waits for the others.
    Waits,
    /// It was the last one missing: the datagram as one packet, parsed anew with checksums verified.
    /// In one frame where the pool has one that is large enough; else [in several](Shape::FragList).
    Complete(Packet),
    /// It is dropped. If it spoiled its datagram, the other fragments are among the dropped too.
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

/// Fragments that wait, of one CPU.
#[derive(Debug)]
pub struct Fragments {
    ipv4: Held,
    ipv6: Held,
    joined: u64,
}

impl Fragments {
    /// None.
    #[must_use]
    pub fn new(config: FragmentsConfig) -> Self {
        let FragmentsConfig { ipv4, ipv6, seed } = config;
        Self {
            ipv4: Held::new(Network::Ipv4, ipv4, seed),
            ipv6: Held::new(Network::Ipv6, ipv6, seed),
            joined: 0,
        }
    }

    /// Takes a fragment: a packet whose [`Fragment`](crate::parse::Fragment) is `First` or `Later`,
    /// whose IP header is right, and whose IPv6 extension headers before the fragment header are.
    ///
    /// Others may have to go for it. They are put into `dropped`; so every frame that was ever added
    /// is [held](Self::frames), [joined](Self::joined), or was dropped. Of a datagram that is
    /// complete, those frames that are not part of it go home through `pool`.
    pub fn add(
        &mut self,
        packet: Packet,
        now_ns: u64,
        pool: &mut Pool,
        dropped: &mut Vec<(Packet, NetworkDrop)>,
    ) -> Reassembly {
        self.expire(now_ns, dropped);
        let fragment = match Fragment::read(&packet) {
            Ok(fragment) if packet.shape() == Shape::Single => fragment,
            Ok(_) => return Reassembly::Dropped(packet, NetworkDrop::FragInvalid),
            Err(why) => return Reassembly::Dropped(packet, why),
        };
        let is_ipv6 = packet.headers.network == Network::Ipv6;
        let held = if is_ipv6 { &mut self.ipv6 } else { &mut self.ipv4 };
        let pieces = match held.add(packet, &fragment, now_ns, dropped) {
            Added::Waits => return Reassembly::Waits,
            Added::Dropped(packet, why) => return Reassembly::Dropped(packet, why),
            Added::Whole(pieces) => pieces,
        };
        let frames = pieces.count();
        match join(pieces, pool) {
            Ok(packet) => {
                self.joined += u64::from(frames);
                Reassembly::Complete(packet)
            }
            Err(no_datagram) => {
                let held = if is_ipv6 { &mut self.ipv6 } else { &mut self.ipv4 };
                held.failures.fails += 1;
                let mut packets = no_datagram.pieces.into_packets();
                let latest = packets.pop();
                dropped.extend(packets.into_iter().map(|packet| (packet, no_datagram.why)));
                // What was whole has packets, and this one was the last to come.
                match latest {
                    Some(latest) => Reassembly::Dropped(latest, no_datagram.why),
                    None => Reassembly::Waits,
                }
            }
        }
    }

    /// Drops datagrams that were not complete in time.
    pub fn expire(&mut self, now_ns: u64, dropped: &mut Vec<(Packet, NetworkDrop)>) {
        self.ipv4.expire(now_ns, dropped);
        self.ipv6.expire(now_ns, dropped);
    }

    /// Drops all that waits: at the end.
    pub fn clear(&mut self, dropped: &mut Vec<(Packet, NetworkDrop)>) {
        self.ipv4.clear(dropped);
        self.ipv6.clear(dropped);
    }

    /// Frames that wait.
    #[must_use]
    pub fn frames(&self) -> u32 {
        self.ipv4.frames() + self.ipv6.frames()
    }

    /// Frames that became part of a complete datagram.
    #[must_use]
    pub fn joined(&self) -> u64 {
        self.joined
    }

    /// What failed so far, by IP version.
    #[must_use]
    pub fn failures(&self) -> [Failures; 2] {
        [self.ipv4.failures, self.ipv6.failures]
    }

    /// What waiting fragments occupy, by IP version: never more than its `high_thresh`.
    #[must_use]
    pub fn held_bytes(&self) -> [u32; 2] {
        [self.ipv4.bytes(), self.ipv6.bytes()]
    }
}

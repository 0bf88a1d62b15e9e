//! Incomplete datagrams of one IP version, in bounded memory: one shard, with the datagrams of some
//! sources.
//!
//! The kernel drops new fragments while its memory is full: a flood of first fragments then locks
//! all other hosts out until the fragments time out, after half a minute or more. Here the newest
//! fragment is always accepted, and the datagram least likely to be completed is evicted:
//!
//! 1. While more than half of the memory is in use, a source that holds more than its share loses
//!    its own datagram that has waited longest, so one source's flood evicts only its own
//!    fragments.
//! 2. When all memory is in use, strangers are evicted first: datagrams of sources that have not
//!    completed one before, or lost one since. A flood under many spoofed addresses evicts only
//!    itself and other new sources. Known sources are evicted first only while strangers are within
//!    their reserve.
//! 3. Among them, the datagram that has waited longest for its next fragment is evicted, so one
//!    that keeps getting fragments stays. A new source therefore gets through as long as less than
//!    the strangers' reserve arrives between two of its fragments.
//!
//! A source is an IPv4 address, or an IPv6 subnet (/64), as one host can use all addresses of its
//! subnet. All datagrams of a source are in one shard, which is searched first for a victim: see
//! [`shards`](super::shards).

#![allow(clippy::indexing_slicing, reason = "arrays by standing, keys of a fixed size")]

use std::sync::Arc;

use forebay_rx::packet::Packet;
use forebay_rx::parse::Network;
use siphasher::sip::SipHasher13;

use super::fragment::{FragmentPart, Key};
use super::pieces::{Fit, Pieces};
use super::shards::{Others, Usage};
use super::{GivenUp, ReassemblyLimits};
use crate::network::NetworkDrop;
use crate::network::slots::{SlotList, SlotPlace, SourceSlots};

/// Memory charged for an incomplete datagram in addition to its packets.
const DATAGRAM_BYTES: u32 = 256;

/// Divisor for a source's share of the memory; the share is at least [`SHARE_LEAST_BYTES`].
const SHARE_DIVISOR: u32 = 16;

/// Smallest share: a datagram of 64 KiB in fragments of 1500 bytes, each in a chunk of 2 KiB.
const SHARE_LEAST_BYTES: u32 = 128 << 10;

/// Divisor for the part of the memory reserved for strangers.
const STRANGERS_DIVISOR: u32 = 4;

/// Upper bound on datagrams evicted for one fragment. The largest frame takes as much memory as
/// this many datagrams of the smallest size.
const VICTIMS_MAX: u32 = 256;

/// Upper bound on fragments timed out at once, not counting the rest of the last one's datagram.
const EXPIRED_AT_ONCE: usize = 256;

/// Upper bound on sources remembered as known while they have no incomplete datagrams.
const KNOWN_SOURCES_MAX: u32 = 1024;

/// Lists that an incomplete datagram is in: all datagrams, by age; those of the same standing and
/// those of the same source, both by the arrival of their latest fragment.
const BY_AGE: usize = 0;
const OF_STANDING: usize = 1;
const OF_SOURCE: usize = 2;

/// The one list that a source may be in: sources without incomplete datagrams.
const IDLE: usize = 0;

/// Trust in a source of fragments; indexes arrays.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SourceStanding {
    Stranger = 0,
    Known = 1,
}

/// Incomplete datagrams of one IP version, of some sources.
#[derive(Debug)]
pub(super) struct HeldFragments {
    network: Network,
    limits: ReassemblyLimits,
    /// Memory used by all shards.
    usage: Arc<Usage>,
    hasher: SipHasher13,
    datagrams: SourceSlots<HeldDatagram, 3>,
    sources: SourceSlots<FragmentSource, 1>,
    by_age: SlotList,
    by_standing: [SlotList; 2],
    idle: SlotList,
    idle_count: u32,
    idle_max: u32,
}

#[derive(Debug)]
struct HeldDatagram {
    key: Key,
    source: SlotPlace,
    standing: SourceStanding,
    pieces: Pieces,
    bytes: u32,
    deadline_ns: u64,
    /// Value of the source's `count` when this datagram got its latest fragment.
    source_count: u32,
}

#[derive(Debug)]
struct FragmentSource {
    prefix: [u8; 8],
    datagrams: SlotList,
    bytes: u32,
    /// Fragments received from the source, modulo 2^32.
    count: u32,
    is_known: bool,
}

/// Result of adding a fragment.
#[must_use]
#[derive(Debug)]
pub(super) enum Added {
    /// The fragment waits for others.
    Waits,
    /// The fragment completes its datagram.
    Whole(Pieces),
    /// The fragment is dropped; others dropped along with it are already in `given_up`.
    Dropped(Packet, NetworkDrop),
}

impl HeldFragments {
    /// Creates one of `shards` shards.
    pub(super) fn new(
        network: Network,
        limits: ReassemblyLimits,
        hasher: SipHasher13,
        usage: Arc<Usage>,
        shards: u32,
    ) -> Self {
        let expected = (limits.high_thresh / 2048 / shards) as usize;
        Self {
            network,
            limits,
            usage,
            hasher,
            datagrams: SourceSlots::new(expected),
            sources: SourceSlots::new(expected),
            by_age: SlotList::default(),
            by_standing: [SlotList::default(); 2],
            idle: SlotList::default(),
            idle_count: 0,
            idle_max: KNOWN_SOURCES_MAX.div_ceil(shards),
        }
    }

    /// Adds a fragment to its datagram. If evictions in this shard do not make enough room,
    /// datagrams in `others` are evicted.
    pub(super) fn add(
        &mut self,
        packet: Packet,
        fragment: &FragmentPart,
        now_ns: u64,
        others: &Others<'_>,
        given_up: &mut GivenUp,
    ) -> Added {
        let (at, beside) = self.find_or_begin(fragment.key, now_ns, given_up);
        self.count(at, now_ns, given_up);
        let gap = match self.datagrams[at].pieces.fit(fragment, self.network) {
            Fit::Fits(gap) => gap,
            Fit::Duplicate => return Added::Dropped(packet, NetworkDrop::DupFrag),
            Fit::Spoils(why) => {
                self.drop_datagram(at, why, given_up);
                return Added::Dropped(packet, why);
            }
        };
        let need = packet.frame.truesize().saturating_add(beside);
        if !self.take_room(at, need, others, given_up) {
            self.drop_datagram(at, NetworkDrop::FragNomem, given_up);
            return Added::Dropped(packet, NetworkDrop::FragNomem);
        }
        self.usage.add_frames(1);
        self.touch(at);
        let datagram = &mut self.datagrams[at];
        datagram.pieces.place(gap, fragment, packet);
        if !datagram.pieces.is_whole() {
            return Added::Waits;
        }
        let source = datagram.source;
        self.sources[source].is_known = true;
        Added::Whole(self.take(at))
    }

    /// Drops timed-out datagrams, until `given_up` has [`EXPIRED_AT_ONCE`] fragments.
    pub(super) fn expire(&mut self, now_ns: u64, given_up: &mut GivenUp) {
        while given_up.packets.len() < EXPIRED_AT_ONCE
            && let Some(oldest) = self.by_age.first()
            && self.datagrams[oldest].deadline_ns <= now_ns
        {
            self.time_out(oldest, given_up);
        }
    }

    /// Drops all incomplete datagrams.
    pub(super) fn clear(&mut self, given_up: &mut GivenUp) {
        while let Some(oldest) = self.by_age.first() {
            self.drop_datagram(oldest, NetworkDrop::FragReasmTimeout, given_up);
        }
    }

    /// Evicts the datagram of this standing that has waited longest. Returns false if there is
    /// none.
    pub(super) fn lose_one(&mut self, standing: SourceStanding, given_up: &mut GivenUp) -> bool {
        let longest = self.by_standing[standing as usize].first();
        longest.inspect(|&at| self.lose(at, NetworkDrop::FragNomem, given_up)).is_some()
    }

    /// Finds or creates a fragment's datagram. Returns the additional memory to charge if it is
    /// new.
    fn find_or_begin(&mut self, key: Key, now_ns: u64, given_up: &mut GivenUp) -> (SlotPlace, u32) {
        let hash = self.hash(&key);
        if let Some(at) = self.datagrams.find(hash, |datagram| datagram.key == key) {
            if self.datagrams[at].deadline_ns > now_ns {
                return (at, 0);
            }
            // Timed out, but not dropped by `expire` yet.
            self.time_out(at, given_up);
        }
        let source = self.find_or_meet(&key);
        let standing = if self.sources[source].is_known {
            SourceStanding::Known
        } else {
            SourceStanding::Stranger
        };
        let datagram = HeldDatagram {
            key,
            source,
            standing,
            pieces: Pieces::default(),
            bytes: 0,
            deadline_ns: now_ns.saturating_add(self.limits.timeout_ns),
            source_count: 0,
        };
        let at = self.datagrams.insert(hash, datagram);
        self.datagrams.push_last(BY_AGE, &mut self.by_age, at);
        self.datagrams.push_last(OF_STANDING, &mut self.by_standing[standing as usize], at);
        self.datagrams.push_last(OF_SOURCE, &mut self.sources[source].datagrams, at);
        (at, DATAGRAM_BYTES)
    }

    /// Counts a fragment of the datagram's source, as the kernel's `ipfrag_max_dist` does. If the
    /// source has sent too many fragments since this datagram got one, the identification has
    /// wrapped, and the fragments present belong to an older datagram.
    fn count(&mut self, at: SlotPlace, now_ns: u64, given_up: &mut GivenUp) {
        let datagram = &mut self.datagrams[at];
        let source = &mut self.sources[datagram.source];
        source.count = source.count.wrapping_add(1);
        let distance = source.count.wrapping_sub(datagram.source_count);
        datagram.source_count = source.count;
        let max = self.limits.max_dist;
        if max == 0 || distance <= max || datagram.pieces.is_empty() {
            return;
        }
        given_up.failures_of(self.network).fails += 1;
        datagram.deadline_ns = now_ns.saturating_add(self.limits.timeout_ns);
        let before = datagram.pieces.restart();
        let bytes: u32 = before.iter().map(|packet| packet.frame.truesize()).sum();
        self.usage.remove_frames(u32::try_from(before.len()).unwrap_or(u32::MAX));
        given_up.add(before, NetworkDrop::FragTooFar);
        self.uncharge(at, bytes);
        self.datagrams.unlink(BY_AGE, &mut self.by_age, at);
        self.datagrams.push_last(BY_AGE, &mut self.by_age, at);
    }

    /// Charges `need` more bytes to a datagram, evicting others if necessary. Returns false if
    /// there is no room.
    fn take_room(
        &mut self,
        at: SlotPlace,
        need: u32,
        others: &Others<'_>,
        given_up: &mut GivenUp,
    ) -> bool {
        let high_thresh = self.limits.high_thresh;
        let share = (high_thresh / SHARE_DIVISOR).max(SHARE_LEAST_BYTES);
        let HeldDatagram { source, standing, .. } = self.datagrams[at];
        // Other CPUs charge and uncharge at the same time, so the number of attempts is bounded.
        for _ in 0..VICTIMS_MAX {
            let bytes = self.usage.bytes().saturating_add(need);
            let of_source = &self.sources[source];
            if bytes > high_thresh / 2 && of_source.bytes.saturating_add(need) > share {
                match self.longest_waiting(OF_SOURCE, of_source.datagrams, at) {
                    Some(victim) => self.lose(victim, NetworkDrop::FragNomem, given_up),
                    None => return false,
                }
            } else if self.usage.charge(need, standing, high_thresh) {
                self.note(at, need);
                return true;
            } else if !self.lose_some(at, others, given_up) {
                return false;
            }
        }
        false
    }

    /// Evicts the datagram that is least likely to be completed, except `at`: of the standing to be
    /// evicted first, in this shard or else in another; else of the other standing.
    fn lose_some(&mut self, at: SlotPlace, others: &Others<'_>, given_up: &mut GivenUp) -> bool {
        use SourceStanding::{Known, Stranger};
        let has_reserve =
            self.usage.strangers_bytes() <= self.limits.high_thresh / STRANGERS_DIVISOR;
        let order = if has_reserve { [Known, Stranger] } else { [Stranger, Known] };
        order.into_iter().any(|standing| {
            let list = self.by_standing[standing as usize];
            match self.longest_waiting(OF_STANDING, list, at) {
                Some(victim) => {
                    self.lose(victim, NetworkDrop::FragNomem, given_up);
                    true
                }
                None => others.lose_one(standing, given_up),
            }
        })
    }

    /// The datagram in a list that has waited longest, except `at`.
    fn longest_waiting(&self, kind: usize, list: SlotList, at: SlotPlace) -> Option<SlotPlace> {
        let first = list.first()?;
        if first == at { self.datagrams.behind(kind, first) } else { Some(first) }
    }

    /// Moves a datagram that got a fragment to the end of its lists.
    fn touch(&mut self, at: SlotPlace) {
        let HeldDatagram { source, standing, .. } = self.datagrams[at];
        let of_standing = &mut self.by_standing[standing as usize];
        self.datagrams.unlink(OF_STANDING, of_standing, at);
        self.datagrams.push_last(OF_STANDING, of_standing, at);
        let of_source = &mut self.sources[source].datagrams;
        self.datagrams.unlink(OF_SOURCE, of_source, at);
        self.datagrams.push_last(OF_SOURCE, of_source, at);
    }

    fn time_out(&mut self, at: SlotPlace, given_up: &mut GivenUp) {
        given_up.failures_of(self.network).timeouts += 1;
        self.lose(at, NetworkDrop::FragReasmTimeout, given_up);
    }

    /// Gives up a valid datagram that was not completed: its source becomes a stranger again.
    fn lose(&mut self, at: SlotPlace, why: NetworkDrop, given_up: &mut GivenUp) {
        let source = self.datagrams[at].source;
        self.sources[source].is_known = false;
        self.drop_datagram(at, why, given_up);
    }

    fn drop_datagram(&mut self, at: SlotPlace, why: NetworkDrop, given_up: &mut GivenUp) {
        given_up.failures_of(self.network).fails += 1;
        given_up.add(self.take(at).into_packets(), why);
    }

    /// Removes a datagram.
    fn take(&mut self, at: SlotPlace) -> Pieces {
        let HeldDatagram { source, standing, bytes, .. } = self.datagrams[at];
        self.uncharge(at, bytes);
        self.datagrams.unlink(BY_AGE, &mut self.by_age, at);
        self.datagrams.unlink(OF_STANDING, &mut self.by_standing[standing as usize], at);
        self.datagrams.unlink(OF_SOURCE, &mut self.sources[source].datagrams, at);
        let pieces = self.datagrams.remove(at).map(|datagram| datagram.pieces).unwrap_or_default();
        self.usage.remove_frames(pieces.count());
        if self.sources[source].datagrams.is_empty() {
            self.part(source);
        }
        pieces
    }

    /// Records charged memory in the datagram and its source.
    fn note(&mut self, at: SlotPlace, bytes: u32) {
        let datagram = &mut self.datagrams[at];
        datagram.bytes += bytes;
        self.sources[datagram.source].bytes += bytes;
    }

    fn uncharge(&mut self, at: SlotPlace, bytes: u32) {
        let datagram = &mut self.datagrams[at];
        datagram.bytes -= bytes;
        self.sources[datagram.source].bytes -= bytes;
        self.usage.uncharge(bytes, datagram.standing);
    }

    /// Finds or creates a datagram's source, and takes it out of the idle list.
    fn find_or_meet(&mut self, key: &Key) -> SlotPlace {
        let prefix = source_prefix(self.network, key);
        let hash = self.hasher.hash(&prefix);
        match self.sources.find(hash, |source| source.prefix == prefix) {
            Some(source) => {
                if self.sources[source].datagrams.is_empty() {
                    self.sources.unlink(IDLE, &mut self.idle, source);
                    self.idle_count -= 1;
                }
                source
            }
            None => self.sources.insert(
                hash,
                FragmentSource {
                    prefix,
                    datagrams: SlotList::default(),
                    bytes: 0,
                    count: 0,
                    is_known: false,
                },
            ),
        }
    }

    /// Handles a source without incomplete datagrams: keeps it if known, else removes it.
    fn part(&mut self, source: SlotPlace) {
        if !self.sources[source].is_known {
            self.sources.remove(source);
            return;
        }
        self.sources.push_last(IDLE, &mut self.idle, source);
        self.idle_count += 1;
        if self.idle_count > self.idle_max
            && let Some(longest) = self.idle.first()
        {
            self.sources.unlink(IDLE, &mut self.idle, longest);
            self.sources.remove(longest);
            self.idle_count -= 1;
        }
    }

    fn hash(&self, key: &Key) -> u64 {
        let mut bytes = [0; 38];
        bytes[..32].copy_from_slice(&key.addresses);
        bytes[32..36].copy_from_slice(&key.id.to_ne_bytes());
        (bytes[36], bytes[37]) = (key.protocol, key.device);
        self.hasher.hash(&bytes)
    }
}

/// Prefix that identifies a datagram's source, padded with zeros.
pub(super) fn source_prefix(network: Network, key: &Key) -> [u8; 8] {
    let mut prefix = [0; 8];
    let source_bytes = if network == Network::Ipv6 { 8 } else { 4 };
    prefix[..source_bytes].copy_from_slice(&key.addresses[..source_bytes]);
    prefix
}

//! Incomplete datagrams of one IP version, in bounded memory: those of some sources, a shard.
//!
//! The kernel drops what comes while its memory is full: a flood of first fragments then keeps
//! everybody out for as long as they wait, half a minute or more. Here the newest always gets in, and
//! who goes is who is least likely to be completed:
//!
//! 1. While more than half of the memory is in use, a source that holds more than its share loses the
//!    one of its own that has waited longest: one host's flood is its own trouble.
//! 2. When all of it is in use, strangers go first: datagrams of sources that have completed none
//!    before, or lost one since. A flood under many false addresses meets only itself, and others that
//!    are new. Only where strangers hold less than their reserve do others go.
//! 3. Among them the one that has waited longest for its next fragment goes: one whose fragments keep
//!    coming stays. So a newcomer gets through as long as less than the strangers' reserve comes
//!    between two of its fragments.
//!
//! A source is an IPv4 address, or an IPv6 subnet (/64), all of whose addresses one host can use. All
//! that a source has lies in one shard; who goes is looked for there first: see [`shards`](super::shards).

#![allow(clippy::indexing_slicing, reason = "arrays by standing, keys of a fixed size")]

use std::sync::Arc;

use path::packet::Packet;
use path::parse::Network;
use siphasher::sip::SipHasher13;

use super::fragment::{Fragment, Key};
use super::pieces::{Fit, Pieces};
use super::shards::{Others, Usage};
use super::{GivenUp, Limits};
use crate::network::NetworkDrop;
use crate::network::slots::{List, Place, Slots};

/// Cost of an incomplete datagram beside its packets.
const DATAGRAM_BYTES: u32 = 256;

/// A source's share of the memory is this part of it; not less than [`SHARE_LEAST_BYTES`].
const SHARE_DIVISOR: u32 = 16;

/// Room for a datagram of 64 KiB in fragments of 1500 bytes, each in a chunk of 2 KiB.
const SHARE_LEAST_BYTES: u32 = 128 << 10;

/// Strangers keep this part of the memory, whatever the others hold.
const STRANGERS_DIVISOR: u32 = 4;

/// Datagrams that go for one fragment at most. The largest frame takes as much as all of these, of the
/// least each.
const VICTIMS_MAX: u32 = 256;

/// Fragments that go at once for having waited too long, and the rest of the last one's datagram.
const EXPIRED_AT_ONCE: usize = 256;

/// Sources that are remembered for what they completed, while they have nothing under way.
const KNOWN_SOURCES_MAX: u32 = 1024;

/// The lists that an incomplete datagram is in: all by their age, its standing's and its source's by
/// when they got their latest fragment.
const BY_AGE: usize = 0;
const OF_STANDING: usize = 1;
const OF_SOURCE: usize = 2;

/// The one list that a source may be in: of those that have nothing under way.
const IDLE: usize = 0;

/// Source of a datagram: an index of arrays.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Standing {
    Stranger = 0,
    Known = 1,
}

/// Incomplete datagrams, all of one IP version, of some sources.
#[derive(Debug)]
pub(super) struct Held {
    network: Network,
    limits: Limits,
    /// Memory that all shards hold.
    usage: Arc<Usage>,
    hasher: SipHasher13,
    datagrams: Slots<Datagram, 3>,
    sources: Slots<Source, 1>,
    by_age: List,
    by_standing: [List; 2],
    idle: List,
    idle_count: u32,
    idle_max: u32,
}

#[derive(Debug)]
struct Datagram {
    key: Key,
    source: Place,
    standing: Standing,
    pieces: Pieces,
    bytes: u32,
    deadline_ns: u64,
    /// The source's count of fragments when this one got its latest.
    source_count: u32,
}

#[derive(Debug)]
struct Source {
    prefix: [u8; 8],
    datagrams: List,
    bytes: u32,
    /// Fragments that came from it, modulo 2^32.
    count: u32,
    is_known: bool,
}

/// Outcome of a fragment.
#[must_use]
#[derive(Debug)]
pub(super) enum Added {
    /// The fragment waits.
    Waits,
    /// The last one missing.
    Whole(Pieces),
    /// A fragment of no use; whatever else was dropped is among the others already.
    Dropped(Packet, NetworkDrop),
}

impl Held {
    /// One of so many shards.
    pub(super) fn new(
        (network, limits): (Network, Limits),
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
            datagrams: Slots::new(expected),
            sources: Slots::new(expected),
            by_age: List::default(),
            by_standing: [List::default(); 2],
            idle: List::default(),
            idle_count: 0,
            idle_max: KNOWN_SOURCES_MAX.div_ceil(shards),
        }
    }

    /// Adds a fragment to those of its datagram. Where others of this shard are not enough to make
    /// room for it, those of `others` may have to go.
    pub(super) fn add(
        &mut self,
        packet: Packet,
        (fragment, now_ns): (&Fragment, u64),
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

    /// Drops what has waited too long, until so much has been given up that a turn does no more.
    pub(super) fn expire(&mut self, now_ns: u64, given_up: &mut GivenUp) {
        while given_up.packets.len() < EXPIRED_AT_ONCE
            && let Some(oldest) = self.by_age.first()
            && self.datagrams[oldest].deadline_ns <= now_ns
        {
            self.time_out(oldest, given_up);
        }
    }

    /// Drops everything.
    pub(super) fn clear(&mut self, given_up: &mut GivenUp) {
        while let Some(oldest) = self.by_age.first() {
            self.drop_datagram(oldest, NetworkDrop::FragReasmTimeout, given_up);
        }
    }

    /// Gives up the datagram of that standing that has waited longest, if there is one.
    pub(super) fn lose_one(&mut self, standing: Standing, given_up: &mut GivenUp) -> bool {
        let longest = self.by_standing[standing as usize].first();
        longest.inspect(|&at| self.lose(at, NetworkDrop::FragNomem, given_up)).is_some()
    }

    /// A fragment's datagram, and what it costs beside its packets if it is new.
    fn find_or_begin(&mut self, key: Key, now_ns: u64, given_up: &mut GivenUp) -> (Place, u32) {
        let hash = self.hash(&key);
        if let Some(at) = self.datagrams.find(hash, |datagram| datagram.key == key) {
            if self.datagrams[at].deadline_ns > now_ns {
                return (at, 0);
            }
            // It is among those that no turn has come to yet.
            self.time_out(at, given_up);
        }
        let source = self.find_or_meet(&key);
        let standing =
            if self.sources[source].is_known { Standing::Known } else { Standing::Stranger };
        let datagram = Datagram {
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

    /// Counts a fragment of the datagram's source. If too many of its fragments came since this
    /// datagram got one, an identification has come round, and what is here is of an older datagram:
    /// the kernel's `ipfrag_max_dist`.
    fn count(&mut self, at: Place, now_ns: u64, given_up: &mut GivenUp) {
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

    /// Takes room for `need` more bytes of one datagram, at the cost of others. Returns whether there
    /// was some.
    fn take_room(
        &mut self,
        at: Place,
        need: u32,
        others: &Others<'_>,
        given_up: &mut GivenUp,
    ) -> bool {
        let high_thresh = self.limits.high_thresh;
        let share = (high_thresh / SHARE_DIVISOR).max(SHARE_LEAST_BYTES);
        let Datagram { source, standing, .. } = self.datagrams[at];
        // Others take room meanwhile, or make some; so it is not for ever that we try.
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

    /// Gives up the datagram that is least likely to be completed, `at` aside: of the standing that
    /// is to go first, in this shard or else in another, or of the other one.
    fn lose_some(&mut self, at: Place, others: &Others<'_>, given_up: &mut GivenUp) -> bool {
        use Standing::{Known, Stranger};
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

    /// The one in a list that has waited longest, `at` aside.
    fn longest_waiting(&self, kind: usize, list: List, at: Place) -> Option<Place> {
        let first = list.first()?;
        if first == at { self.datagrams.behind(kind, first) } else { Some(first) }
    }

    /// A fragment came: it goes behind all others that wait.
    fn touch(&mut self, at: Place) {
        let Datagram { source, standing, .. } = self.datagrams[at];
        let of_standing = &mut self.by_standing[standing as usize];
        self.datagrams.unlink(OF_STANDING, of_standing, at);
        self.datagrams.push_last(OF_STANDING, of_standing, at);
        let of_source = &mut self.sources[source].datagrams;
        self.datagrams.unlink(OF_SOURCE, of_source, at);
        self.datagrams.push_last(OF_SOURCE, of_source, at);
    }

    fn time_out(&mut self, at: Place, given_up: &mut GivenUp) {
        given_up.failures_of(self.network).timeouts += 1;
        self.lose(at, NetworkDrop::FragReasmTimeout, given_up);
    }

    /// Gives a datagram up that is not wrong, but was not completed: its source is a stranger again.
    fn lose(&mut self, at: Place, why: NetworkDrop, given_up: &mut GivenUp) {
        let source = self.datagrams[at].source;
        self.sources[source].is_known = false;
        self.drop_datagram(at, why, given_up);
    }

    fn drop_datagram(&mut self, at: Place, why: NetworkDrop, given_up: &mut GivenUp) {
        given_up.failures_of(self.network).fails += 1;
        given_up.add(self.take(at).into_packets(), why);
    }

    /// Takes a datagram out.
    fn take(&mut self, at: Place) -> Pieces {
        let Datagram { source, standing, bytes, .. } = self.datagrams[at];
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

    /// Notes whose what was charged is.
    fn note(&mut self, at: Place, bytes: u32) {
        let datagram = &mut self.datagrams[at];
        datagram.bytes += bytes;
        self.sources[datagram.source].bytes += bytes;
    }

    fn uncharge(&mut self, at: Place, bytes: u32) {
        let datagram = &mut self.datagrams[at];
        datagram.bytes -= bytes;
        self.sources[datagram.source].bytes -= bytes;
        self.usage.uncharge(bytes, datagram.standing);
    }

    /// A datagram's source, which now has one under way.
    fn find_or_meet(&mut self, key: &Key) -> Place {
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
                Source { prefix, datagrams: List::default(), bytes: 0, count: 0, is_known: false },
            ),
        }
    }

    /// A source has nothing under way any more. It is remembered if it is known.
    fn part(&mut self, source: Place) {
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
        let mut bytes = [0; 37];
        bytes[..32].copy_from_slice(&key.addresses);
        bytes[32..36].copy_from_slice(&key.id.to_ne_bytes());
        bytes[36] = key.protocol;
        self.hasher.hash(&bytes)
    }
}

/// Source of a datagram: all that one host can be, with zeros behind.
pub(super) fn source_prefix(network: Network, key: &Key) -> [u8; 8] {
    let mut prefix = [0; 8];
    let source_bytes = if network == Network::Ipv6 { 8 } else { 4 };
    prefix[..source_bytes].copy_from_slice(&key.addresses[..source_bytes]);
    prefix
}

//! Incomplete datagrams of one IP version, of all CPUs: fragments that one CPU got are found by the next
//! that the flow moves to.
//!
//! They lie in shards, each behind a lock that is held while one fragment is entered, never while bytes
//! are moved. A source's are in one shard, by its hash, so that what it holds is known there. The limit
//! on memory is that of all shards together; who must go for a fragment is looked for in its own shard
//! and, where that has nobody, in those of the others that nobody else is at.

#![expect(
    clippy::disallowed_types,
    reason = "fragments alone wait here, for as long as one of theirs is entered"
)]

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use path::packet::Packet;
use path::parse::Network;
use siphasher::sip::SipHasher13;

use super::fragment::Fragment;
use super::held::{Added, Held, Standing, source_prefix};
use super::{GivenUp, Limits};

/// The most shards.
const SHARDS_MAX: usize = 64;

/// Shards for so many CPUs: so many that two seldom meet.
pub(super) fn shards_for(cpus: usize) -> usize {
    cpus.clamp(1, SHARDS_MAX).next_power_of_two()
}

/// Memory that all shards hold together. Relaxed throughout: only the sums matter, and each is changed at once.
#[derive(Debug, Default)]
pub(super) struct Usage {
    bytes: AtomicU32,
    /// The part of it that strangers hold.
    strangers_bytes: AtomicU32,
    frames: AtomicU32,
}

impl Usage {
    /// Charged memory: all packets, and the cost of incomplete datagrams beside them.
    pub(super) fn bytes(&self) -> u32 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub(super) fn strangers_bytes(&self) -> u32 {
        self.strangers_bytes.load(Ordering::Relaxed)
    }

    /// Frames that wait.
    pub(super) fn frames(&self) -> u32 {
        self.frames.load(Ordering::Relaxed)
    }

    /// Charges so much, if that is within the limit.
    pub(super) fn charge(&self, bytes: u32, standing: Standing, limit: u32) -> bool {
        let within = |held: u32| held.checked_add(bytes).filter(|&sum| sum <= limit);
        let is_charged =
            self.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, within).is_ok();
        if is_charged && standing == Standing::Stranger {
            self.strangers_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
        is_charged
    }

    pub(super) fn uncharge(&self, bytes: u32, standing: Standing) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        if standing == Standing::Stranger {
            self.strangers_bytes.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    pub(super) fn add_frames(&self, count: u32) {
        self.frames.fetch_add(count, Ordering::Relaxed);
    }

    pub(super) fn remove_frames(&self, count: u32) {
        self.frames.fetch_sub(count, Ordering::Relaxed);
    }
}

/// All shards of one IP version.
#[derive(Debug)]
pub(super) struct Shards {
    network: Network,
    hasher: SipHasher13,
    usage: Arc<Usage>,
    /// As many as a power of two.
    shards: Box<[Mutex<Held>]>,
}

impl Shards {
    /// So many shards: a power of two.
    pub(super) fn new(network: Network, limits: Limits, seed: [u8; 16], count: usize) -> Self {
        let hasher = SipHasher13::new_with_key(&seed);
        let usage = Arc::new(Usage::default());
        let of = u32::try_from(count).unwrap_or(u32::MAX);
        let shard = |_| Mutex::new(Held::new((network, limits), hasher, Arc::clone(&usage), of));
        let shards = (0..count).map(shard).collect();
        Self { network, hasher, usage, shards }
    }

    /// Adds a fragment to those of its datagram, after what has waited too long in its shard is gone.
    pub(super) fn add(
        &self,
        packet: Packet,
        (fragment, now_ns): (&Fragment, u64),
        given_up: &mut GivenUp,
    ) -> Added {
        let hash = self.hasher.hash(&source_prefix(self.network, &fragment.key));
        // The lower bits choose the place within a shard.
        let own = (hash >> 48) as usize & (self.shards.len() - 1);
        let (before, rest) = self.shards.split_at(own);
        let Some((own, behind)) = rest.split_first() else {
            return Added::Dropped(packet, crate::network::NetworkDrop::FragNomem);
        };
        let mut held = lock(own);
        held.expire(now_ns, given_up);
        held.add(packet, (fragment, now_ns), &Others { before, behind }, given_up)
    }

    /// Drops what has waited too long, where nobody else is about to.
    pub(super) fn expire(&self, now_ns: u64, given_up: &mut GivenUp) {
        for shard in &self.shards {
            if let Ok(mut held) = shard.try_lock() {
                held.expire(now_ns, given_up);
            }
        }
    }

    /// Drops everything.
    pub(super) fn clear(&self, given_up: &mut GivenUp) {
        self.shards.iter().for_each(|shard| lock(shard).clear(given_up));
    }

    pub(super) fn usage(&self) -> &Usage {
        &self.usage
    }
}

/// The shards that a fragment is not of: those behind its own come first, so that not all look to the
/// same one.
pub(super) struct Others<'a> {
    before: &'a [Mutex<Held>],
    behind: &'a [Mutex<Held>],
}

impl Others<'_> {
    /// Gives up a datagram of that standing in one of them, if there is one where nobody else is.
    pub(super) fn lose_one(&self, standing: Standing, given_up: &mut GivenUp) -> bool {
        // Never waits: two that hold one each would wait for each other.
        let mut shards = self.behind.iter().chain(self.before);
        shards.any(|shard| shard.try_lock().is_ok_and(|mut held| held.lose_one(standing, given_up)))
    }
}

fn lock(shard: &Mutex<Held>) -> MutexGuard<'_, Held> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

//! Incomplete datagrams of one IP version, shared by all CPUs: when a flow moves, the new CPU finds
//! the fragments that the old one received.
//!
//! The datagrams are divided into shards, each behind a lock that is held while one fragment is
//! inserted, never while bytes are copied. All datagrams of a source are in one shard, by the hash
//! of the source, so the shard knows the source's memory use. The memory limit applies to all
//! shards together. A victim is searched for in the fragment's own shard and, if that has none, in
//! the other shards whose lock is free.

#![expect(
    clippy::disallowed_types,
    reason = "fragments alone wait here, for as long as one of theirs is entered"
)]

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_rx::packet::Packet;
use forebay_rx::parse::Network;
use siphasher::sip::SipHasher13;

use super::fragment::FragmentPart;
use super::held::{Added, HeldFragments, SourceStanding, source_prefix};
use super::{GivenUp, ReassemblyLimits};

/// Largest number of shards.
const SHARDS_MAX: usize = 64;

/// Number of shards for `cpus` CPUs, large enough that two CPUs seldom contend.
pub(super) fn shards_for(cpus: usize) -> usize {
    cpus.clamp(1, SHARDS_MAX).next_power_of_two()
}

/// Memory used by all shards together. Relaxed throughout: only the sums matter, and each is
/// updated atomically.
#[derive(Debug, Default)]
pub(super) struct Usage {
    bytes: AtomicU32,
    /// Part of `bytes` used by strangers.
    strangers_bytes: AtomicU32,
    frames: AtomicU32,
}

impl Usage {
    /// Bytes charged: all packets, and the overhead of incomplete datagrams.
    pub(super) fn bytes(&self) -> u32 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub(super) fn strangers_bytes(&self) -> u32 {
        self.strangers_bytes.load(Ordering::Relaxed)
    }

    /// Number of waiting frames.
    pub(super) fn frames(&self) -> u32 {
        self.frames.load(Ordering::Relaxed)
    }

    /// Charges `bytes` if the sum stays within the limit.
    pub(super) fn charge(&self, bytes: u32, standing: SourceStanding, limit: u32) -> bool {
        let within = |held: u32| held.checked_add(bytes).filter(|&sum| sum <= limit);
        let is_charged =
            self.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, within).is_ok();
        if is_charged && standing == SourceStanding::Stranger {
            self.strangers_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
        is_charged
    }

    pub(super) fn uncharge(&self, bytes: u32, standing: SourceStanding) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        if standing == SourceStanding::Stranger {
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
    /// The shards; their number is a power of two.
    shards: Box<[Mutex<HeldFragments>]>,
}

impl Shards {
    /// Creates `count` shards, a power of two.
    pub(super) fn new(
        network: Network,
        limits: ReassemblyLimits,
        seed: [u8; 16],
        count: usize,
    ) -> Self {
        let hasher = SipHasher13::new_with_key(&seed);
        let usage = Arc::new(Usage::default());
        let of = u32::try_from(count).unwrap_or(u32::MAX);
        let shard =
            |_| Mutex::new(HeldFragments::new(network, limits, hasher, Arc::clone(&usage), of));
        let shards = (0..count).map(shard).collect();
        Self { network, hasher, usage, shards }
    }

    /// Adds a fragment to its datagram, after dropping the timed-out datagrams of its shard.
    pub(super) fn add(
        &self,
        packet: Packet,
        fragment: &FragmentPart,
        now_ns: u64,
        given_up: &mut GivenUp,
    ) -> Added {
        let hash = self.hasher.hash(&source_prefix(self.network, &fragment.key));
        // The lower bits select the bucket within a shard.
        let own = (hash >> 48) as usize & (self.shards.len() - 1);
        let (before, rest) = self.shards.split_at(own);
        let Some((own, behind)) = rest.split_first() else {
            return Added::Dropped(packet, crate::network::NetworkDrop::FragNomem);
        };
        let mut held = lock(own);
        held.expire(now_ns, given_up);
        held.add(packet, fragment, now_ns, &Others { before, behind }, given_up)
    }

    /// Drops timed-out datagrams, in shards whose lock is free.
    pub(super) fn expire(&self, now_ns: u64, given_up: &mut GivenUp) {
        for shard in &self.shards {
            if let Ok(mut held) = shard.try_lock() {
                held.expire(now_ns, given_up);
            }
        }
    }

    /// Drops all incomplete datagrams.
    pub(super) fn clear(&self, given_up: &mut GivenUp) {
        self.shards.iter().for_each(|shard| lock(shard).clear(given_up));
    }

    pub(super) fn usage(&self) -> &Usage {
        &self.usage
    }
}

/// All shards but a fragment's own. Shards after it are tried first, so that evictions are spread
/// over the shards.
pub(super) struct Others<'a> {
    before: &'a [Mutex<HeldFragments>],
    behind: &'a [Mutex<HeldFragments>],
}

impl Others<'_> {
    /// Evicts a datagram of this standing in one of the shards whose lock is free. Returns false if
    /// there is none.
    pub(super) fn lose_one(&self, standing: SourceStanding, given_up: &mut GivenUp) -> bool {
        // Never waits for a lock: two CPUs that hold a shard each would deadlock.
        let mut shards = self.behind.iter().chain(self.before);
        shards.any(|shard| shard.try_lock().is_ok_and(|mut held| held.lose_one(standing, given_up)))
    }
}

fn lock(shard: &Mutex<HeldFragments>) -> MutexGuard<'_, HeldFragments> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

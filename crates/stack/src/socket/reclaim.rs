//! Buffer policies: the memory that packets wait in for a slow reader, and the return of frames.
//!
//! | policy | packets wait | frames are returned |
//! |---|---|---|
//! | `owner` | in the frame they arrived in | by the reader, in batches, to the CPU that owns them |
//! | `copy-cache` | under pressure, small ones in a [buffer](super::copy_cache) | by the reader: a mark |
//! | `condense` | under pressure, small ones in the smallest chunks | as with `owner` |
//! | `none` | in the frame they arrived in | by the reader, one by one, through the shared inbox |
//!
//! Buffers and small chunks belong to the CPU that received the packet. With `copy-cache`, packets
//! that are not copied are returned as with `none`.
//!
//! Pressure is defined as in the kernel: the socket holds more than half of its limit (UDP-1). The
//! policy is read for each run of packets, so a change takes effect at any time.

use std::fmt;
use std::mem::replace;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use forebay_buf::pool::FREE_BATCH_FRAMES;
use forebay_buf::{Frame, Pool};
use forebay_rx::packet::Packet;

use super::account::{Account, is_under_pressure, size};
use super::copy_cache::{Copied, CopyCache};
use super::queue::SocketQueueConsumer;
use crate::counter::StackCounter;

/// Policy for the use and return of packet memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum ReclaimPolicy {
    /// Readers return frames to their owner in batches.
    #[default]
    Owner,
    /// Packets are copied to a cache of the receiving CPU while a reader is slow.
    CopyCache,
    /// Packets are copied to small chunks while a reader is slow.
    Condense,
    /// Readers free each frame where it is read: the baseline.
    None,
}

impl ReclaimPolicy {
    /// All policies, by [`index`](Self::index).
    pub const ALL: [Self; 4] = [Self::Owner, Self::CopyCache, Self::Condense, Self::None];

    /// Name of the policy.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Owner => "owner",
            Self::CopyCache => "copy-cache",
            Self::Condense => "condense",
            Self::None => "none",
        }
    }

    /// Index in [`ALL`](Self::ALL).
    #[must_use]
    pub fn index(self) -> usize {
        self as usize
    }
}

impl fmt::Display for ReclaimPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Error: a name that is not a buffer policy's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoSuchPolicy(String);

impl fmt::Display for NoSuchPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = ReclaimPolicy::ALL.map(ReclaimPolicy::name).join(", ");
        write!(f, "there is no buffer policy {:?}: take one of {names}", self.0)
    }
}

impl std::error::Error for NoSuchPolicy {}

impl FromStr for ReclaimPolicy {
    type Err = NoSuchPolicy;

    fn from_str(name: &str) -> Result<Self, NoSuchPolicy> {
        let named = Self::ALL.into_iter().find(|policy| policy.name() == name);
        named.ok_or_else(|| NoSuchPolicy(name.to_owned()))
    }
}

/// The policy of an engine. Any thread may set it; every CPU and every reader reads it.
#[derive(Debug, Default)]
pub struct SharedPolicy(AtomicU8);

impl SharedPolicy {
    /// Creates a shared policy with an initial value.
    #[must_use]
    pub fn new(policy: ReclaimPolicy) -> Self {
        let shared = Self::default();
        shared.store(policy);
        shared
    }

    /// The current policy.
    #[must_use]
    pub fn load(&self) -> ReclaimPolicy {
        // Relaxed: frames reach their owner under any policy, whichever buffer their packets waited
        // in.
        let index = usize::from(self.0.load(Ordering::Relaxed));
        ReclaimPolicy::ALL.get(index).copied().unwrap_or_default()
    }

    /// Sets the policy, for packets put in and frames returned from now on.
    pub fn store(&self, policy: ReclaimPolicy) {
        self.0.store(policy as u8, Ordering::Relaxed);
    }
}

/// One CPU's counters of packets moved to other buffers.
#[derive(Debug, Default)]
pub struct ReclaimCounters {
    /// Packets copied into the cache.
    pub cached: StackCounter,
    /// Packets not copied into the cache because they are too long or in several frames.
    pub not_eligible: StackCounter,
    /// Packets not copied because the buffers tried were in use.
    pub busy: StackCounter,
    /// Packets copied into a smaller chunk.
    pub condensed: StackCounter,
}

/// Copies packets for slow readers into memory that their CPU can spare for a while.
#[derive(Debug)]
pub struct BufferReclaimer {
    /// The copy cache, if there is memory for one.
    cache: Option<CopyCache>,
    /// Small chunks of this CPU, in the region that its packets arrive in.
    small: Option<Pool>,
    counters: Arc<ReclaimCounters>,
}

impl BufferReclaimer {
    /// Creates the reclaimer of one CPU. Without a cache, `copy-cache` copies nothing; without
    /// small chunks, `condense` copies nothing.
    #[must_use]
    pub fn new(
        cache: Option<CopyCache>,
        small: Option<Pool>,
        counters: Arc<ReclaimCounters>,
    ) -> Self {
        Self { cache, small, counters }
    }

    /// Sets the pool of small chunks, in the region that the CPU's packets arrive in.
    pub fn set_small(&mut self, small: Pool) {
        self.small = Some(small);
    }

    /// Number of buffers and small chunks in use.
    pub fn frames_away(&mut self) -> usize {
        let cached = self.cache.as_ref().map_or(0, CopyCache::away);
        cached + self.small.as_mut().map_or(0, Pool::in_use)
    }

    /// The copy cache, if any.
    #[must_use]
    pub fn cache(&self) -> Option<&CopyCache> {
        self.cache.as_ref()
    }

    /// Copies, by `policy`, those of `packets` that would reach a socket under pressure and still
    /// be within its limit, and returns their original frames to `pool`. To be called before they
    /// are put into the socket's queue: a packet is charged the frame it waits in.
    pub fn reclaim(
        &mut self,
        policy: ReclaimPolicy,
        account: &Account,
        packets: &mut [Packet],
        pool: &mut Pool,
    ) {
        let smaller = match (policy, &self.cache, &self.small) {
            (ReclaimPolicy::CopyCache, Some(_), _) => CopyCache::TRUESIZE,
            (ReclaimPolicy::Condense, _, Some(small)) => small.smallest_chunk_bytes(),
            _ => return,
        };
        let (mut rmem, rcvbuf) = (account.rmem(), account.rcvbuf());
        for packet in packets {
            // The socket will drop this packet: copying it would be wasted work.
            if rmem.saturating_add(smaller) > rcvbuf {
                break;
            }
            if is_under_pressure(rmem, rcvbuf) {
                match policy {
                    ReclaimPolicy::Condense => self.condense(packet, pool),
                    _ => self.copy(packet, pool),
                }
            }
            rmem = rmem.saturating_add(size(packet));
        }
    }

    fn copy(&mut self, packet: &mut Packet, pool: &mut Pool) {
        let Some(cache) = &mut self.cache else { return };
        let counter = match cache.copy(packet, pool) {
            Copied::Done => &self.counters.cached,
            Copied::NotEligible => &self.counters.not_eligible,
            Copied::Busy => &self.counters.busy,
        };
        counter.add(1);
    }

    /// Copies a packet into a smaller chunk of this CPU, if the packet fits and a chunk is free
    /// (`skb_condense`).
    fn condense(&mut self, packet: &mut Packet, pool: &mut Pool) {
        let Some(chunks) = &mut self.small else { return };
        if packet.is_chain() || packet.frame.truesize() <= chunks.smallest_chunk_bytes() {
            return;
        }
        let Some(mut small) = chunks.allocate(packet.frame.len_bytes()) else { return };
        small.copy_from(packet.frame.data());
        pool.put(replace(&mut packet.frame, small));
        self.counters.condensed.add(1);
    }
}

/// Returns a frame that was read. With `owner` and `condense` the frame may wait in a batch until
/// `pool` is flushed.
#[inline]
pub fn give_back(frame: Frame, pool: &mut Pool, policy: ReclaimPolicy) {
    match policy {
        ReclaimPolicy::Owner | ReclaimPolicy::Condense => pool.put(frame),
        ReclaimPolicy::CopyCache | ReclaimPolicy::None => drop(frame),
    }
}

/// Return path of one reader: frames are returned in batches, and the socket is uncharged once a
/// batch has been sent.
///
/// A batch is sent when it is full, or holds a quarter of the socket's limit (as in
/// `udp_rmem_release`), or nothing is left to be read. So an idle reader withholds no frames, and
/// the frames in an unsent batch stay charged to the socket.
#[derive(Debug)]
pub struct FrameReturn {
    pool: Pool,
    /// Frames in the unsent batch.
    frames: usize,
    /// Bytes charged for those frames.
    bytes: u32,
}

impl FrameReturn {
    /// Creates the return path through `pool`, which needs no frames of its own
    /// ([`Pool::return_handle`]).
    #[must_use]
    pub fn new(pool: Pool) -> Self {
        Self { pool, frames: 0, bytes: 0 }
    }

    /// Returns packets that were taken out of `consumer` and read. `packets` is empty afterwards.
    pub fn give_back(
        &mut self,
        packets: &mut Vec<Packet>,
        consumer: &mut SocketQueueConsumer,
        policy: ReclaimPolicy,
    ) {
        let most_bytes = consumer.account().rcvbuf() / 4;
        for packet in packets.drain(..) {
            self.frames += 1;
            self.bytes = self.bytes.saturating_add(size(&packet));
            give_back(packet.frame, &mut self.pool, policy);
            if self.frames >= FREE_BATCH_FRAMES || self.bytes >= most_bytes {
                self.flush(consumer);
            }
        }
        if !consumer.has_some() {
            self.flush(consumer);
        }
    }

    /// Sends the unsent batch, and uncharges the socket. To be called when packets are kept, before
    /// the reader does something else for long.
    pub fn flush(&mut self, consumer: &mut SocketQueueConsumer) {
        if self.frames > 0 {
            self.pool.flush();
            consumer.uncharge(self.bytes);
            (self.frames, self.bytes) = (0, 0);
        }
    }
}

#[cfg(test)]
mod tests;

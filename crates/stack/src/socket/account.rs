//! Packet memory accounting of a socket.
//!
//! A packet is charged its `truesize` when it is put into a socket's queue, and uncharged when its
//! reader reports that the memory has been returned. The rule is the kernel's
//! (`__udp_enqueue_schedule_skb`): a packet that would raise the sum above `rcvbuf` is dropped,
//! unless the socket holds nothing.

use std::sync::OnceLock;

use forebay_buf::cache::OwnLine;
use forebay_buf::sync::{AtomicU32, Ordering};
use forebay_rx::packet::Packet;

use crate::counter::StackCounter;

/// One socket's account. Every CPU charges packets, the reader uncharges them, any thread may read.
#[derive(Debug)]
pub struct Account {
    /// Bytes charged: the kernel's `sk_rmem_alloc`.
    rmem: OwnLine<AtomicU32>,
    /// Limit on the bytes charged: the kernel's `sk_rcvbuf`. Written only when configured.
    rcvbuf: OwnLine<AtomicU32>,
    /// Counters by CPU; a CPU's first packet creates its own.
    lanes: Box<[OnceLock<Box<OwnLine<LaneCounters>>>]>,
}

/// One CPU's counters of one socket, in datagrams as on the wire: each segment of a merged or GSO
/// packet counts.
#[derive(Debug, Default)]
pub struct LaneCounters {
    /// Datagrams queued.
    pub queued: StackCounter,
    /// Datagrams that the socket had no room for: the kernel's `RcvbufErrors`.
    pub dropped: StackCounter,
}

impl Account {
    /// Creates an empty account of a socket that `cpus` CPUs put packets into.
    pub(super) fn new(rcvbuf: u32, cpus: usize) -> Self {
        Self {
            rmem: OwnLine(AtomicU32::new(0)),
            rcvbuf: OwnLine(AtomicU32::new(rcvbuf)),
            lanes: (0..cpus).map(|_| OnceLock::new()).collect(),
        }
    }

    /// Bytes of packet memory charged to the socket: queued, or taken by the reader and not
    /// returned.
    #[must_use]
    pub fn rmem(&self) -> u32 {
        self.rmem.0.load(Ordering::Relaxed)
    }

    /// Limit on the bytes charged.
    #[must_use]
    pub fn rcvbuf(&self) -> u32 {
        self.rcvbuf.0.load(Ordering::Relaxed)
    }

    /// Sets the limit for packets that arrive from now on.
    pub fn set_rcvbuf(&self, bytes: u32) {
        self.rcvbuf.0.store(bytes, Ordering::Relaxed);
    }

    /// True if the bytes charged have reached the limit.
    pub(super) fn is_full(&self) -> bool {
        self.rmem() >= self.rcvbuf()
    }

    /// Counters of each CPU; `None` for CPUs that have put in no packet.
    pub fn lanes(&self) -> impl ExactSizeIterator<Item = Option<&LaneCounters>> {
        self.lanes.iter().map(|lane| lane.get().map(|lane| &lane.0))
    }

    pub(super) fn lane(&self, cpu: usize) -> &LaneCounters {
        &self.lanes[cpu].get_or_init(Box::default).0
    }

    /// Total number of datagrams queued, read or not.
    #[must_use]
    pub fn queued(&self) -> u64 {
        self.lanes().flatten().map(|lane| lane.queued.get()).sum()
    }

    /// Number of datagrams that the socket had no room for.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.lanes().flatten().map(|lane| lane.dropped.get()).sum()
    }

    /// Charges the packets that are within the limit, at most `slots` of them, and moves the others
    /// to the end of `refused`. The sum never exceeds the limit, not even temporarily, unless a
    /// single packet larger than the limit is charged to an empty account.
    pub(super) fn charge(
        &self,
        packets: &mut Vec<Packet>,
        slots: usize,
        refused: &mut Vec<Packet>,
    ) {
        let rcvbuf = self.rcvbuf();
        let total = packets.iter().map(|packet| u64::from(size(packet))).sum();
        let mut rmem = self.rmem();
        // A concurrent charge or uncharge changed the sum: start again from the new one.
        let is_whole = loop {
            let mut rule = Rule { rmem, rcvbuf, slots };
            let whole = sum_within(rmem, total, rcvbuf).filter(|_| packets.len() <= slots);
            if let Some(sum) = whole {
                rule.rmem = sum;
            } else if packets.iter().filter(|packet| rule.admits(size(packet))).count() == 0 {
                break false;
            }
            debug_assert!(
                rule.rmem <= rcvbuf || rmem == 0,
                "{} bytes above rcvbuf {rcvbuf}, on top of {rmem} held",
                rule.rmem
            );
            // Acquire: pairs with the Release in `relieve`. A CPU that sees room sees the memory
            // returned.
            match self.rmem.0.compare_exchange_weak(
                rmem,
                rule.rmem,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => break whole.is_some(),
                Err(now) => rmem = now,
            }
        };
        if !is_whole {
            let mut rule = Rule { rmem, rcvbuf, slots };
            refused.extend(packets.extract_if(.., |packet| !rule.admits(size(packet))));
        }
        debug_assert!(packets.len() <= slots, "{} packets for {slots} slots", packets.len());
    }

    /// Uncharges bytes whose memory has been returned.
    pub(super) fn relieve(&self, bytes: u32) {
        if bytes > 0 {
            // Release: pairs with the Acquire in `charge`.
            let held = self.rmem.0.fetch_sub(bytes, Ordering::Release);
            debug_assert!(held >= bytes, "{bytes} bytes came back of {held} that were charged");
        }
    }
}

/// True if a socket is under pressure, that is, its reader is too slow: `rmem > rcvbuf / 2`
/// (UDP-1).
pub(super) fn is_under_pressure(rmem: u32, rcvbuf: u32) -> bool {
    rmem > rcvbuf / 2
}

/// Bytes that a packet is charged.
pub(super) fn size(packet: &Packet) -> u32 {
    packet.frame.truesize()
}

/// State of the limit rule along a run of packets.
struct Rule {
    rmem: u32,
    rcvbuf: u32,
    /// Free slots left in the ring.
    slots: usize,
}

impl Rule {
    fn admits(&mut self, size: u32) -> bool {
        let alone = Some(size).filter(|_| self.rmem == 0);
        let sum = sum_within(self.rmem, size.into(), self.rcvbuf).or(alone);
        match sum {
            Some(sum) if self.slots > 0 => {
                (self.rmem, self.slots) = (sum, self.slots - 1);
                true
            }
            _ => false,
        }
    }
}

/// The sum with `bytes` more; `None` if that is above `rcvbuf`.
fn sum_within(rmem: u32, bytes: u64, rcvbuf: u32) -> Option<u32> {
    let sum = u32::try_from(u64::from(rmem) + bytes).ok()?;
    (sum <= rcvbuf).then_some(sum)
}

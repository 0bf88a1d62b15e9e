//! Packet memory accounting of a socket.
//!
//! A packet is charged its `truesize` when it is put into a socket's queue, and uncharged when its
//! reader reports that the memory has been returned. The rule is the kernel's
//! (`__udp_enqueue_schedule_skb`): a packet that would raise the sum above `rcvbuf` is dropped,
//! unless the socket holds nothing.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use forebay_buf::cache::OwnLine;
use forebay_buf::sync::{AtomicU32, Ordering};
use forebay_rx::packet::Packet;

use super::SocketId;
use super::counters::{CounterTable, LaneCounters, OwnCounters};

/// One socket's account. Every CPU charges packets, the reader uncharges them, any thread may read.
#[derive(Debug)]
pub struct Account {
    /// Bytes charged: the kernel's `sk_rmem_alloc`.
    rmem: OwnLine<AtomicU32>,
    /// Limit on the bytes charged: the kernel's `sk_rcvbuf`. Written only when configured.
    rcvbuf: OwnLine<AtomicU32>,
    /// Bit for each CPU that has put in a packet.
    counting: Box<[AtomicU64]>,
    id: SocketId,
    counters: Arc<CounterTable>,
}

/// Sums of a socket's [counters](LaneCounters) over all CPUs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CounterSums {
    /// Datagrams queued, read or not.
    pub queued: u64,
    /// Datagrams that the socket had no room for.
    pub dropped: u64,
}

impl Account {
    /// Creates the empty account of a socket, which the CPUs of `counters` charge packets to.
    pub(super) fn new(id: SocketId, rcvbuf: u32, counters: Arc<CounterTable>) -> Self {
        let words = counters.cpus().div_ceil(CPUS_OF_A_WORD);
        Self {
            rmem: OwnLine(AtomicU32::new(0)),
            rcvbuf: OwnLine(AtomicU32::new(rcvbuf)),
            counting: (0..words).map(|_| AtomicU64::new(0)).collect(),
            id,
            counters,
        }
    }

    /// Bytes of packet memory charged to the socket: queued, or taken by the reader and not
    /// returned.
    #[must_use]
    pub fn rmem(&self) -> u32 {
        self.rmem.0.load(Ordering::Relaxed)
    }

    /// True if at least half of the limit is charged.
    #[must_use]
    pub fn is_half_full(&self) -> bool {
        self.rmem() >= self.rcvbuf() / 2
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
        let lane = |cpu| Some(&self.counters.block(cpu, self.id)?[self.id.place()]);
        (0..self.counters.cpus()).map(move |cpu| lane(cpu).filter(|_| self.is_counting(cpu)))
    }

    /// Counters of a CPU, which calls this before its first packet.
    pub(super) fn join(&self, cpu: usize) -> OwnCounters {
        let own = self.counters.own(cpu, self.id);
        if !self.is_counting(cpu) {
            own.reset();
            let (word, bit) = bit_of(cpu);
            // Release: pairs with the Acquire in `is_counting`. No reader sees counters of the slot's last socket.
            self.counting[word].fetch_or(bit, Ordering::Release);
        }
        own
    }

    fn is_counting(&self, cpu: usize) -> bool {
        let (word, bit) = bit_of(cpu);
        self.counting[word].load(Ordering::Acquire) & bit != 0
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

    /// Sums of the counters of some sockets of one host, over all CPUs. They are read CPU by CPU: through memory in
    /// order, if the slots of the sockets follow each other.
    #[must_use]
    pub fn sums(accounts: &[&Self]) -> Vec<CounterSums> {
        let neighbours = accounts.chunk_by(|one, next| one.id.block() == next.id.block());
        neighbours.flat_map(Self::sums_of_block).collect()
    }

    /// Sums of sockets whose counters are in the same block of each CPU.
    fn sums_of_block(accounts: &[&Self]) -> Vec<CounterSums> {
        let mut sums = vec![CounterSums::default(); accounts.len()];
        let Some(Self { id, counters, .. }) = accounts.first() else { return sums };
        let mut counting = Vec::new();
        for cpu in 0..counters.cpus() {
            let (word, bit) = bit_of(cpu);
            if bit == 1 {
                let bits = |account: &&Self| account.counting[word].load(Ordering::Acquire);
                counting = accounts.iter().map(bits).collect();
            }
            counters.prefetch(cpu + 1, *id);
            let Some(block) = counters.block(cpu, *id) else { continue };
            for ((account, sums), bits) in accounts.iter().zip(&mut sums).zip(&counting) {
                let lane = &block[account.id.place()];
                // Multiplied, because a branch could not be predicted.
                let counts = u64::from(bits & bit != 0);
                sums.queued += counts * lane.queued.get();
                sums.dropped += counts * lane.dropped.get();
            }
        }
        sums
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

const CPUS_OF_A_WORD: usize = u64::BITS as usize;

/// Word and bit of a CPU.
fn bit_of(cpu: usize) -> (usize, u64) {
    (cpu / CPUS_OF_A_WORD, 1 << (cpu % CPUS_OF_A_WORD))
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CPUS: usize = 130;
    const SLOTS: u32 = 300;

    /// A packet's socket, CPU and datagrams; or the end of the socket, whose slot another one gets.
    type Event = (u32, usize, Option<u64>);

    proptest! {
        #[test]
        fn sockets_of_a_slot_count_apart(
            events in prop::collection::vec((0..SLOTS, 0..CPUS, prop::option::of(1..9_u64)), 0..200),
        ) {
            let table = Arc::new(CounterTable::new(CPUS, SLOTS as usize));
            let open = |slot, age| Account::new(SocketId::new(slot, age), 1, Arc::clone(&table));
            let mut accounts: Vec<_> = (0..SLOTS).map(|slot| open(slot, 0)).collect();
            let mut counted = vec![[0; CPUS]; SLOTS as usize];
            for (slot, cpu, datagrams) in events as Vec<Event> {
                let (account, counted) = (&mut accounts[slot as usize], &mut counted[slot as usize]);
                if let Some(datagrams) = datagrams {
                    let own = account.join(cpu);
                    own.queued.add(datagrams);
                    own.dropped.add(1);
                    counted[cpu] += datagrams;
                } else {
                    *account = open(slot, account.id.generation() + 1);
                    *counted = [0; CPUS];
                }
            }
            let all: Vec<_> = accounts.iter().collect();
            let sums = Account::sums(&all);
            for ((account, counted), sums) in accounts.iter().zip(&counted).zip(sums) {
                let lanes = account.lanes().map(|lane| lane.map_or(0, |lane| lane.queued.get()));
                prop_assert!(lanes.eq(counted.iter().copied()));
                let expected =
                    CounterSums { queued: account.queued(), dropped: account.dropped() };
                prop_assert_eq!(sums, expected);
                prop_assert_eq!(sums.queued, counted.iter().sum::<u64>());
            }
        }
    }
}

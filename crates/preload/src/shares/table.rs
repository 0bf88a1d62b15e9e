//! Words of the memory that all processes share.

use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;

pub(super) use forebay_device::rx_filter::BUCKETS;

use super::SLOTS;
use super::owner::Owner;
use crate::abi;

/// Addresses that can be divided at the same time. Processes with a listener at another take its connections as they come:
/// whoever claims one first.
pub(super) const ROWS: usize = 256;
/// Addresses of UDP sockets among them, so that listeners have some in a program that binds many ports.
pub(super) const DATAGRAM_ROWS: usize = ROWS * 3 / 4;
/// Words of an address beside its key: a bit of each process that serves it, and of those the ones that have not used their
/// socket yet, the owner of each bucket.
pub(super) const ROW_WORDS: usize = 2 + BUCKETS;

/// Sets of flows by their hash, and flows of a set. Each flow may be in one of two sets.
pub(super) const SETS: usize = 1 << 15;
pub(super) const SET_WORDS: usize = 8;

// Words of the table.
pub(super) const KEY: usize = 0;
pub(super) const SECRET: usize = 1;
pub(super) const OCCUPIED: usize = 3;
pub(super) const COOKIE: usize = 4;
/// Processes with a listener at an address without a row.
pub(super) const ROWLESS: usize = 5;
/// Mark of the process of which a thread changes the rows' keys; 0 of none.
pub(super) const ROW_LOCK: usize = 6;
/// Time 0 of all processes.
pub(super) const ORIGIN: usize = 7;
pub(super) const INCARNATIONS: usize = 8;
pub(super) const UNCLAIMED: usize = INCARNATIONS + SLOTS;
/// Hashes of the rows' addresses, side by side for those who look for one.
pub(super) const FIRST_KEY: usize = UNCLAIMED + SLOTS;
pub(super) const FIRST_ROW: usize = FIRST_KEY + ROWS;
pub(super) const FIRST_SET: usize = (FIRST_ROW + ROWS * ROW_WORDS).next_multiple_of(SET_WORDS);
pub(super) const WORDS: usize = FIRST_SET + SETS * SET_WORDS;

// Parts of a flow's word: the process, its incarnation, marks, a hash of the peer's first sequence number, and the end of
// the flow's hash.
pub(super) const SLOT_BITS: u32 = SLOTS.trailing_zeros();
pub(super) const TAG_BITS: u32 = 13;
pub(super) const TAG_MASK: u64 = (1 << TAG_BITS) - 1;
pub(super) const ENDED: u64 = 1 << TAG_BITS;
pub(super) const PASSED: u64 = ENDED << 1;
pub(super) const SYN_SHIFT: u32 = TAG_BITS + 2;
pub(super) const SYN_MASK: u64 = 0xff << SYN_SHIFT;
pub(super) const PRINT_SHIFT: u32 = SYN_SHIFT + 8;

/// The memory.
#[derive(Clone, Copy)]
pub(crate) struct SharedTable(pub(super) &'static [AtomicU64; WORDS]);

impl SharedTable {
    pub(crate) const WORDS: usize = WORDS;

    /// Maps the table into this process, and into all that it forks.
    pub(crate) fn new(file: BorrowedFd<'_>) -> std::io::Result<Self> {
        let this = Self(abi::shared_words(file)?);
        let random = forebay_sys::random_key();
        let words = random.as_chunks::<8>().0.iter().map(|bytes| u64::from_ne_bytes(*bytes));
        for (place, word) in this.0[SECRET..].iter().zip(words) {
            place.store(word, SeqCst);
        }
        let key = forebay_sys::random_key().first_chunk().map_or(0, |key| u32::from_ne_bytes(*key));
        this.0[KEY].store(key.into(), SeqCst);
        this.0[ORIGIN].store(forebay_sys::clock::machine_now_ns(), SeqCst);
        Ok(this)
    }

    /// Maps a table that other processes use.
    pub(crate) fn kept(file: BorrowedFd<'_>) -> std::io::Result<Self> {
        abi::kept_words(file).map(Self)
    }

    pub(super) fn secret(self) -> [u8; 16] {
        let halves = [SECRET, SECRET + 1].map(|word| self.0[word].load(SeqCst).to_ne_bytes());
        let mut secret = [0; 16];
        secret[..8].copy_from_slice(&halves[0]);
        secret[8..].copy_from_slice(&halves[1]);
        secret
    }

    pub(super) fn members(self, row: usize) -> &'static AtomicU64 {
        &self.0[FIRST_ROW + row * ROW_WORDS]
    }

    pub(super) fn idle(self, row: usize) -> &'static AtomicU64 {
        &self.0[FIRST_ROW + row * ROW_WORDS + 1]
    }

    pub(super) fn owner(self, row: usize, bucket: usize) -> &'static AtomicU64 {
        &self.0[FIRST_ROW + row * ROW_WORDS + 2 + bucket]
    }

    pub(super) fn key_of(self, row: usize) -> &'static AtomicU64 {
        &self.0[FIRST_KEY + row]
    }

    /// Row of an address, and whether it is free: it has had no address so far.
    pub(super) fn row(self, key: u64) -> Option<(usize, bool)> {
        let first = usize::try_from(key % ROWS as u64).unwrap_or(0);
        let rows = (0..ROWS).map(|step| (first + step) % ROWS);
        rows.map(|row| (row, self.key_of(row).load(SeqCst)))
            .find(|(_, found)| *found == key || *found == 0)
            .map(|(row, found)| (row, found == 0))
    }

    /// Words that a flow may have, by its hash.
    pub(super) fn places(self, hash: u64) -> impl Iterator<Item = &'static AtomicU64> {
        let set = |hash: u64| usize::try_from(hash % SETS as u64).unwrap_or(0);
        let sets = [set(hash), set(hash.rotate_right(32))];
        sets.into_iter().flat_map(move |set| &self.0[FIRST_SET + set * SET_WORDS..][..SET_WORDS])
    }

    /// True if the flow of this word is some process's, as far as is known: of one that has not ended, or of the one that will
    /// adopt it.
    pub(super) fn is_live(self, word: u64) -> bool {
        let tag = word & TAG_MASK;
        let slot = usize::try_from(tag % SLOTS as u64).unwrap_or(0);
        let is_occupied = self.0[OCCUPIED].load(SeqCst) & 1 << slot != 0;
        word & PASSED != 0 || is_occupied && self.tag(slot) == tag
    }

    /// Mark of the process that has a slot: of the next one in the slot it is another.
    pub(super) fn tag(self, slot: usize) -> u64 {
        let incarnation = self.0[INCARNATIONS + slot].load(SeqCst);
        (incarnation << SLOT_BITS | slot as u64) & TAG_MASK
    }

    /// Gives up all buckets of an address that a process owns.
    pub(super) fn give_up(self, row: usize, slot: usize) {
        for bucket in 0..BUCKETS {
            let without = |word| Some(Owner::of(word).without(slot).word());
            // Always Ok.
            let _ = self.owner(row, bucket).fetch_update(SeqCst, SeqCst, without);
        }
    }

    /// Removes what a process has left behind that has ended, but for what it has passed on.
    pub(super) fn clear(self, slot: usize) {
        let tag = self.tag(slot);
        self.0[UNCLAIMED + slot].store(0, SeqCst);
        self.0[ROWLESS].fetch_and(!(1 << slot), SeqCst);
        for row in (0..ROWS).filter(|row| self.key_of(*row).load(SeqCst) != 0) {
            self.members(row).fetch_and(!(1 << slot), SeqCst);
            self.idle(row).fetch_and(!(1 << slot), SeqCst);
            self.give_up(row, slot);
        }
        for place in &self.0[FIRST_SET..] {
            let word = place.load(SeqCst);
            if word != 0 && word & (TAG_MASK | PASSED) == tag {
                // Ignored: another process has it by now.
                let _ = place.compare_exchange(word, 0, SeqCst, SeqCst);
            }
        }
    }
}

//! Rows of addresses: found by everybody without a lock, taken and used again by one thread at a time.

use std::sync::atomic::Ordering::SeqCst;
use std::thread;

use super::owner::Owner;
use super::table::{BUCKETS, DATAGRAM_ROWS, OCCUPIED, ROW_LOCK, ROWS, SharedTable, TAG_BITS};

/// Marks of a row's key: its address is one of UDP sockets; it has an address.
pub(super) const OF_DATAGRAMS: u64 = 1;
pub(super) const IS_ROW: u64 = 2;

/// Key of a row that is about to have another address.
const VACANT: u64 = 4 | OF_DATAGRAMS;

/// Attempts to lock the rows. Whoever has them keeps them for some hundred instructions, unless it is suspended.
const ATTEMPTS: u32 = 1000;

/// Right to give rows to addresses, until it is dropped.
pub(super) struct LockedRows {
    table: SharedTable,
    holder: u64,
}

impl LockedRows {
    /// Locks the rows for a thread of the process in a slot. `None` if another thread has had them for too long.
    pub(super) fn lock(table: SharedTable, slot: usize) -> Option<Self> {
        let holder = 1 << TAG_BITS | table.tag(slot);
        let place = &table.0[ROW_LOCK];
        for _ in 0..ATTEMPTS {
            let found = place.load(SeqCst);
            // A process that was killed in between has left a row without an address at worst.
            let is_free = found == 0 || !table.is_live(found);
            if is_free && place.compare_exchange(found, holder, SeqCst, SeqCst).is_ok() {
                return Some(Self { table, holder });
            }
            thread::yield_now();
        }
        None
    }

    /// Row of a key, which it gets if it has none. `None` if other addresses have all rows that it may have.
    pub(super) fn row_for(&self, key: u64) -> Option<usize> {
        let found = self.table.row(key);
        if let Some((row, false)) = found {
            return Some(row);
        }
        if key & OF_DATAGRAMS != 0 && self.served_datagram_rows() >= DATAGRAM_ROWS {
            return None;
        }
        // Without a row that never had an address, every row is one where the key is looked for.
        let row =
            found.map(|(row, _)| row).or_else(|| (0..ROWS).find(|row| self.is_unused(*row)))?;
        self.table.key_of(row).store(VACANT, SeqCst);
        self.table.idle(row).store(0, SeqCst);
        (0..BUCKETS).for_each(|bucket| self.table.owner(row, bucket).store(0, SeqCst));
        self.table.key_of(row).store(key, SeqCst);
        Some(row)
    }

    fn served_datagram_rows(&self) -> usize {
        let is_served = |row: &usize| self.table.members(*row).load(SeqCst) != 0;
        (0..ROWS).filter(|row| self.is_of_datagrams(*row) && is_served(row)).count()
    }

    fn is_of_datagrams(&self, row: usize) -> bool {
        self.table.key_of(row).load(SeqCst) & OF_DATAGRAMS != 0
    }

    /// True if no process serves a row's address, nor takes what is new there. Only who has the rows begins to.
    fn is_unused(&self, row: usize) -> bool {
        let occupied = self.table.0[OCCUPIED].load(SeqCst);
        let is_live = |slot: Option<usize>| slot.is_some_and(|slot| occupied & 1 << slot != 0);
        let is_owned = |bucket| {
            let owner = Owner::of(self.table.owner(row, bucket).load(SeqCst));
            is_live(owner.current) || is_live(owner.before)
        };
        // Nobody takes datagrams of an address that no process serves.
        self.table.members(row).load(SeqCst) == 0
            && (self.is_of_datagrams(row) || !(0..BUCKETS).any(is_owned))
    }
}

impl Drop for LockedRows {
    fn drop(&mut self) {
        // Err if this process was taken for dead.
        let _ = self.table.0[ROW_LOCK].compare_exchange(self.holder, 0, SeqCst, SeqCst);
    }
}

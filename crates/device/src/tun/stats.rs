//! Packets for the device that the kernel dropped because they were not read in time: the
//! interface's `tx_dropped`.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, PoisonError};

use forebay_sys::hidden::Hidden;
use forebay_sys::interface::Interface;

use crate::KernelCounts;

/// Column of `tx_dropped` in an interface's line of `/proc/net/dev` (`dev_seq_printf_stats` in
/// net/core/net-procfs.c).
const TX_DROPPED: usize = 11;

/// Number of bytes to read from `/proc/net/dev` at a time: more than the kernel returns.
const LINES_BYTES: usize = 16 << 10;

/// Drops of one interface.
#[derive(Debug)]
pub(super) struct TunDrops {
    interface: Option<Interface>,
    /// `/proc/net/dev` of the namespace in which the device was opened. The kernel answers reads of
    /// it without a lock; over rtnetlink, the polling CPU would wait for every change of any
    /// interface.
    lines: Option<Hidden<File>>,
    /// Counter value that was reported [last](Self::newly).
    before: Mutex<u64>,
    /// Drops since the device was opened.
    counts: Arc<KernelCounts>,
}

impl Default for TunDrops {
    fn default() -> Self {
        let counts = KernelCounts::new(&["tx_dropped"]);
        Self { interface: None, lines: None, before: Mutex::new(0), counts }
    }
}

impl TunDrops {
    /// Begins to count drops.
    pub(super) fn of(interface: &Interface) -> Self {
        let lines = File::open("/proc/thread-self/net/dev").ok();
        let lines = lines.and_then(|lines| Hidden::new(lines).ok());
        let drops = Self { interface: Some(interface.clone()), lines, ..Self::default() };
        Self { before: Mutex::new(drops.counted().unwrap_or(0)), ..drops }
    }

    /// Returns the drops since the last call, of all queues; 0 if they cannot be read, because the
    /// device was moved to another namespace, or removed.
    pub(super) fn newly(&self) -> u64 {
        let mut before = self.before.lock().unwrap_or_else(PoisonError::into_inner);
        let newly = self.counted().map_or(0, |counted| counted.saturating_sub(*before));
        *before += newly;
        let told: u64 = self.counts.iter().map(|(_, count)| count).sum();
        self.counts.set(0, told + newly);
        newly
    }

    /// Returns the counters for reports.
    pub(super) fn counts(&self) -> &Arc<KernelCounts> {
        &self.counts
    }

    fn counted(&self) -> Option<u64> {
        let interface = self.interface.as_ref()?;
        let by_line = self.lines.as_ref().and_then(|lines| line_of(lines, &interface.name));
        // A renamed interface is found by its index.
        by_line.or_else(|| interface.counters().ok().map(|counters| counters.tx_dropped))
    }
}

/// Reads `tx_dropped` of an interface from `/proc/net/dev`.
fn line_of(lines: &File, name: &str) -> Option<u64> {
    let mut bytes = [0; LINES_BYTES];
    let mut offset = 0;
    loop {
        // A read returns whole lines only.
        let read = lines.read_at(&mut bytes, offset).ok().filter(|read| *read > 0)?;
        let text = std::str::from_utf8(bytes.get(..read)?).ok()?;
        let mut said =
            text.lines().filter_map(|line| line.trim_start().strip_prefix(name)?.strip_prefix(':'));
        if let Some(numbers) = said.next() {
            return numbers.split_ascii_whitespace().nth(TX_DROPPED)?.parse().ok();
        }
        offset += u64::try_from(read).ok()?;
    }
}

//! Registrations in sets of `epoll`. The kernel has them by file: a number at which the library puts another file would lose
//! them. Boost.Asio and Erlang register sockets before they bind them.

use std::os::fd::{BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::fs::fstat;
use rustix::io::{Errno, fcntl_getfd};

use crate::abi;
use crate::runtime::is_in_parents_memory;
use crate::table::DESCRIPTORS_MAX;

const WORDS: usize = DESCRIPTORS_MAX / 64;

/// Descriptors that this process has added to a set, and sets that it has added them to. Which of them are registered still, the
/// kernel knows.
static ADDED: Numbers = Numbers::new();
static SETS: Numbers = Numbers::new();

struct Numbers {
    words: [AtomicU64; WORDS],
    /// One more than the index of the last word in use.
    end: AtomicUsize,
}

impl Numbers {
    const fn new() -> Self {
        Self { words: [const { AtomicU64::new(0) }; WORDS], end: AtomicUsize::new(0) }
    }

    fn word_and_bit(&self, number: RawFd) -> Option<(usize, u64)> {
        let index = usize::try_from(number).ok().filter(|&index| index < DESCRIPTORS_MAX)?;
        Some((index / 64, 1 << (index % 64)))
    }

    fn has(&self, number: RawFd) -> bool {
        self.word_and_bit(number)
            .is_some_and(|(word, bit)| self.words[word].load(Ordering::Relaxed) & bit != 0)
    }

    fn insert(&self, number: RawFd) {
        if let Some((word, bit)) = self.word_and_bit(number)
            && self.words[word].load(Ordering::Relaxed) & bit == 0
        {
            self.end.fetch_max(word + 1, Ordering::Relaxed);
            self.words[word].fetch_or(bit, Ordering::Relaxed);
        }
    }

    fn remove(&self, number: RawFd) {
        if let Some((word, bit)) = self.word_and_bit(number) {
            self.words[word].fetch_and(!bit, Ordering::Relaxed);
        }
    }

    fn iter(&self) -> impl Iterator<Item = RawFd> {
        let words = self.words.iter().take(self.end.load(Ordering::Relaxed)).enumerate();
        words.flat_map(|(index, word)| {
            let word = word.load(Ordering::Relaxed);
            let bits = (0..64).filter(move |bit| word & 1 << bit != 0);
            bits.filter_map(move |bit| RawFd::try_from(index * 64 + bit).ok())
        })
    }

    fn clear(&self) {
        let words = self.words.iter().take(self.end.swap(0, Ordering::Relaxed));
        words.for_each(|word| word.store(0, Ordering::Relaxed));
    }
}

/// Registration of a number in a set.
#[derive(PartialEq, Eq, Debug)]
struct Registration {
    set: RawFd,
    events: EventFlags,
    data: u64,
}

/// Notes that the program adds a number to a set.
pub(crate) fn note(set: RawFd, number: RawFd) {
    ADDED.insert(number);
    SETS.insert(set);
}

/// Forgets a number that the program closes, or has another file at. A child that uses its parent's memory has numbers of its own.
pub(crate) fn forget(number: RawFd) {
    if (ADDED.has(number) || SETS.has(number)) && !is_in_parents_memory() {
        ADDED.remove(number);
        SETS.remove(number);
    }
}

/// Forgets the numbers of a range, which ends with `last`.
pub(crate) fn forget_within(first: u32, last: u32) {
    let is_within =
        |number: &RawFd| u32::try_from(*number).is_ok_and(|it| (first..=last).contains(&it));
    ADDED.iter().chain(SETS.iter()).filter(is_within).for_each(forget);
}

/// Forgets in a child what was noted: the registrations are the parent's, too.
pub(crate) fn forked() {
    ADDED.clear();
    SETS.clear();
}

/// True if this process has added the file at a number to a set.
pub(crate) fn is_registered(number: RawFd) -> bool {
    !registrations(number).is_empty()
}

/// Registrations of numbers at which another file is to be. Reading them takes long.
pub(crate) struct Registered(Vec<(RawFd, Registration)>);

impl Registered {
    pub(crate) fn of(numbers: impl IntoIterator<Item = RawFd>) -> Self {
        let of_number = |number| registrations(number).into_iter().map(move |it| (number, it));
        Self(numbers.into_iter().flat_map(of_number).collect())
    }

    /// Puts another file at one of the numbers, which keeps its registrations.
    pub(crate) fn replace(
        &self,
        number: RawFd,
        by: BorrowedFd<'_>,
        is_cloexec: bool,
    ) -> Result<(), Errno> {
        // Before: the file may stay open elsewhere, and the sets would go on telling of it.
        let ended: Vec<_> = self.of_number(number).filter(|it| end(number, it)).collect();
        let replaced = abi::replace(number, by, is_cloexec);
        for Registration { set, events, data } in ended {
            let add = |set: BorrowedFd<'_>| {
                abi::with_number(number, |file| {
                    epoll::add(set, file, EventData::new_u64(*data), *events)
                })
            };
            let _ = abi::with_number(*set, add); // as possible as it was before, unless memory is short
        }
        replaced
    }

    fn of_number(&self, number: RawFd) -> impl Iterator<Item = &Registration> {
        self.0.iter().filter(move |(of, _)| *of == number).map(|(_, registration)| registration)
    }
}

/// Puts another file at a number of the program, which keeps its registrations.
pub(crate) fn replace(number: RawFd, by: BorrowedFd<'_>, is_cloexec: bool) -> Result<(), Errno> {
    Registered::of([number]).replace(number, by, is_cloexec)
}

/// Registrations of the file at a number.
fn registrations(number: RawFd) -> Vec<Registration> {
    if !ADDED.has(number) {
        return Vec::new();
    }
    let Ok(about) = abi::with_number(number, |file| fstat(file)) else { return Vec::new() };
    let (mut found, mut are_all_read) = (Vec::new(), true);
    for set in SETS.iter() {
        match registration(set, number, about.st_ino) {
            Ok(registration) => found.extend(registration),
            Err(error) => {
                are_all_read = false;
                report_unread(error);
            }
        }
    }
    if found.is_empty() && are_all_read {
        ADDED.remove(number); // the program has deleted it: no need to look again
    }
    found
}

/// Ends a registration of a number; false if it has ended.
fn end(number: RawFd, registration: &Registration) -> bool {
    let delete =
        |set: BorrowedFd<'_>| abi::with_number(number, |file| epoll::delete(set, file).is_ok());
    abi::with_number(registration.set, delete)
}

/// Registration of a number, and of the file with this inode, in a set. `None` also for a set that was closed.
fn registration(set: RawFd, number: RawFd, inode: u64) -> Result<Option<Registration>, Errno> {
    let lines = match abi::read_file(&format!("/proc/self/fdinfo/{set}")) {
        Err(Errno::NOENT) if abi::with_number(set, |set| fcntl_getfd(set)).is_err() => {
            return Ok(None);
        }
        lines => lines?,
    };
    let of_number = lines.lines().find_map(|line| read(line, number, inode));
    Ok(of_number.map(|(events, data)| Registration { set, events, data }))
}

/// Reports that registrations are lost, since they cannot be read.
fn report_unread(error: Errno) {
    static IS_REPORTED: AtomicBool = AtomicBool::new(false);
    if !IS_REPORTED.swap(true, Ordering::Relaxed) {
        report!(
            "forebay: cannot read which sockets are in sets of epoll (/proc/self/fdinfo: {error}): those that were added before \
             bind or listen are not waited for; mount /proc, let the program have more descriptors (ulimit -n), or add \
             them later"
        );
    }
}

/// Events and data of a line of `fdinfo`, if it is of this number and inode:
/// `tfd:        5 events:       1d data: ffffffffffffffff pos:0 ino:61af sdev:7`.
fn read(line: &str, number: RawFd, inode: u64) -> Option<(EventFlags, u64)> {
    let field = |name: &str| {
        let value = line.split_once(name)?.1.trim_start();
        value.split_ascii_whitespace().next()
    };
    let hex = |name| field(name).and_then(|value| u64::from_str_radix(value, 16).ok());
    let is_of_number = field("tfd:")?.parse() == Ok(number);
    if !is_of_number || hex("ino:") != Some(inode) {
        return None;
    }
    let events = u32::try_from(hex("events:")?).ok()?;
    Some((EventFlags::from_bits_retain(events), hex("data:")?))
}

#[cfg(test)]
mod tests {
    use rustix::event::epoll::EventFlags;

    use super::{Numbers, read};

    #[test]
    fn exe_4_registration_is_read_from_fdinfo() {
        let line = "tfd:       19 events: 40000019 data: ffffffff00000013  pos:0 ino:1f4d sdev:8";
        let expected = (EventFlags::from_bits_retain(0x4000_0019), 0xffff_ffff_0000_0013);
        assert_eq!(read(line, 19, 0x1f4d), Some(expected));
        assert_eq!(read(line, 1, 0x1f4d), None, "another number");
        assert_eq!(read(line, 19, 0x1f4e), None, "another file that had the number");
        for other in ["", "tfd:", "pos:\t0", "ino:\t1057", "tfd: 19 events: x data: 1 ino:1f4d"] {
            assert_eq!(read(other, 19, 0x1f4d), None, "{other}");
        }
    }

    #[test]
    fn exe_4_closed_numbers_are_forgotten() {
        let are_noted = || [20_000, 20_001, 20_002].map(|number| super::ADDED.has(number));
        [20_000, 20_001, 20_002].into_iter().for_each(|number| super::note(20_003, number));
        super::forget(20_000);
        assert_eq!(are_noted(), [false, true, true]);
        super::forget_within(20_002, u32::MAX);
        assert_eq!(are_noted(), [false, true, false]);
        assert!(!super::SETS.has(20_003));
    }

    #[test]
    fn exe_4_noted_numbers_are_found_again() {
        static NUMBERS: Numbers = Numbers::new();
        let numbers = [0, 3, 63, 64, 1_000, (1 << 20) - 1];
        numbers.into_iter().for_each(|number| NUMBERS.insert(number));
        [-1, 1 << 20].into_iter().for_each(|number| NUMBERS.insert(number));
        assert_eq!(NUMBERS.iter().collect::<Vec<_>>(), numbers);
        assert!(NUMBERS.has(64) && !NUMBERS.has(65) && !NUMBERS.has(-1));
        [-1, 65, 1_000].into_iter().for_each(|number| NUMBERS.remove(number));
        assert!(NUMBERS.has(64) && !NUMBERS.has(1_000));
        NUMBERS.clear();
        assert_eq!(NUMBERS.iter().next(), None);
        assert!(!NUMBERS.has(64));
    }
}

//! Sockets of ours by descriptor. Lookups take no lock.

use std::ops::Deref;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

use arc_swap::ArcSwapOption;

use crate::critical::{self, Critical};
use crate::runtime::{forks, hold_at_end, is_in_parents_memory};
use crate::socket::Socket;
use crate::{relay, udp};

/// Number of descriptors: the kernel's default for `fs.nr_open`. Pages of slots never used take no memory.
pub(crate) const DESCRIPTORS_MAX: usize = 1 << 20;

/// Descriptors in `SOCKETS`, by [`NOT_OURS`], [`OURS`] and [`closing`]: a call on any other descriptor costs this one load.
static STATES: [AtomicU8; DESCRIPTORS_MAX] = [const { AtomicU8::new(NOT_OURS) }; DESCRIPTORS_MAX];
static SOCKETS: [ArcSwapOption<Socket>; DESCRIPTORS_MAX] =
    [const { ArcSwapOption::const_empty() }; DESCRIPTORS_MAX];

/// One more than the highest descriptor that was ever ours.
static END: AtomicUsize = AtomicUsize::new(0);

const NOT_OURS: u8 = 0;
const OURS: u8 = 1;
/// A thread of the first process closes the descriptor, and removes the socket.
const CLOSING: u8 = 2;

/// Right to close a descriptor.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Closing {
    /// The socket is to be [removed](remove_closing) before that.
    Ours,
    /// No socket of ours is there.
    Others,
    /// Another thread has it.
    Begun,
}

/// Socket that a call has found, which is critical from then on.
pub(crate) struct Found {
    socket: Arc<Socket>,
    _critical: Critical,
}

impl Found {
    /// The socket as the table has it.
    pub(crate) fn shared(&self) -> &Arc<Socket> {
        &self.socket
    }
}

impl Deref for Found {
    type Target = Socket;

    fn deref(&self) -> &Socket {
        &self.socket
    }
}

/// Socket at a descriptor, for a call of the program. None is at that of a connection which is another process's: if its owner
/// lives, the number is the kernel's from then on.
pub(crate) fn find(descriptor: RawFd) -> Option<Found> {
    if !may_be_ours(descriptor) {
        return None;
    }
    hold_at_end();
    look(descriptor).filter(|found| !relay::settle(descriptor, found))
}

/// Socket at a descriptor, for the library itself, which goes on as the process ends.
pub(crate) fn look(descriptor: RawFd) -> Option<Found> {
    let index = index(descriptor)?;
    if STATES[index].load(Ordering::Acquire) == NOT_OURS {
        return None;
    }
    let critical = critical::enter();
    SOCKETS[index].load_full().map(|socket| Found { socket, _critical: critical })
}

/// Socket at a descriptor, for a call that uses it: in place of a UDP socket of the parent this process opens its own.
pub(crate) fn find_usable(descriptor: RawFd) -> Option<Found> {
    let found = find(descriptor)?;
    if !matches!(&*found, Socket::Udp(_)) || !found.is_of_parent() {
        return Some(found);
    }
    udp::adopt(found.shared());
    drop(found);
    find(descriptor)
}

/// True if the table has a slot for this descriptor.
pub(crate) fn has_slot(descriptor: RawFd) -> bool {
    index(descriptor).is_some()
}

/// Enters a socket. The caller has just obtained the descriptor from the kernel.
pub(crate) fn insert(descriptor: RawFd, socket: Arc<Socket>) {
    if let Some(index) = index(descriptor)
        && !is_in_parents_memory()
    {
        // First: who looks at all descriptors finds it once it is ours.
        END.fetch_max(index + 1, Ordering::AcqRel);
        SOCKETS[index].store(Some(socket));
        STATES[index].store(OURS, Ordering::Release);
    }
}

/// Enters a socket in place of another one, unless a thread has removed that meanwhile.
pub(crate) fn exchange(descriptor: RawFd, before: &Arc<Socket>, socket: &Arc<Socket>) {
    if let Some(index) = index(descriptor) {
        SOCKETS[index].compare_and_swap(before, Some(Arc::clone(socket)));
    }
}

/// Removes a socket from a descriptor that is the kernel's from now on, unless a thread has removed it meanwhile.
pub(crate) fn forget(descriptor: RawFd, socket: &Arc<Socket>) {
    let Some(index) = index(descriptor) else { return };
    let is_open =
        STATES[index].compare_exchange(OURS, NOT_OURS, Ordering::AcqRel, Ordering::Acquire);
    if is_open.is_err() {
        return;
    }
    let before = SOCKETS[index].compare_and_swap(socket, None);
    if socket.is_of_parent() && before.as_ref().is_some_and(|before| Arc::ptr_eq(before, socket)) {
        // Its locks may be held by threads that this process has not.
        std::mem::forget(Arc::clone(socket));
    }
}

/// One more than the highest descriptor that was ever ours.
pub(crate) fn end_of_numbers() -> RawFd {
    RawFd::try_from(END.load(Ordering::Acquire)).unwrap_or(RawFd::MAX)
}

/// True if a socket of ours may be at a descriptor.
pub(crate) fn may_be_ours(descriptor: RawFd) -> bool {
    index(descriptor).is_some_and(|index| STATES[index].load(Ordering::Acquire) != NOT_OURS)
}

/// State of a descriptor that a thread of this process closes. In a child, in which that thread does not live, it is another.
fn closing() -> u8 {
    let processes = usize::from(u8::MAX - CLOSING) + 1;
    u8::try_from(forks() % processes).map_or(CLOSING, |forks| CLOSING + forks)
}

/// Begins to close a descriptor. Its socket is still found there.
pub(crate) fn begin_closing(descriptor: RawFd) -> Closing {
    let Some(state) = index(descriptor).map(|index| &STATES[index]) else {
        return Closing::Others;
    };
    let (before, closing) = (state.load(Ordering::Acquire), closing());
    if before == NOT_OURS || is_in_parents_memory() {
        return Closing::Others;
    }
    if before == closing {
        return Closing::Begun;
    }
    match state.compare_exchange(before, closing, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => Closing::Ours,
        Err(NOT_OURS) => Closing::Others,
        Err(_) => Closing::Begun,
    }
}

/// Removes the socket at a descriptor that is about to be closed: from then on the kernel may give the number
/// to any other file. The socket is to be [let go](Socket::let_go) once the number is closed: who polls it would
/// see its end.
#[must_use]
pub(crate) fn remove(descriptor: RawFd) -> Option<Arc<Socket>> {
    let index = index(descriptor)?;
    // The parent's descriptor stays open.
    let is_own = STATES[index].load(Ordering::Acquire) != NOT_OURS && !is_in_parents_memory();
    if is_own { take(index) } else { None }
}

/// Removes the socket at a descriptor that this thread has [begun to close](begin_closing), like [`remove`].
#[must_use]
pub(crate) fn remove_closing(descriptor: RawFd) -> Option<Arc<Socket>> {
    take(index(descriptor)?)
}

/// Ends the use of a descriptor's socket as the process ends. The descriptor stays ours: to the kernel, calls on it are on
/// another file.
pub(crate) fn end(descriptor: RawFd) -> Option<Arc<Socket>> {
    SOCKETS[index(descriptor)?].swap(None)
}

fn take(index: usize) -> Option<Arc<Socket>> {
    let was_ours = STATES[index].swap(NOT_OURS, Ordering::AcqRel) != NOT_OURS;
    if was_ours { SOCKETS[index].swap(None) } else { None }
}

/// Descriptors of ours within a range, which ends with `last`.
pub(crate) fn within(first: u32, last: u32) -> impl Iterator<Item = RawFd> {
    let end = (last as usize).saturating_add(1).min(END.load(Ordering::Acquire));
    (first as usize..end)
        .filter(|&index| STATES[index].load(Ordering::Acquire) != NOT_OURS)
        .filter_map(|index| RawFd::try_from(index).ok())
}

/// Descriptors of a socket.
pub(crate) fn numbers_of(socket: &Arc<Socket>) -> Vec<RawFd> {
    let is_its =
        |number: &RawFd| look(*number).is_some_and(|other| Arc::ptr_eq(other.shared(), socket));
    within(0, u32::MAX).filter(is_its).collect()
}

fn index(descriptor: RawFd) -> Option<usize> {
    usize::try_from(descriptor).ok().filter(|&index| index < DESCRIPTORS_MAX)
}

//! Connections that processes use by the kernel's calls, as children of the one that has accepted them do.
//!
//! The number that the program has for a connection is one end of a pair of the kernel's sockets, which a fork copies as any
//! descriptor. When another process than the owner wants to use it, it [asks](ask) the owner, and a thread of the owner
//! takes the connection over: from then on the pair carries the bytes themselves, and the thread copies them between the
//! connection and its own end. All processes then use the program's end without the library, the owner as well.

mod ask; //    questions and answers
mod name; //   names of the relays' ends
mod owner; //  the thread that copies
mod pump; //   bytes in both directions
mod rights; // descriptors in messages

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, Weak};
use std::time::{SystemTime, UNIX_EPOCH};

use forebay_sys::hidden::{self, Hidden};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::fstat;
use rustix::io::{Errno, FdFlags, fcntl_getfd};

pub(crate) use self::ask::Answer;
pub(crate) use self::name::{RelayId, RelayName};
pub(crate) use self::owner::run;
use self::owner::{Held, Relay};
pub(crate) use self::rights::passed_numbers;
use crate::socket::Socket;
use crate::stream::Stream;
use crate::table::Found;
use crate::{abi, fork_locks, runtime, table};

/// Number of forks that this process has begun or ended.
static FORKS_MADE: AtomicUsize = AtomicUsize::new(0);

/// Connections that this process has accepted and not closed.
static OWN: AtomicUsize = AtomicUsize::new(0);

/// True if this process inherited connections, which it asks its parent for at their first use.
static MAY_BE_ELSEWHERE: AtomicBool = AtomicBool::new(false);

/// Lock that threads share while they make, hand over or close a connection: a fork between would leave copies of its
/// descriptors in a child that does not know of them. The thread that forks has it alone.
static CHANGES: RwLock<()> = RwLock::new(());

/// Owner of connections, as its own threads and those of its children see it.
pub(crate) struct RelayOwner {
    /// End by which processes ask.
    asks: Hidden,
    /// Number of the end at which the owner is asked, closed in each child.
    asked: RawFd,
    /// Number of the owner in names.
    number: u64,
    news: Arc<News>,
}

/// News for the owner's thread.
struct News {
    /// Wakes the thread.
    wakes: Hidden,
    inbox: Mutex<Inbox>,
    /// Connections that this process has accepted, and neither handed over nor left. For others a question waits no more.
    kept: Mutex<HashMap<RelayId, Weak<Socket>>>,
    /// Connections that are relayed.
    relays: AtomicUsize,
    /// Questions that wait for a connection that is just being closed. Changed with `kept` locked.
    waiting: AtomicUsize,
}

/// Work for the owner's thread, bounded by the connections that there are.
#[derive(Default)]
struct Inbox {
    /// Relays whose connections have news, each once.
    ready: Vec<RelayId>,
    /// Connections that the owner has closed, and others not.
    held: Vec<Held>,
}

/// State of a connection that its relay needs.
pub(crate) struct Part {
    owner: Option<Arc<RelayOwner>>,
    id: RelayId,
    /// Forks of the process at that time.
    forks_made: usize,
    /// Numbers of the hidden ends of the pair: the polled one, and the setter's.
    polled: RawFd,
    setter: Option<Setter>,
    is_taken: AtomicBool,
}

/// The setter's end of a pair: its number, and the file by which a child tells it from another one there.
struct Setter {
    number: RawFd,
    file: FileId,
}

/// Device and number of a file.
type FileId = (u64, u64);

impl RelayOwner {
    /// Owner of this process's connections, and the end at which its thread receives questions.
    pub(crate) fn new() -> Result<(Self, Hidden), Errno> {
        let (asks, asked) = ask::ways()?;
        let (asks, asked) = (Hidden::new(asks)?, Hidden::new(asked)?);
        let wakes = Hidden::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        // The time of another process's start, and its number, make another number.
        let number = u64::try_from(now.as_nanos() & u128::from(u64::MAX)).unwrap_or_default()
            ^ u64::from(std::process::id()) << 40;
        let news = News {
            wakes,
            inbox: Mutex::default(),
            kept: Mutex::default(),
            relays: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
        };
        let owner = Self { asks, asked: abi::number(asked.as_fd()), number, news: Arc::new(news) };
        Ok((owner, asked))
    }

    /// True while connections are relayed.
    pub(crate) fn has_any(&self) -> bool {
        self.news.relays.load(Ordering::Acquire) > 0
    }

    /// Hands a connection that this process has closed to the thread.
    fn hold(&self, held: Held) {
        self.news.relays.fetch_add(1, Ordering::AcqRel);
        self.news.inbox().held.push(held);
        self.news.wake();
    }
}

impl News {
    fn wake(&self) {
        // Ignored: it fails only if the thread is about to be woken.
        let _ = rustix::io::write(&self.wakes, &1u64.to_ne_bytes());
    }

    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn kept(&self) -> MutexGuard<'_, HashMap<RelayId, Weak<Socket>>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the wait of questions for a connection: its relay exists or is in the inbox, or there will be none.
    fn decide(&self, id: RelayId) {
        self.kept().remove(&id);
        if self.waiting.load(Ordering::Acquire) > 0 {
            self.wake();
        }
    }
}

impl Part {
    /// Part of a connection that this process has just accepted, by the numbers of its pair.
    pub(crate) fn new((polled, setter): (RawFd, Option<RawFd>)) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        OWN.fetch_add(1, Ordering::Relaxed);
        Self {
            owner: runtime::relay_owner(),
            id: RelayId(NEXT.fetch_add(1, Ordering::Relaxed)),
            forks_made: FORKS_MADE.load(Ordering::Relaxed),
            polled,
            setter: setter.and_then(|number| Some(Setter { number, file: file_at(number)? })),
            is_taken: AtomicBool::new(false),
        }
    }

    /// True once the pair carries the bytes, or is about to carry them.
    pub(crate) fn is_taken(&self) -> bool {
        self.is_taken.load(Ordering::Acquire)
    }

    /// Claims the right to hand the connection over. True for one thread.
    fn claim(&self) -> bool {
        !self.is_taken.swap(true, Ordering::AcqRel)
    }

    /// True if other processes may have copies.
    pub(crate) fn may_have_copies(&self) -> bool {
        self.owner.is_some() && FORKS_MADE.load(Ordering::Acquire) != self.forks_made
    }

    fn ask(&self) -> Option<Answer> {
        let owner = self.owner.as_ref()?;
        ask::ask(owner.asks.as_fd(), self.id)
    }

    /// Closes this process's copies of the hidden ends, which the owner's names tell from other files at their numbers.
    fn close_named_copies(&self, name: &RelayName) {
        let is_same = |other: Option<RelayName>| other.is_some_and(|other| other.is_of_same(name));
        if is_same(abi::with_number(self.polled, RelayName::of_peer)) {
            abi::with_number(self.polled, abi::close_forgotten);
        }
        self.close_setters_copy();
    }

    /// Closes this child's copy of the setter's end, which would hide the owner's end, or the last copy's, from others.
    fn close_setters_copy(&self) {
        if let Some(setter) = &self.setter
            && hidden::is_hidden(setter.number)
            && file_at(setter.number) == Some(setter.file)
        {
            abi::with_number(setter.number, abi::close_forgotten);
        }
    }
}

/// Gives a connection up for the program's last number of it: the owner's thread keeps it as long as others have copies.
pub(crate) fn let_go(stream: &Stream) {
    OWN.fetch_sub(1, Ordering::Relaxed);
    leave(stream);
}

/// Hands a connection of this process to the owner's thread, which keeps it as long as other processes have copies.
pub(crate) fn leave(stream: &Stream) {
    let part = &stream.part;
    let Some(owner) = &part.owner else { return };
    let _change = change();
    if part.may_have_copies()
        && part.claim()
        && let Some(relay) = Relay::of(stream, owner)
        && relay.has_copies()
    {
        owner.hold(Held { id: part.id, relay });
    }
    owner.news.decide(part.id);
}

/// Registers a connection that this process has just accepted, so that other processes find it.
pub(crate) fn keep(socket: &Arc<Socket>) {
    if let Socket::Stream(stream) = &**socket
        && let Some(owner) = &stream.part.owner
    {
        owner.news.kept().insert(stream.part.id, Arc::downgrade(socket));
    }
}

/// True if this process may have connections of others, which it asks for at their first use.
pub(crate) fn may_be_elsewhere() -> bool {
    MAY_BE_ELSEWHERE.load(Ordering::Relaxed)
}

/// True if standard error is a connection.
pub(crate) fn is_standard_error() -> bool {
    RelayName::of_peer(std::io::stderr().as_fd()).is_some()
}

/// Makes the number of a connection the kernel's, if the connection is another process's, or was taken over. False if it
/// stays ours.
pub(crate) fn settle(number: RawFd, found: &Found) -> bool {
    match &**found {
        Socket::Stream(stream) if stream.is_elsewhere() => hand_over(number, found, stream),
        _ => false,
    }
}

/// Makes the number of a connection the kernel's, for a use of which the library does not learn.
pub(crate) fn give(number: RawFd) {
    if let Some(found) = table::find(number)
        && let Socket::Stream(stream) = &*found
    {
        hand_over(number, &found, stream);
    }
}

fn hand_over(number: RawFd, found: &Found, stream: &Stream) -> bool {
    let Some(answer) = stream.part.ask() else { return false };
    let replaced = match &answer {
        Answer::Same => Ok(()),
        Answer::Other(other) => {
            abi::with_number(number, |old| fcntl_getfd(old)).and_then(|flags| {
                abi::replace(number, other.as_fd(), flags.contains(FdFlags::CLOEXEC))
            })
        }
    };
    if replaced.is_err() {
        return false;
    }
    if runtime::is_in_parents_memory() {
        return true;
    }
    if stream.is_of_parent()
        && let Some(name) = abi::with_number(number, RelayName::of_peer)
    {
        stream.part.close_named_copies(&name);
    }
    table::forget(number, found.shared());
    true
}

/// Closes the hidden copy of a connection's end, before this child closes a number of it.
pub(crate) fn close_copy(number: RawFd) {
    let Some(found) = table::look(number) else { return };
    let Socket::Stream(stream) = &*found else { return };
    if !stream.is_of_parent() || runtime::is_in_parents_memory() {
        return;
    }
    // The table has one reference for each number.
    let is_last = Arc::strong_count(found.shared()) <= 2
        || table::numbers_of(found.shared()).iter().all(|other| *other == number);
    let polled = stream.part.polled;
    if !is_last || polled == number {
        return;
    }
    if file_at(number).is_some_and(|own| file_at(polled) == Some(own)) {
        abi::with_number(polled, abi::close_forgotten);
    }
    stream.part.close_setters_copy();
}

/// File at a number.
fn file_at(number: RawFd) -> Option<FileId> {
    abi::with_number(number, |file| fstat(file)).ok().map(|it| (it.st_dev, it.st_ino))
}

/// Permission to make, hand over or close a connection, which no fork copies before it is dropped. A thread may have several.
pub(crate) fn change() -> RwLockReadGuard<'static, ()> {
    CHANGES.read().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps the lock of this module until the process has forked.
pub(crate) fn keep_locks() {
    fork_locks::lock_alone(&CHANGES).into_iter().for_each(fork_locks::keep);
}

/// Notes that this process forks, before and after.
pub(crate) fn note_fork() {
    FORKS_MADE.fetch_add(1, Ordering::AcqRel);
}

/// Begins anew in a child, which keeps the end by which it asks its parent. Copies of relays' ends would hide the
/// end of the owner, or of the program's last copy, from others.
pub(crate) fn forked(parents: Option<&RelayOwner>) {
    if OWN.swap(0, Ordering::Relaxed) > 0 {
        MAY_BE_ELSEWHERE.store(true, Ordering::Relaxed);
    }
    let Some(owner) = parents else { return };
    abi::with_number(owner.asked, abi::close_forgotten);
    if owner.news.relays.swap(0, Ordering::Relaxed) == 0 {
        return;
    }
    for number in hidden::within(0, u32::MAX) {
        // The program's end, too, of which the owner has copies for who asks.
        let is_of_relay = |file: BorrowedFd<'_>| {
            RelayName::of_end(file).or_else(|| RelayName::of_peer(file)).is_some()
        };
        if abi::with_number(number, is_of_relay) {
            abi::with_number(number, abi::close_forgotten);
        }
    }
}

/// Open descriptors of this process. Without /proc, all numbers up to the last one of ours.
pub(crate) fn open_numbers() -> Vec<RawFd> {
    let Ok(entries) = std::fs::read_dir("/proc/self/fd") else {
        return (0..table::end_of_numbers()).collect();
    };
    let number = |entry: std::fs::DirEntry| entry.file_name().to_str()?.parse().ok();
    entries.filter_map(Result::ok).filter_map(number).collect()
}

/// Closes the copies that this process, which ends, has of relayed connections.
pub(crate) fn close_own_copies() {
    for number in open_numbers() {
        let is_relayed = |file: BorrowedFd<'_>| RelayName::of_peer(file).is_some();
        if !hidden::is_hidden(number) && abi::with_number(number, is_relayed) {
            abi::make_unusable(number);
        }
    }
}

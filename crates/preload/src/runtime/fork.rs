//! Engines across forks: the copy that a child may run, and the lock by which processes find each other.

use std::process;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use forebay_sys::hidden;

use super::finish;
use super::start::open;
use super::{
    IS_USED, PREPARED, Prepared, RUNNING, configured, is_running, may_be_beside, own, prepared,
    told,
};
use crate::engine_lock::EngineLock;
use crate::{fork_locks, listener, relay, udp};

/// Lowest number of descriptors that the program does not know.
const HIDDEN_FROM: i32 = 512;

/// Pause before the devices are opened once more for a child, if that has failed.
const OPEN_PAUSE: Duration = Duration::from_secs(1);

/// Lock shared by processes that were forked before any had prepared an engine, by which they find each other.
static FIRST: OnceLock<Arc<EngineLock>> = OnceLock::new();

/// True if the process had that lock as another program.
static IS_KEPT: AtomicBool = AtomicBool::new(false);

/// Time at which the devices could not be opened once more. Locked only with the engine that is prepared, or while a socket
/// of the parent is taken over.
static FAILED: Mutex<Option<Instant>> = Mutex::new(None);

static FORKS: AtomicUsize = AtomicUsize::new(0);

/// Process that this memory belongs to. A child of `vfork` has another number, and uses its parent's memory.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Number of forks that lie between the process that loaded the library first and this one.
pub(crate) fn forks() -> usize {
    FORKS.load(Ordering::Relaxed)
}

/// Records the process, when the library is loaded.
pub(crate) fn loaded() {
    hidden::open_from(HIDDEN_FROM);
    PROCESS.store(process::id(), Ordering::Relaxed);
}

/// Counts a fork, in the child, which has memory of its own.
pub(crate) fn forked() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    IS_USED.store(false, Ordering::Relaxed);
    finish::forked();
    loaded();
}

/// True in a child that uses its parent's memory until it runs another program (`vfork`).
pub(crate) fn is_in_parents_memory() -> bool {
    // 0 before the library was initialised, when others that are may call it.
    let own = PROCESS.load(Ordering::Relaxed);
    own != 0 && own != process::id()
}

/// Prepares for a fork, which copies the engine that is prepared, and locks of this thread alone.
pub(crate) fn before_fork() {
    if is_in_parents_memory() {
        return;
    }
    // First: who has the lock of relays may wait for others.
    relay::keep_locks();
    listener::keep_locks();
    udp::keep_locks();
    if let Some(mut prepared) = fork_locks::lock(&PREPARED) {
        prepare_next(&mut prepared);
        if prepared.is_none() && !is_running() {
            make_first();
        }
        prepared.iter().for_each(|prepared| prepared.engine_lock.before_copy());
        fork_locks::keep(prepared);
    }
}

/// Prepares another engine for a child, if an earlier child has the one that was prepared, or this process runs one and has
/// a UDP socket that the child may use: both may receive.
fn prepare_next(prepared: &mut Option<Prepared>) {
    let engine_lock = match (prepared.as_ref(), own()) {
        (_, Some(_)) if !may_be_beside() || !udp::any_untouched() => return,
        (Some(before), _) if !before.engine_lock.may_be_others() => return,
        (Some(before), _) => before.engine_lock.next(),
        (None, Some(runs)) => runs.engine_lock.next(),
        (None, None) => return,
    };
    if has_just_failed() {
        return;
    }
    let Some(config) = configured() else { return };
    let mut failed = failed();
    match open(config, Some(Arc::new(engine_lock))) {
        Ok(next) => {
            // Nothing of the copy was ever used: its descriptors and its memory are all that it has.
            drop(prepared.replace(next));
            *failed = None;
        }
        Err(error) if failed.replace(Instant::now()).is_none() => {
            let _ = told::<()>(Err(error));
        }
        Err(_) => {}
    }
}

/// Makes the lock that this process's children share. Without it they do not know of each other, which is told once; the
/// next fork tries again.
fn make_first() {
    static HAS_TOLD: AtomicBool = AtomicBool::new(false);
    if FIRST.get().is_some() || !may_be_beside() {
        return;
    }
    match EngineLock::new() {
        // Not set before: by the lock of the engine that is prepared.
        Ok(engine_lock) => drop(FIRST.set(Arc::new(engine_lock))),
        Err(_) if HAS_TOLD.swap(true, Ordering::Relaxed) => {}
        Err(error) => report!(
            "forebay: process {} forks, and cannot create the memory files by which its children know of each other: \
             {error}; if several of them serve one address, they reset each other's connections: let the program have \
             more descriptors (ulimit -n), then start it again",
            process::id()
        ),
    }
}

/// Sets the lock that this process had as another program.
pub(crate) fn keep_lock(kept: EngineLock) {
    IS_KEPT.store(true, Ordering::Relaxed);
    // Not set before: the library was just loaded.
    drop(FIRST.set(Arc::new(kept)));
}

/// Lock for the engine that this process prepares.
pub(super) fn to_prepare() -> Option<Arc<EngineLock>> {
    let next = |lock: Arc<EngineLock>| Arc::new(lock.next());
    // The engine of a lock that was kept may be run by another process.
    let of_first = || if IS_KEPT.load(Ordering::Relaxed) { first().map(next) } else { first() };
    parents().map(next).or_else(of_first)
}

/// Lock by which this process and those that it is related to find each other, if there is one.
pub(crate) fn shared_lock() -> Option<Arc<EngineLock>> {
    let of_prepared = prepared().as_ref().map(|prepared| Arc::clone(&prepared.engine_lock));
    let of_engine = || own().map(|runtime| Arc::clone(&runtime.engine_lock));
    of_prepared.or_else(of_engine).or_else(inherited)
}

/// Notes in a child that it has a copy of the engine that is prepared.
pub(crate) fn note_copy() {
    if let Some(prepared) = &*prepared() {
        prepared.engine_lock.note_copy();
    }
}

/// Lock that this process has without an engine that is prepared.
pub(super) fn inherited() -> Option<Arc<EngineLock>> {
    parents().or_else(first)
}

/// Lock of this process for the engine that its parent, or the next of its ancestors, has run before the fork.
pub(super) fn parents() -> Option<Arc<EngineLock>> {
    let mut ancestors = RUNNING.get(..forks()).unwrap_or_default().iter().rev();
    let parent =
        ancestors.find_map(|slot| slot.get()?.as_ref().ok()).filter(|_| may_be_beside())?;
    Some(Arc::new(parent.engine_lock.again()))
}

/// Lock of this process for the first engine, if no other is prepared: that of an ancestor has the state of an engine
/// that the ancestor may have run.
pub(super) fn first() -> Option<Arc<EngineLock>> {
    FIRST.get().map(|first| Arc::new(first.again()))
}

/// Process whose engine excludes one here: it has the devices, and this one was forked from it.
pub(crate) fn excluding() -> Option<i32> {
    parents_engine().filter(|_| !may_be_beside())
}

/// Process that runs an engine which this one has a copy of, since it was forked from it.
fn parents_engine() -> Option<i32> {
    let ancestors = RUNNING.get(..forks()).unwrap_or_default();
    let engines = ancestors.iter().filter_map(|slot| slot.get()?.as_ref().ok());
    engines.filter_map(|runtime| runtime.engine_lock.holder()).next()
}

/// True if this process has just failed to open the devices beside others.
pub(crate) fn has_just_failed() -> bool {
    failed().is_some_and(|failed| failed.elapsed() < OPEN_PAUSE)
}

pub(super) fn failed() -> MutexGuard<'static, Option<Instant>> {
    FAILED.lock().unwrap_or_else(PoisonError::into_inner)
}

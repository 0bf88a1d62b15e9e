//! Engine of this process. It is prepared when the first socket is taken, and started by the process that uses one first,
//! which may be a child of the one that prepared it.

mod start; //  engines opened over the devices, and run
mod fork; //   copies of engines in children
mod finish; // end of the process

use std::ffi::c_int;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;
use std::{process, thread};

use forebay::Via;
use forebay::net::message::DeviceIndex;
use forebay::net::{Net, NetEngine};
use forebay_control::preload_config::{PreloadConfig, VARIABLE};
use forebay_device::rx_filter::FilterProtocol;
use forebay_metrics::Metrics;
use forebay_sys::hidden::Hidden;
use forebay_sys::signals::with_all_blocked;
use rustix::io::Errno;

pub(crate) use self::finish::{FINISH_MAX, finish, hold_at_end};
pub(crate) use self::fork::{
    before_fork, excluding, forked, forks, has_just_failed, is_in_parents_memory, keep_lock,
    loaded, note_copy, shared_lock,
};
use self::fork::{inherited, to_prepare};
use self::start::{open, spawn, start};
use crate::critical;
use crate::critical::Handled;
use crate::engine_lock::EngineLock;
use crate::membership::{Membership, Rings};
use crate::relay::RelayOwner;
use crate::start_error::StartError;

/// Bound of nested forks: in a child beyond it, a taken port answers `ENODEV`.
pub(crate) const FORKS_MAX: usize = 8;

/// Pause between two looks for the end of one of too many processes.
const SLOT_LOOK: Duration = Duration::from_secs(1);

/// Engines of this process and of its ancestors, by number of forks. A child has none of the threads of its
/// parent's engine, and must not wait for locks that they hold: it starts one of its own.
static RUNNING: [OnceLock<Result<Runtime, Errno>>; FORKS_MAX] =
    [const { OnceLock::new() }; FORKS_MAX];

/// Engine that no process has run yet: no thread of it was started, and nothing holds its locks, so that a
/// child may run the copy that it gets by a fork.
static PREPARED: Mutex<Option<Prepared>> = Mutex::new(None);

static CONFIG: OnceLock<Option<PreloadConfig>> = OnceLock::new();

/// True once this process has used a socket: before, its children may be to use them.
static IS_USED: AtomicBool = AtomicBool::new(false);

/// Engine of a process.
pub(crate) struct Runtime {
    pub(crate) net: Net,
    /// Indices of the interfaces, by the index of the device; 0 of one that is gone.
    pub(crate) interfaces: Vec<u32>,
    /// Right to receive the taken packets, held until the process ends.
    engine_lock: Arc<EngineLock>,
    /// Wakes the thread that finishes connections when the process ends.
    finisher: Arc<Hidden>,
    has_finished: Arc<AtomicBool>,
    /// Part in the new connections, if other processes may receive, too.
    pub(crate) membership: Option<Arc<Membership>>,
    /// Owner of the connections, if there can be some that other processes use, too.
    relay_owner: Option<Arc<RelayOwner>>,
}

/// Engine that can be run, once, by one of the processes that have a copy.
struct Prepared {
    net: Net,
    engine: NetEngine,
    interfaces: Vec<u32>,
    engine_lock: Arc<EngineLock>,
    rings: Rings,
    /// Devices, as clients of the control socket see them.
    metrics: Metrics,
}

/// True if a socket of this protocol that is bound to this address is to be one of ours. Loopback addresses
/// stay with the kernel.
pub(crate) fn is_taken(protocol: FilterProtocol, local: SocketAddr) -> bool {
    let Some(config) = configured() else { return false };
    !local.ip().to_canonical().is_loopback()
        && local.port() != 0
        && config.take.takes_port(protocol, local.port())
}

/// Opens the devices, while the process may have privileges that it gives up later. They receive nothing before
/// an engine runs.
///
/// # Errors
/// `ENODEV` if a device cannot be opened, for a reason that standard error has.
pub(crate) fn prepare() -> Result<(), Errno> {
    let mut prepared = prepared();
    let config = configured().ok_or(Errno::NODEV)?;
    // Packet memory that AF_XDP has registered stays the parent's at a fork.
    let is_inherited = config.via == Via::AfPacket;
    if prepared.is_none()
        && is_inherited
        && RUNNING.get(forks()).is_some_and(|slot| slot.get().is_none())
    {
        *prepared = Some(told(open(config, to_prepare()))?);
    }
    Ok(())
}

/// Opens the devices as the program starts, if it is the process that is to, or `has_kept` a listener of the program before. What
/// fails is tried again at its first socket.
pub(crate) fn prepare_at_start(has_kept: bool) {
    let is_to = |opener: u32| has_kept || opener == process::id();
    if configured().and_then(|config| config.opened_by).is_some_and(is_to) {
        // Ignored: standard error has it.
        let _ = with_all_blocked(prepare);
    }
}

/// Engine of this process, which is run from the first call on.
///
/// # Errors
/// `EBUSY` as long as another process receives the packets; `ENODEV` if a device cannot be opened, for a reason
/// that standard error has.
pub(crate) fn running() -> Result<&'static Runtime, Errno> {
    let slot = RUNNING.get(forks()).ok_or(Errno::NODEV)?;
    if let Some(started) = slot.get() {
        return started.as_ref().map_err(|&error| error);
    }
    let mut prepared = prepared();
    if slot.get().is_none() {
        let config = configured().ok_or(Errno::NODEV)?;
        match with_all_blocked(|| start(config, &mut prepared)) {
            Err(Errno::BUSY) => return Err(Errno::BUSY),
            started => drop(slot.set(started)),
        }
    }
    drop(prepared);
    running()
}

/// True if this process may run an engine beside those of others.
pub(crate) fn may_be_beside() -> bool {
    configured().is_some_and(|config| config.via == Via::AfPacket)
}

/// Engine of this process, if it runs one.
fn own() -> Option<&'static Runtime> {
    RUNNING.get(forks())?.get()?.as_ref().ok()
}

/// Owner of this process's connections.
pub(crate) fn relay_owner() -> Option<Arc<RelayOwner>> {
    own()?.relay_owner.clone()
}

/// Owner of the parent's connections.
pub(crate) fn parents_relay_owner() -> Option<&'static RelayOwner> {
    RUNNING.get(forks().checked_sub(1)?)?.get()?.as_ref().ok()?.relay_owner.as_deref()
}

/// True if this process runs an engine.
pub(crate) fn is_running() -> bool {
    RUNNING.get(forks()).and_then(OnceLock::get).is_some_and(Result::is_ok)
}

/// Notes that this process uses a socket.
pub(crate) fn note_use() {
    IS_USED.store(true, Ordering::Relaxed);
}

/// True if this process runs an engine for sockets that it uses itself.
pub(crate) fn is_used() -> bool {
    IS_USED.load(Ordering::Relaxed) && is_running()
}

/// Index of a device's interface; 0 if it is gone.
pub(crate) fn interface_of(device: DeviceIndex) -> u32 {
    interfaces().get(usize::from(device.0)).copied().unwrap_or(0)
}

/// Device at an interface, by the interface's index.
pub(crate) fn device_of(index: u32) -> Option<DeviceIndex> {
    let at = interfaces().iter().position(|own| *own == index && index != 0)?;
    u8::try_from(at).ok().map(DeviceIndex)
}

/// Indices of the devices' interfaces.
pub(crate) fn interfaces() -> &'static [u32] {
    running().map_or(&[], |runtime| &runtime.interfaces)
}

/// Engine of this process, for a UDP socket.
///
/// # Errors
/// As [`running`]; `EBUSY` as long as the parent has devices that no other process can open.
pub(crate) fn running_for_datagrams() -> Result<&'static Runtime, Errno> {
    match !is_running() && excluding().is_some() {
        true => Err(Errno::BUSY),
        false => running(),
    }
}

/// Waits for descriptors by `sleep`, which returns the number of those that are ready, and looks for them by `look`. Before
/// that, this thread receives what has arrived, and for a moment what arrives if it `may_spin`, instead of waking one of the
/// engine's: sockets that something has come to are then ready.
pub(crate) fn receive_and_wait(
    may_spin: bool,
    look: impl Fn() -> c_int,
    sleep: impl FnOnce(Handled) -> c_int,
) -> c_int {
    match RUNNING.get(forks()).and_then(OnceLock::get) {
        Some(Ok(runtime)) => {
            let _critical = critical::enter();
            runtime.net.wait(may_spin, look, || critical::outside(sleep))
        }
        _ => sleep(Handled::NONE),
    }
}

/// True if something waits for an engine of this process.
#[derive(PartialEq, Eq)]
pub(crate) struct StillWaits(pub(crate) bool);

/// Calls `then` on another thread once the process that receives the packets has ended.
pub(crate) fn when_free(then: fn() -> StillWaits) -> Result<(), Errno> {
    static IS_WAITING: AtomicUsize = AtomicUsize::new(0);
    let this = forks() + 1;
    // AcqRel: the thread that waits looks for this waiter after it has set the 0 below.
    if IS_WAITING.swap(this, Ordering::AcqRel) == this {
        return Ok(());
    }
    let known = prepared().as_ref().map(|prepared| Arc::clone(&prepared.engine_lock));
    let Some(engine_lock) = known.or_else(inherited) else {
        IS_WAITING.store(0, Ordering::Relaxed);
        return Err(Errno::NODEV);
    };
    let wait = move || {
        if engine_lock.wait() {
            try_when_free(&engine_lock, then);
        }
        IS_WAITING.swap(0, Ordering::AcqRel);
        if is_running() {
            // One that came behind the last look has relied on this thread.
            then();
        } else {
            // Another one that waits may have a listener.
            engine_lock.release();
        }
    };
    let waiting = with_all_blocked(|| told(spawn("forebay-lock", wait)));
    // The next call tries again.
    waiting.inspect_err(|_| IS_WAITING.store(0, Ordering::Relaxed))
}

/// Calls `then`, which starts an engine, once there is a slot for this process, and again while others were first.
fn try_when_free(engine_lock: &EngineLock, then: fn() -> StillWaits) {
    let await_slot = || {
        while !engine_lock.has_free_slot() {
            thread::sleep(SLOT_LOOK);
        }
        then()
    };
    while await_slot() == StillWaits(true) {
        // It may be that it cannot open the devices while others live, which have newer engines.
        if engine_lock.has_free_slot() && !engine_lock.await_newer() {
            return;
        }
        thread::sleep(SLOT_LOOK);
    }
}

/// Configuration that `forebay exec` has given the program, as its environment has it.
pub(crate) fn configuration() -> Option<String> {
    configured().map(ToString::to_string)
}

fn configured() -> Option<&'static PreloadConfig> {
    let read = || {
        let text = std::env::var(VARIABLE).ok()?;
        let report = |error| {
            report!(
                "forebay: process {} cannot read {VARIABLE}={text:?}: {error}; its sockets are the kernel's: let \
                 forebay exec set the variable, with the library of the same version",
                process::id()
            );
        };
        text.parse().map_err(report).ok()
    };
    CONFIG.get_or_init(read).as_ref()
}

fn prepared() -> std::sync::MutexGuard<'static, Option<Prepared>> {
    PREPARED.lock().unwrap_or_else(PoisonError::into_inner)
}

fn told<T>(result: Result<T, StartError>) -> Result<T, Errno> {
    result.map_err(|error| {
        report!("forebay: the program's sockets cannot be opened: {error}");
        Errno::NODEV
    })
}

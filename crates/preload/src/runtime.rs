//! Engine of this process: prepared when the first socket is taken, and run by the process that uses one first.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::{process, thread};

use forebay::net::{Net, NetConfig, NetEngine};
use forebay::{Config, Device, DeviceConfig, Via};
use forebay_control::preload_config::{PreloadConfig, Spin, VARIABLE};
use forebay_device::af_packet::PacketRing;
use forebay_device::rx_filter::FilterProtocol;
use rustix::io::Errno;

use crate::claim::Claim;
use crate::{abi, kept};

/// Bound of nested forks: in a child beyond it, a taken port answers `ENODEV`.
const FORKS_MAX: usize = 8;

/// Never sleep: the value of `forebay_engine::SPIN_ALWAYS_NS`.
const SPIN_ALWAYS_NS: u64 = u64::MAX;

/// Engines of this process and of its ancestors, by number of forks. A child has none of the threads of its
/// parent's engine, and must not wait for locks that they hold: it starts one of its own.
static RUNNING: [OnceLock<Result<Runtime, Errno>>; FORKS_MAX] =
    [const { OnceLock::new() }; FORKS_MAX];

/// Engine that no process has run yet: no thread of it was started, and nothing holds its locks, so that a
/// child may run the copy that it gets by a fork.
static PREPARED: Mutex<Option<Prepared>> = Mutex::new(None);

static CONFIG: OnceLock<Option<PreloadConfig>> = OnceLock::new();
static FORKS: AtomicUsize = AtomicUsize::new(0);

/// Process that this memory belongs to. A child of `vfork` has another number, and uses its parent's memory.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Engine of a process.
pub(crate) struct Runtime {
    pub(crate) net: Net,
    /// Indices of the interfaces, by the index of the device; 0 of one that is gone.
    pub(crate) interfaces: Vec<u32>,
    /// Right to receive the taken packets, held until the process ends.
    claim: Claim,
}

/// Engine that can be run, once, by one of the processes that have a copy.
struct Prepared {
    net: Net,
    engine: NetEngine,
    interfaces: Vec<u32>,
    claim: Claim,
}

/// Number of forks that lie between the process that loaded the library first and this one.
pub(crate) fn forks() -> usize {
    FORKS.load(Ordering::Relaxed)
}

/// Records the process, when the library is loaded.
pub(crate) fn loaded() {
    PROCESS.store(process::id(), Ordering::Relaxed);
}

/// Counts a fork, in the child, which has memory of its own.
pub(crate) fn forked() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    loaded();
}

/// True in a child that uses its parent's memory until it runs another program (`vfork`).
pub(crate) fn is_in_parents_memory() -> bool {
    PROCESS.load(Ordering::Relaxed) != process::id()
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
        *prepared = Some(told(kept::all_of(|| open(config)))?);
    }
    Ok(())
}

/// True if this process runs an engine.
pub(crate) fn is_running() -> bool {
    RUNNING.get(forks()).and_then(OnceLock::get).is_some_and(Result::is_ok)
}

/// Engine of this process, which is run from the first call on.
///
/// # Errors
/// `ENODEV` if a device cannot be opened, or another process receives the packets, as standard error says.
pub(crate) fn running() -> Result<&'static Runtime, Errno> {
    let slot = RUNNING.get(forks()).ok_or(Errno::NODEV)?;
    let started = slot.get_or_init(|| {
        let config = configured().ok_or(Errno::NODEV)?;
        abi::with_signals_blocked(|| start(config))
    });
    started.as_ref().map_err(|&error| error)
}

/// Process that runs an engine which this one has a copy of, since it was forked from it.
pub(crate) fn parents_engine() -> Option<i32> {
    let ancestors = RUNNING.get(..forks()).unwrap_or_default();
    let engines = ancestors.iter().filter_map(|slot| slot.get()?.as_ref().ok());
    engines.filter_map(|runtime| runtime.claim.holder()).next()
}

fn configured() -> Option<&'static PreloadConfig> {
    let read = || {
        let text = std::env::var(VARIABLE).ok()?;
        text.parse().map_err(|error| eprintln!("forebay: {error}")).ok()
    };
    CONFIG.get_or_init(read).as_ref()
}

fn prepared() -> std::sync::MutexGuard<'static, Option<Prepared>> {
    PREPARED.lock().unwrap_or_else(PoisonError::into_inner)
}

fn told<T>(result: forebay::Result<T>) -> Result<T, Errno> {
    result.map_err(|error| {
        eprintln!("forebay: the program's sockets cannot be opened: {error}");
        Errno::NODEV
    })
}

/// Opens the devices, and builds an engine over them.
fn open(config: &PreloadConfig) -> forebay::Result<Prepared> {
    let open = |name: &String| {
        // Each frame is handed over at once: a request waits for its answer.
        let (take, packet_ring) = (config.take.clone(), PacketRing::Frames);
        Device::open(&DeviceConfig { take, packet_ring, ..DeviceConfig::new(name, config.via) })
    };
    let mut devices = config.devices.iter().map(open).collect::<forebay::Result<Vec<_>>>()?;
    let index = |device: &Device| device.link()?.interface_index();
    let interfaces =
        devices.iter().map(|device| index(device).map_or(0, |index| index.0)).collect();
    let mut engine_config = Config::live();
    match config.spin {
        Spin::Auto => {}
        Spin::Never => engine_config.spin_max_ns = 0,
        Spin::Always => engine_config.spin_max_ns = SPIN_ALWAYS_NS,
    }
    let (net, engine) = Net::over(&engine_config, &NetConfig::default(), &mut devices)?;
    let claim = Claim::new().map_err(|source| forebay::Error::File {
        action: "create",
        path: "the mark of the process that receives".into(),
        source,
    })?;
    Ok(Prepared { net, engine, interfaces, claim })
}

/// Runs the engine that was prepared, or another.
fn start(config: &PreloadConfig) -> Result<Runtime, Errno> {
    let mut prepared = prepared().take();
    if let Some(inherited) = prepared.take_if(|inherited| !inherited.claim.take()) {
        let by = inherited.claim.holder();
        // Nothing of it may be closed twice.
        std::mem::forget(inherited);
        if let Some(by) = by {
            eprintln!(
                "forebay: process {by} receives what was taken, so process {} gets nothing: let the program serve by \
                 one process",
                process::id()
            );
            return Err(Errno::NODEV);
        }
    }
    let prepared = match prepared {
        Some(prepared) => prepared,
        None => {
            let fresh = told(kept::all_of(|| open(config)))?;
            if !fresh.claim.take() {
                return Err(Errno::NODEV);
            }
            fresh
        }
    };
    let Prepared { net, engine, interfaces, claim } = prepared;
    let run = move || {
        if let Err(error) = engine.run() {
            eprintln!("forebay: the engine has ended: {error}");
        }
    };
    let spawned = thread::Builder::new().name("forebay-engine".into()).spawn(run);
    told(spawned.map_err(|source| forebay::Error::File {
        action: "start a thread for",
        path: "the engine".into(),
        source,
    }))?;
    Ok(Runtime { net, interfaces, claim })
}

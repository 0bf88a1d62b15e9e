//! Engine of this process: started when the first socket of ours is bound.

use std::net::SocketAddr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::{process, thread};

use forebay::net::Net;
use forebay::net::NetConfig;
use forebay::{Config, Device, DeviceConfig};
use forebay_control::preload_config::{PreloadConfig, Spin, VARIABLE};
use rustix::io::Errno;

use crate::abi;

/// Bound of nested forks: in a child beyond it, `bind` to a taken port answers `ENODEV`.
const FORKS_MAX: usize = 8;

/// Never sleep: the value of `forebay_engine::SPIN_ALWAYS_NS`.
const SPIN_ALWAYS_NS: u64 = u64::MAX;

/// Engines of this process and of its ancestors, by number of forks. A child has none of the threads of its
/// parent's engine, and must not wait for locks that they hold: it starts one of its own.
static RUNTIMES: [OnceLock<Result<Runtime, Errno>>; FORKS_MAX] =
    [const { OnceLock::new() }; FORKS_MAX];
static CONFIG: OnceLock<Option<PreloadConfig>> = OnceLock::new();
static FORKS: AtomicUsize = AtomicUsize::new(0);

/// Process that this memory belongs to. A child of `vfork` has another number, and uses its parent's memory.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Engine of a process.
pub(crate) struct Runtime {
    pub(crate) net: Net,
    /// Indices of the interfaces, by the index of the device; 0 of one that is gone.
    pub(crate) interfaces: Vec<u32>,
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

/// True if a UDP socket that is bound to this address is to be one of ours. Loopback addresses stay with the
/// kernel.
pub(crate) fn is_taken(local: SocketAddr) -> bool {
    let Some(config) = configured() else { return false };
    !local.ip().to_canonical().is_loopback()
        && local.port() != 0
        && config.takes_udp_port(local.port())
}

/// Engine of this process, which is started at the first call.
///
/// # Errors
/// `ENODEV` if a device cannot be opened, for a reason that standard error has.
pub(crate) fn runtime() -> Result<&'static Runtime, Errno> {
    let slot = RUNTIMES.get(forks()).ok_or(Errno::NODEV)?;
    let started = slot.get_or_init(|| {
        let Some(config) = configured() else { return Err(Errno::NODEV) };
        abi::with_signals_blocked(|| start(config)).map_err(|error| {
            eprintln!("forebay: the program's sockets cannot be opened: {error}");
            Errno::NODEV
        })
    });
    started.as_ref().map_err(|&error| error)
}

fn configured() -> Option<&'static PreloadConfig> {
    let read = || {
        let text = std::env::var(VARIABLE).ok()?;
        text.parse().map_err(|error| eprintln!("forebay: {error}")).ok()
    };
    CONFIG.get_or_init(read).as_ref()
}

fn start(config: &PreloadConfig) -> forebay::Result<Runtime> {
    let open = |name: &String| {
        let take = config.take.clone();
        Device::open(&DeviceConfig { take, ..DeviceConfig::new(name, config.via) })
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
    let run = move || {
        if let Err(error) = engine.run() {
            eprintln!("forebay: the engine has ended: {error}");
        }
    };
    let spawned = thread::Builder::new().name("forebay-engine".into()).spawn(run);
    spawned.map_err(|source| forebay::Error::File {
        action: "start a thread for",
        path: "the engine".into(),
        source,
    })?;
    Ok(Runtime { net, interfaces })
}

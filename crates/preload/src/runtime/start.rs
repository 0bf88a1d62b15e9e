//! Engines that are opened over the devices, and run.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use std::{process, thread};

use forebay::net::{Net, NetConfig};
use forebay::{Config, CpuList, Device, DeviceConfig, Via};
use forebay_control::preload_config::PreloadConfig;
use forebay_device::af_packet::PacketRing;
use forebay_device::rx_filter::FilterProtocol;
use forebay_metrics::Metrics;
use forebay_stack::tcp::{FastOpen, TcpConfig};
use forebay_sys::hidden::Hidden;
use forebay_sys::interface::Interface;
use forebay_sys::tcp_fast_open;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use super::finish::await_end;
use super::fork::{failed, forks, inherited};
use super::{Prepared, Runtime, told};
use crate::control;
use crate::engine_lock::EngineLock;
use crate::membership::{Membership, Rings};
use crate::relay::{self, RelayOwner};
use crate::start_error::StartError;

/// Longest wait for the filters as the engine starts: shorter than a fork waits for the locks that are held meanwhile.
const ATTACHED_MAX: Duration = Duration::from_millis(300);

/// Opens the devices, and builds an engine over them.
pub(super) fn open(
    config: &PreloadConfig,
    engine_lock: Option<Arc<EngineLock>>,
) -> Result<Prepared, StartError> {
    let open = |name: &String| {
        // Each frame is handed over at once: a request waits for its answer.
        let (take, packet_ring) = (config.take.clone().with_fragments(), PacketRing::Frames);
        let queues = queues(name, config.via)?;
        let device =
            DeviceConfig { take, packet_ring, queues, ..DeviceConfig::new(name, config.via) };
        Device::open(&device)
    };
    let mut devices = config.devices.iter().map(open).collect::<forebay::Result<Vec<_>>>()?;
    let index = |device: &Device| device.link()?.interface_index();
    let interfaces =
        devices.iter().map(|device| index(device).map_or(0, |index| index.0)).collect();
    let mut engine_config = Config::live();
    engine_config.spin_max_ns = config.spin.max_ns(engine_config.spin_max_ns);
    // As the kernel does by default: TCP takes a merged packet whole.
    engine_config.coalesce.is_on = config.take.takes_protocol(FilterProtocol::Tcp);
    // The kernel places the program's threads anew at each wake-up: to hand packets over to the CPU of the
    // last call costs more than it saves.
    engine_config.rps_sock_flow_entries = 0;
    // So it does beyond half of the CPUs: the program needs the others.
    let cpus = engine_config.cpus.cpus();
    let half = cpus.iter().copied().take(cpus.len().div_ceil(2));
    engine_config.rps_cpus = Some(CpuList::new(half));
    let engine_lock = match engine_lock {
        Some(engine_lock) => engine_lock,
        None => {
            let not_made = StartError::descriptor("create the memory file of the processes");
            Arc::new(EngineLock::new().map_err(not_made)?)
        }
    };
    let not_made = StartError::descriptor("duplicate the devices' sockets");
    let rings = Rings::of(&devices).map_err(not_made)?;
    config.control.as_deref().into_iter().for_each(control::bind);
    let metrics = Metrics::new().with_devices(&devices);
    // Another process cannot open a device of another kind.
    let division = (config.via == Via::AfPacket).then(|| engine_lock.shares().clone() as _);
    let fast_open = tcp_fast_open().map_or(NetConfig::TCP.fast_open, FastOpen);
    let tcp = TcpConfig { fast_open, ..NetConfig::TCP };
    let net_config = NetConfig { division, tcp, ..NetConfig::default() };
    let (net, engine) = Net::over(&engine_config, &net_config, &mut devices)?;
    Ok(Prepared { net, engine, interfaces, engine_lock, rings, metrics })
}

/// Number of a device's queues to open: over `AF_XDP` all, as it has no packets of a queue that is not polled.
fn queues(device: &str, via: Via) -> forebay::Result<u16> {
    Ok(if via == Via::AfXdp { Interface::named(device)?.rx_queues.max(1) } else { 1 })
}

/// Runs the engine that was prepared, or another.
pub(super) fn start(
    config: &PreloadConfig,
    prepared: &mut Option<Prepared>,
) -> Result<Runtime, Errno> {
    let known = prepared.as_ref().map(|prepared| Arc::clone(&prepared.engine_lock));
    let engine_lock = known.or_else(inherited);
    // First: another process may wait for the same slot.
    let slot = engine_lock
        .as_ref()
        .map(|engine_lock| engine_lock.reserve().ok_or(Errno::BUSY))
        .transpose()?;
    let started = ready(config, prepared).and_then(|ready| run(config, ready, slot));
    if let (Err(_), Some(engine_lock), Some(slot)) = (&started, engine_lock, slot) {
        engine_lock.unreserve(slot);
    }
    started
}

/// Engine that this process may run.
fn ready(config: &PreloadConfig, prepared: &mut Option<Prepared>) -> Result<Prepared, Errno> {
    let copied = prepared.take();
    let engine_lock =
        copied.as_ref().map(|copied| Arc::clone(&copied.engine_lock)).or_else(inherited);
    let is_taken = engine_lock.as_ref().is_some_and(|engine_lock| engine_lock.take());
    let has_others =
        |engine_lock: &Arc<EngineLock>| engine_lock.holder().is_some() || engine_lock.has_newer();
    match (copied, engine_lock) {
        (Some(first), _) if is_taken => Ok(first),
        (copied, Some(engine_lock)) if !is_taken && has_others(&engine_lock) => {
            ready_beside(config, prepared, copied, &engine_lock)
        }
        (copied, engine_lock) => {
            // Another process has run the engine, and has ended, or there was none.
            drop(copied);
            let fresh = told(open(config, engine_lock.clone()));
            if let (Err(_), Some(engine_lock)) = (&fresh, engine_lock) {
                engine_lock.release(); // one that waits may be permitted to open the devices
            }
            let fresh = fresh?;
            fresh.engine_lock.take();
            Ok(fresh)
        }
    }
}

/// Engine beside those of other processes, one of which runs the one that was inherited.
///
/// # Errors
/// `EBUSY` if this process cannot open the devices.
fn ready_beside(
    config: &PreloadConfig,
    prepared: &mut Option<Prepared>,
    copied: Option<Prepared>,
    others: &EngineLock,
) -> Result<Prepared, Errno> {
    /// Last process that has told an error, by the number of its forks and one.
    static TELLER: AtomicUsize = AtomicUsize::new(0);
    match open(config, Some(Arc::new(others.next()))) {
        Ok(fresh) => {
            // This process may have waited for it. Others may run it.
            others.release();
            drop(copied);
            fresh.engine_lock.take();
            Ok(fresh)
        }
        Err(error) => {
            if TELLER.swap(forks() + 1, Ordering::Relaxed) != forks() + 1 {
                report!(
                    "forebay: process {} cannot open the devices beside another process of the program, and waits for the other \
                     one to end: {error}",
                    process::id()
                );
            }
            *failed() = Some(Instant::now());
            if copied.is_none() {
                others.release(); // nothing waits by it
            }
            *prepared = copied;
            Err(Errno::BUSY)
        }
    }
}

/// Runs an engine in this process.
fn run(config: &PreloadConfig, ready: Prepared, reserved: Option<usize>) -> Result<Runtime, Errno> {
    let Prepared { net, mut engine, interfaces, engine_lock, rings, metrics } = ready;
    engine.enable_busy_poll();
    // The table of the first process of a program is empty.
    let slot = reserved.or_else(|| engine_lock.reserve()).ok_or(Errno::NODEV)?;
    engine_lock.enter(slot);
    told(control::serve(metrics, &engine, &net, &engine_lock).map_err(StartError::thread))?;
    let run = move || {
        if let Err(error) = engine.run() {
            report!(
                "forebay: the engine of process {} has ended, and its sockets receive nothing more: {error}; {}",
                process::id(),
                error.help()
            );
        }
    };
    told(spawn("forebay-engine", run))?;
    let finisher = Arc::new(Hidden::new(eventfd(0, EventfdFlags::CLOEXEC)?)?);
    let has_finished = Arc::<AtomicBool>::default();
    let (wakes, says, of) = (Arc::clone(&finisher), Arc::clone(&has_finished), net.clone());
    let is_divided = config.via == Via::AfPacket;
    if is_divided {
        // Ignored: after longer, the thread of the members tells.
        let _ = rings.await_attached(ATTACHED_MAX);
    }
    let membership = is_divided.then(|| Arc::new(Membership::new(Arc::clone(&engine_lock), rings)));
    let member = membership.clone();
    let relay_owner =
        if config.take.takes_protocol(FilterProtocol::Tcp) { Some(relays()?) } else { None };
    let relayed = relay_owner.clone();
    let finish = move || await_end(&wakes, &says, &of, member.as_deref(), relayed.as_deref());
    told(spawn("forebay-finish", finish))?;
    if let Some(member) = membership.clone() {
        told(spawn("forebay-members", move || member.follow()))?;
    }
    Ok(Runtime { net, interfaces, engine_lock, finisher, has_finished, membership, relay_owner })
}

/// Runs the thread of connections that other processes use, too.
fn relays() -> Result<Arc<RelayOwner>, Errno> {
    let (relay_owner, asked) = RelayOwner::new()?;
    let relay_owner = Arc::new(relay_owner);
    told(spawn("forebay-relay", relay::run(Arc::clone(&relay_owner), asked)?))?;
    Ok(relay_owner)
}

pub(super) fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), StartError> {
    thread::Builder::new().name(name.into()).spawn(run).map(drop).map_err(StartError::thread)
}

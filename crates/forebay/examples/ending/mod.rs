//! Parts shared by examples with sockets: opening the device, and the final report.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::thread;
use std::time::Duration;

use clap::Args;
use forebay::net::counters::NetworkDrop;
use forebay::net::{Addresses, Net, NetConfig, Stack};
use forebay::{Config, CpuList, Device, DeviceConfig, DropReason, Outcome, Stopper, Via};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// Source of packets.
#[derive(Debug, Args)]
pub(crate) struct From {
    /// The interface, where a TAP or TUN that does not exist is made; or the socket of a
    /// vhost-user device
    #[arg(value_name = "DEV")]
    device: String,

    /// How it is opened: af_xdp, af_packet, tap, tun or vhost-user
    #[arg(long, default_value = "af_xdp")]
    via: Via,

    /// Who we are behind a TAP or TUN, or on a vhost-user device, as in 10.0.0.2/24; repeatable
    #[arg(long = "address", value_name = "PREFIX", value_parser = Addresses::parse_prefix)]
    addresses: Vec<(IpAddr, u8)>,

    /// CPUs that take part, a thread each: the first ones that this process may use [default: all]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
}

impl From {
    /// The device, of which only packets to these destinations are taken, as `udp:53`: all else stays
    /// with the kernel, where the kernel has the interface too.
    pub(crate) fn open(&self, take: &str) -> Result<Device, Box<dyn std::error::Error>> {
        let mut config = DeviceConfig::new(&*self.device, self.via);
        if matches!(self.via, Via::AfXdp | Via::AfPacket) {
            config.take = take.parse()?;
        }
        Ok(Device::open(&config)?)
    }

    pub(crate) fn config(&self) -> Config {
        let config = Config::live();
        let threads = self.threads.unwrap_or(usize::MAX).max(1);
        let cpus = CpuList::new(config.cpus.cpus().iter().take(threads).copied());
        Config { rps_cpus: Some(cpus.clone()), cpus, ..config }
    }

    pub(crate) fn net(&self) -> NetConfig {
        let addresses = self.addresses.clone();
        let own = (!addresses.is_empty()).then_some(Addresses::Own { mac: None, addresses });
        NetConfig { addresses: own.into_iter().collect(), ..NetConfig::default() }
    }
}

/// Time after the first signal in which others count as the same: `timeout` signals a program, and then
/// its process group with the program in it.
const ONE_SIGNAL: Duration = Duration::from_millis(500);

/// Ends the run in order on the first Ctrl-C, and the program on a later one.
pub(crate) fn stop_on_signals(stopper: Stopper) -> std::io::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    thread::spawn(move || {
        signals.forever().next();
        stopper.stop();
        thread::sleep(ONE_SIGNAL);
        signals.pending().for_each(drop);
        if let Some(signal) = signals.forever().next() {
            std::process::exit(128 + signal);
        }
    });
    Ok(())
}

/// Prints the frames that reached no socket, and those that are missing.
///
/// # Errors
/// The first of the run.
pub(crate) fn report(
    net: &Net,
    mut outcome: Outcome<Stack>,
) -> Result<(), Box<dyn std::error::Error>> {
    for (reason, frames) in dropped(&outcome) {
        println!("{frames} frames dropped: {reason}");
    }
    println!("{} frames not home", net.frames_away(&mut outcome));
    outcome.errors.into_iter().next().map_or(Ok(()), |error| Err(error.into()))
}

/// Frames that reached no socket, by drop reason.
pub(crate) fn dropped(outcome: &Outcome<Stack>) -> BTreeMap<&'static str, u64> {
    let mut dropped = BTreeMap::new();
    let mut count = |name, count: u64| *dropped.entry(name).or_default() += count;
    for queue in &outcome.queues {
        count("kernel", queue.kernel_dropped.get());
        for reason in DropReason::ALL {
            count(reason.name(), queue.drops[reason.index()].get());
        }
    }
    for stack in &outcome.handlers {
        for reason in NetworkDrop::ALL {
            count(reason.name(), stack.counters().drops.get(reason));
        }
    }
    dropped.retain(|_, count| *count > 0);
    dropped
}

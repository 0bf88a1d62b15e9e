//! The options of `forebay run`.

use std::num::NonZeroU16;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, ValueEnum};
use forebay_device::af_packet::PacketRing;
use forebay_device::rx_filter::RxFilter;
use forebay_device::{Via, XdpMode};
use forebay_engine::{SPIN_ALWAYS_NS, SPIN_MAX_NS};
use forebay_run::run::To;
use forebay_sys::xdp::CopyMode;

use crate::options::{
    ControlOptions, EngineOptions, LogOptions, MetricsOptions, RotateOptions, TraceOptions,
    VhostUserOptions,
};

#[derive(Debug, Args)]
#[command(arg_required_else_help = true, after_help = EXAMPLES)]
pub(crate) struct RunArgs {
    /// Interfaces whose packets are taken; `VIA:DEV` for one that is opened in another way than
    /// --via says, as in tun:ft0, or vhost-user:/run/switch.sock for the socket of another process
    #[arg(required_unless_present = "config", value_name = "DEV")]
    pub(crate) devices: Vec<DeviceArg>,

    /// How devices are opened: af_xdp takes packets away from the kernel, af_packet copies them,
    /// tap and tun take what the kernel sends there, vhost-user what another process does (a
    /// virtual switch, a DPDK program): DEV is the path of its socket then
    #[arg(long, value_name = "VIA", default_value = "af_xdp")]
    pub(crate) via: Via,

    /// Receive queues of each device: the first ones that the device has (af_xdp, vhost-user), or
    /// as many as the kernel spreads its packets over
    #[arg(long, value_name = "N", default_value = "1")]
    pub(crate) queues: NonZeroU16,

    /// Packets to take: all, or destinations as in udp:53,tcp:443,udp:1000-2000, and ICMP errors about segments from these TCP
    /// ports. The rest goes to the kernel as if nothing were there [default: all]
    #[arg(long, value_name = "LIST")]
    pub(crate) take: Option<RxFilter>,

    /// Where in the kernel the XDP program runs [default: auto]
    #[arg(long, value_enum)]
    pub(crate) xdp_mode: Option<XdpModeArg>,

    /// Who brings a frame into packet memory (af_xdp) [default: auto]
    #[arg(long, value_enum)]
    pub(crate) copy: Option<CopyArg>,

    /// Drive the device by busy polling instead of interrupts (af_xdp)
    #[arg(long)]
    pub(crate) busy_poll: bool,

    /// What a CPU without work does: auto spins for a moment and then sleeps, always never sleeps,
    /// which saves the time of waking up and takes the whole CPU
    #[arg(long, value_enum, default_value_t)]
    pub(crate) spin: SpinArg,

    /// Ring that the kernel copies packets into (af_packet): blocks cost least and may wait a
    /// millisecond, frames are read one by one as they arrive and cost the sender more
    /// [default: blocks]
    #[arg(long, value_enum)]
    pub(crate) packet_ring: Option<PacketRingArg>,

    /// Replace an XDP program that is there already
    #[arg(long)]
    pub(crate) replace: bool,

    /// Take frames for other stations too
    #[arg(long)]
    pub(crate) promiscuous: bool,

    /// Where packets go: count (nowhere), pcap:DIR (captures, one for each CPU), tun:NAME (to the
    /// kernel), dev:NAME (out of an interface, or back to a DEV of this run, as in
    /// dev:vhost-user:PATH); repeatable, one for each DEV in order, or one for all [default: count]
    #[arg(long, value_name = "WHERE")]
    pub(crate) to: Vec<To>,

    /// Give a TAP packets merged inside VXLAN and GENEVE whole, where the kernel segments them
    /// (Linux 6.17); tun:NAME is then opened as a TAP. Not where a program has a socket on the
    /// tunnel's port: it would receive all datagrams of a packet as one
    #[arg(long)]
    pub(crate) whole_tunnels: bool,

    /// Write merged packets to captures as the frames they were merged from; lro keeps
    /// only the newest acknowledgement, window, timestamps and id
    #[arg(long)]
    pub(crate) resegment: bool,

    #[command(flatten)]
    pub(crate) rotate: RotateOptions,

    /// Check that every flow is delivered in order; a trace checks it too
    #[arg(long)]
    pub(crate) check: bool,

    /// End after this many seconds
    #[arg(long, value_name = "SECS", value_parser = seconds)]
    pub(crate) duration: Option<Duration>,

    /// Go on as that user once the devices are open: NAME or UID, with :GROUP for another group
    #[arg(long, value_name = "NAME", conflicts_with = "mount")]
    pub(crate) user: Option<String>,

    /// Take everything even from an interface that has a default route
    #[arg(long)]
    pub(crate) yes: bool,

    #[command(flatten)]
    pub(crate) vhost_user: VhostUserOptions,

    #[command(flatten)]
    pub(crate) engine: EngineOptions,

    #[command(flatten)]
    pub(crate) trace: TraceOptions,

    #[command(flatten)]
    pub(crate) control: ControlOptions,

    #[command(flatten)]
    pub(crate) metrics: MetricsOptions,

    #[command(flatten)]
    pub(crate) log: LogOptions,

    /// Print one JSON document at the end and nothing else on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

const EXAMPLES: &str = "\
Examples:
  forebay run eth1 --take udp:53 --to count
  forebay run eth1 --via af_packet --to pcap:captures --duration 10
  forebay run eth1 --coalesce gro --to tun:ft0 --name bulk
  forebay run eth1 eth2 --to dev:eth2 --to dev:eth1
  forebay run vhost-user:/run/switch.sock --to dev:vhost-user:/run/switch.sock

The table [run] of a --config file has these options, by their names without dashes, and `devices`:
  [run]
  devices = [\"eth1\"]
  take = \"udp:53\"

SIGINT and SIGTERM end the run cleanly; SIGHUP has it read --config again, or ends it if there is none. A signal that was
ignored when the program was started, as under nohup, does not end it.";

/// A device, and how it is opened, if specified.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct DeviceArg {
    pub(crate) name: String,
    pub(crate) via: Option<Via>,
}

impl FromStr for DeviceArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None => Ok(Self { name: text.to_owned(), via: None }),
            Some((_, "")) => Err(format!("{text:?} names no device")),
            Some((via, name)) => Ok(Self { name: name.to_owned(), via: Some(via.parse()?) }),
        }
    }
}

/// Place in the kernel where an XDP program runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum XdpModeArg {
    /// In the driver if it can, else behind it
    Auto,
    /// In the driver
    Native,
    /// Behind the driver, for any interface
    Generic,
}

/// Copy mode: the kernel or the device brings a frame into packet memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum CopyArg {
    /// The device if it can, else the kernel
    Auto,
    /// The kernel
    Copy,
    /// The device
    #[value(name = "zerocopy")]
    ZeroCopy,
}

/// Behaviour of a CPU without work.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum)]
pub(crate) enum SpinArg {
    /// For a moment, then it sleeps
    #[default]
    Auto,
    /// It never sleeps
    Always,
}

impl SpinArg {
    /// Longest time that a CPU polls without work before it sleeps.
    pub(crate) fn max_ns(self) -> u64 {
        match self {
            Self::Auto => SPIN_MAX_NS,
            Self::Always => SPIN_ALWAYS_NS,
        }
    }
}

/// Ring of a packet socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum PacketRingArg {
    /// Frames of any size, a block at a time
    Blocks,
    /// A slot for each frame
    Frames,
}

impl From<PacketRingArg> for PacketRing {
    fn from(ring: PacketRingArg) -> Self {
        match ring {
            PacketRingArg::Blocks => Self::Blocks,
            PacketRingArg::Frames => Self::Frames,
        }
    }
}

impl From<XdpModeArg> for XdpMode {
    fn from(mode: XdpModeArg) -> Self {
        match mode {
            XdpModeArg::Auto => Self::Auto,
            XdpModeArg::Native => Self::Native,
            XdpModeArg::Generic => Self::Generic,
        }
    }
}

impl From<CopyArg> for CopyMode {
    fn from(copy: CopyArg) -> Self {
        match copy {
            CopyArg::Auto => Self::Auto,
            CopyArg::Copy => Self::Copy,
            CopyArg::ZeroCopy => Self::ZeroCopy,
        }
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| *seconds > 0.0);
    let duration = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    duration.ok_or_else(|| "it is a number of seconds above 0".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_argument_may_name_driver() {
        let read = |text: &str| text.parse::<DeviceArg>().map(|device| (device.name, device.via));
        assert_eq!(read("veth0"), Ok(("veth0".to_owned(), None)));
        assert_eq!(read("tun:ft0"), Ok(("ft0".to_owned(), Some(Via::Tun))));
        let path = "/run/a:b.sock";
        let device = Ok((path.to_owned(), Some(Via::VhostUser)));
        assert_eq!(read(&format!("vhost-user:{path}")), device);
        for text in ["usb:x", "vhost-user:", ":x", path] {
            assert!(read(text).is_err(), "{text}");
        }
    }

    #[test]
    fn durations_are_seconds() {
        assert_eq!(seconds("1.5"), Ok(Duration::from_millis(1500)));
        for text in ["0", "-1", "NaN", "1e300", "3s", ""] {
            assert!(seconds(text).is_err(), "{text}");
        }
    }
}

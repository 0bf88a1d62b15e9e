//! A modern kernel's receive path, in user space: packets are received from one queue, and
//! delivered on every core, in order, where the application runs.
//!
//! # A handler
//!
//! A program opens a device, implements a [`Handler`] for batches of packets, and runs an engine
//! over the device: one thread per CPU, the packets of a flow always in order, whichever CPU they
//! go to. [`Control`] changes the engine's settings while it runs, by the kernel's names.
//!
//! ```no_run
//! use forebay::{Batch, Config, Control, Device, DeviceConfig, Engine, Handler, Via};
//!
//! #[derive(Default)]
//! struct Count(u64);
//!
//! impl Handler for Count {
//!     fn handle(&mut self, batch: &mut Batch<'_>) {
//!         self.0 += batch.packets.len() as u64;
//!     }
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = Device::open(&DeviceConfig::new("veth0", Via::AfPacket))?;
//! let engine = Engine::over(&Config::live(), &mut [device], |_cpu| Count::default())?;
//! let (control, stopper) = (Control::of(&engine), engine.stopper());
//! std::thread::spawn(move || {
//!     std::thread::sleep(std::time::Duration::from_secs(5));
//!     control.set("rps_cpus", "0").ok(); // from now on, all on the CPU that polls
//!     std::thread::sleep(std::time::Duration::from_secs(5));
//!     stopper.stop();
//! });
//! let outcome = engine.run()?;
//! for (cpu, count) in outcome.cpus.iter().zip(&outcome.handlers) {
//!     println!("CPU {}: {} packets", cpu.cpu, count.0);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # A UDP server
//!
//! [`net`] adds sockets on top of devices. Here each CPU answers the datagrams delivered on it, on
//! its own thread.
//!
//! ```no_run
//! use forebay::net::{Datagrams, Net, NetConfig};
//! use forebay::{Config, Device, DeviceConfig, Via};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut config = DeviceConfig::new("eth1", Via::AfPacket);
//! config.take = "udp:7".parse()?; // the rest stays with the kernel
//! let device = Device::open(&config)?;
//! let (net, engine) = Net::over(&Config::live(), &NetConfig::default(), &mut [device])?;
//! let bind = |&cpu| Ok((cpu, net.socket().reuse_port_on(cpu).bind("0.0.0.0:7")?));
//! let sockets = net.cpus().iter().map(bind).collect::<std::io::Result<Vec<_>>>()?;
//! engine.run_with(move |cpu| {
//!     let here = cpu.cpu();
//!     let Some((_, socket)) = sockets.iter().find(|(of, _)| *of == here) else { return };
//!     let mut batch = Datagrams::new();
//!     while socket.recv_batch_on(cpu, &mut batch, 64) > 0 {
//!         for datagram in &mut batch {
//!             let heard = datagram.payload().to_vec();
//!             datagram.reply(&heard).ok();
//!         }
//!         socket.send_replies(&mut batch).ok();
//!     }
//! })?;
//! # Ok(())
//! # }
//! ```
//!
//! # A bridge
//!
//! A [`Sink`] is the way out of a device. Packets received on one device leave by the other, spread
//! over all CPUs in between.
//!
//! ```no_run
//! use forebay::{Batch, Config, Device, DeviceConfig, Engine, Handler, Result, Sink, Via};
//!
//! struct Bridge([Box<dyn Sink>; 2]);
//!
//! impl Handler for Bridge {
//!     fn handle(&mut self, batch: &mut Batch<'_>) {
//!         let across = &mut self.0[usize::from(batch.rx_queue.0)];
//!         across.send(batch.packets).ok(); // a device that is gone ends the run
//!     }
//! }
//!
//! # fn main() -> Result<()> {
//! let open = |name| {
//!     Device::open(&DeviceConfig { promiscuous: true, ..DeviceConfig::new(name, Via::AfPacket) })
//! };
//! let mut devices = [open("veth0")?, open("veth1")?];
//! let config = Config::live();
//! let bridge = |_| Ok(Bridge([devices[1].sink()?, devices[0].sink()?]));
//! let mut bridges = config.cpus.cpus().iter().map(bridge).collect::<Result<Vec<_>>>()?;
//! let engine = Engine::over(&config, &mut devices, |_cpu| bridges.pop().expect("one a CPU"))?;
//! engine.run()?;
//! # Ok(())
//! # }
//! ```
//!
//! # Without a device
//!
//! Synthetic traffic runs anywhere, without privileges:
//!
//! ```
//! # use forebay::{Batch, Config, Control, Engine, Handler, WhenFull};
//! use forebay::{Clock, SyntheticPlan, SyntheticSource};
//!
//! # #[derive(Default)]
//! # struct Count(u64);
//! # impl Handler for Count {
//! #     fn handle(&mut self, batch: &mut Batch<'_>) { self.0 += batch.packets.len() as u64; }
//! # }
//! # fn main() -> forebay::Result<()> {
//! let config = Config { when_full: WhenFull::Wait, ..Config::live() };
//! let traffic = SyntheticSource::new(SyntheticPlan { frames: 10_000, ..Default::default() }, None);
//! let engine =
//!     Engine::build(&config, vec![Box::new(traffic)], Clock::machine(), |_| Count::default())?;
//! assert_eq!(Control::of(&engine).knob("netdev_max_backlog").as_deref(), Ok("1000"));
//! Control::of(&engine).set("netdev_max_backlog", "300").unwrap();
//! let outcome = engine.run()?;
//! assert_eq!(outcome.handlers.iter().map(|count| count.0).sum::<u64>(), 10_000);
//! # Ok(())
//! # }
//! ```
//!
//! # Features
//!
//! | feature | what it builds |
//! |---|---|
//! | `af-xdp` | `Via::AfXdp`: straight into packet memory |
//! | `tun` | `Via::Tap` and `Via::Tun` |
//! | `vhost-user` | `Via::VhostUser`: a virtio device that another process is |
//! | `control-mount` | [`Mount`]: the knobs as files, by FUSE |
//!
//! All are on by default. `AF_PACKET`, synthetic traffic and sockets need none.
//!
//! The crates below this one (`forebay-rx`, `forebay-stack`, …) are public because their types
//! appear in this crate's interface. Items that are not re-exported here may change with any
//! version.

#![forbid(unsafe_code)]

/// The blocks of a chapter of the book: they compile.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/src/guide/datagrams.md")]
struct Chapter;

pub mod net; // UDP and TCP sockets

pub use forebay_buf::{Frame, Pool};
#[cfg(feature = "control-mount")]
pub use forebay_control::Mount;
pub use forebay_control::{
    ConfigFile, Control, ControlClient, ControlSocket, Explanation, FlowName,
};
#[cfg(feature = "tun")]
pub use forebay_device::TunDevice;
pub use forebay_device::config::virtio::VirtioOptions;
pub use forebay_device::rx_filter::RxFilter;
pub use forebay_device::synthetic::{SyntheticPlan, SyntheticSource};
pub use forebay_device::{CopyMode, Device, DeviceConfig, Via, XdpMode, XdpOptions};
pub use forebay_engine::knobs::Coalesce;
pub use forebay_engine::{Config, CpuOutcome, CpuThread, Engine, Outcome, Stopper, WhenFull};
pub use forebay_rx::delivery::Batch;
pub use forebay_rx::hash::FlowHash;
pub use forebay_rx::parse::{Verify, View};
pub use forebay_rx::sink::Sink;
pub use forebay_rx::{CpuId, DropReason, Handler, Packet, RxQueue, Source};
pub use forebay_sys::clock::Clock;
pub use forebay_sys::cpu_list::CpuList;
pub use forebay_sys::errno::Errno;
pub use forebay_sys::refused::Refused;
pub use forebay_sys::{Error, Result};

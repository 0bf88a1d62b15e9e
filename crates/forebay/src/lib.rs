//! Forebay: a modern kernel's receive path, in user space.
//!
//! Packets come from one receive queue and are delivered on every core, in order. The path itself
//! is in `forebay-rx`, its memory in `forebay-buf`; this crate is where they meet Linux.
//!
//! A program opens a device, says what is to be done with batches of packets, and runs an engine
//! over it: one thread for each CPU, packets of one flow always in order, wherever they go.
//!
//! ```no_run
//! use forebay_rx::delivery::Batch;
//! use forebay_engine::{Config, Engine};
//! use forebay_rx::Handler;
//! use forebay_device::{Device, DeviceConfig, Via};
//!
//! /// Counts what one CPU gets.
//! #[derive(Default)]
//! struct Count {
//!     packets: u64,
//! }
//!
//! impl Handler for Count {
//!     fn handle(&mut self, batch: &mut Batch<'_>) {
//!         self.packets += batch.packets.len() as u64;
//!     }
//! }
//!
//! # fn main() -> forebay_sys::Result<()> {
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
//!     println!("CPU {}: {} packets", cpu.cpu, count.packets);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! The same over made-up traffic runs anywhere:
//!
//! ```
//! # use forebay_rx::delivery::Batch;
//! # use forebay_engine::{Config, Engine};
//! # use forebay_rx::Handler;
//! use crate::clock::Clock;
//! use forebay_device::synthetic::{SyntheticPlan, SyntheticSource};
//!
//! # #[derive(Default)]
//! # struct Count { packets: u64 }
//! # impl Handler for Count {
//! #     fn handle(&mut self, batch: &mut Batch<'_>) { self.packets += batch.packets.len() as u64; }
//! # }
//! # fn main() -> forebay_sys::Result<()> {
//! let config = Config { when_full: forebay_engine::WhenFull::Wait, ..Config::live() };
//! let traffic = SyntheticSource::new(SyntheticPlan { frames: 10_000, ..Default::default() }, None);
//! let engine =
//!     Engine::build(&config, vec![Box::new(traffic)], Clock::machine(), |_| Count::default())?;
//! assert_eq!(Control::of(&engine).knob("netdev_max_backlog").as_deref(), Ok("1000"));
//! Control::of(&engine).set("netdev_max_backlog", "300").unwrap();
//! let outcome = engine.run()?;
//! assert_eq!(outcome.handlers.iter().map(|count| count.packets).sum::<u64>(), 10_000);
//! # Ok(())
//! # }
//! ```
//!
//! `examples/` has a counter of packets per flow, a bridge between two interfaces, and a coalescer
//! before a TUN.

pub mod net; //     UDP sockets

pub use forebay_control as control;
pub use forebay_control::Control;
pub use forebay_device as device;
pub use forebay_device::sink::Sink;
pub use forebay_device::{Device, DeviceConfig, Via};
pub use forebay_engine as engine;
pub use forebay_engine::{Config, Engine, Outcome, Stopper};
pub use forebay_rx::delivery::Batch;
pub use forebay_rx::{CpuId, DropReason, Handler, Packet, RxQueue, Source};
pub use forebay_sys::{Error, Result, clock};

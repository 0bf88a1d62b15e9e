//! Metrics of an engine: counters and histograms in the OpenMetrics format, and a server that
//! Prometheus scrapes.
//!
//! ```no_run
//! use forebay::{Batch, Config, Control, Device, DeviceConfig, Engine, Handler, Via};
//! use forebay_metrics::{Metrics, MetricsServer};
//!
//! # struct Count;
//! # impl Handler for Count {
//! #     fn handle(&mut self, _: &mut Batch<'_>) {}
//! # }
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut devices = [Device::open(&DeviceConfig::new("eth1", Via::AfPacket))?];
//! let metrics = Metrics::new().with_devices(&devices);
//! let engine = Engine::over(&Config::live(), &mut devices, |_cpu| Count)?;
//! let metrics = metrics.with_engine(Control::of(&engine));
//! let _server = MetricsServer::bind("127.0.0.1:9464".parse()?, &[], metrics)?;
//! engine.run()?;
//! # Ok(())
//! # }
//! ```
//!
//! A scrape reads counters that the path writes anyway, and disturbs no thread of the engine.
#![forbid(unsafe_code)]

mod metrics; //  parts of a run that are measured, and their text
mod families; // metric families of one type, in the OpenMetrics format
mod queues; //   families of rx queues and devices
mod cpus; //     families of CPUs
mod coalesce; // families of coalescing
mod sinks; //    families of destinations
mod sockets; //  families of sockets and of the network layer
mod format; //   the text format that a client accepts
mod host; //     names by which a browser may not reach the server
mod server; //   the HTTP server

pub use format::TextFormat;
pub use metrics::Metrics;
pub use server::{CONNECTIONS_MAX, MetricsServer};
pub use sockets::SOCKETS_LISTED_MAX;

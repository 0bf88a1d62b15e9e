//! Metrics of an engine: counters and histograms in the OpenMetrics format, a server that
//! Prometheus scrapes, and a page that shows them in a browser.
//!
//! ```no_run
//! use forebay::{Batch, Config, Control, Device, DeviceConfig, Engine, Handler, Via};
//! use forebay_metrics::{Metrics, MetricsServer, ServerAccess};
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
//! let _server = MetricsServer::bind("127.0.0.1:9464".parse()?, &ServerAccess::default(), metrics)?;
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
mod sockets; //  families of UDP sockets and of the network layer
mod tcp; //      families of TCP sockets
mod format; //   the text format that a client accepts
mod host; //     names by which a browser may not reach the server
mod page; //     the page, and its questions
mod responder; // answers to requests
mod server; //   the HTTP server

pub use format::TextFormat;
pub use metrics::Metrics;
pub use page::{PageToken, TOKEN_CHARS_MIN, TOKEN_HEADER};
pub use server::{CONNECTIONS_MAX, MetricsServer, ServerAccess};
pub use sockets::SOCKETS_LISTED_MAX;
pub use tcp::{CONNECTIONS_LISTED_MAX, LISTENERS_LISTED_MAX};

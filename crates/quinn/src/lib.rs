//! quinn over Forebay's UDP sockets: an endpoint on each CPU, and connections that stay on theirs.
//!
//! A [`Socket`] is what quinn sends by and receives from: segments, ECN and the source address go with each
//! datagram, merged datagrams come as one, and a sender without memory is woken when there is some.
//!
//! An [`EndpointGroup`] is several endpoints at one address. Its connection IDs say, to whoever has the
//! group's key, which endpoint issued them; so a datagram reaches that endpoint wherever its client
//! has moved and whichever CPU takes it in. With the flow key that [`EndpointGroup::flow_key`] names, a
//! connection is a flow by its ID, and comes to the CPU that its endpoint runs on.
//!
//! ```no_run
//! use forebay::net::connection_id::EndpointIndex;
//! use forebay::net::{Net, NetConfig};
//! use forebay::{Config, Device, DeviceConfig, Via};
//! use forebay_quinn::EndpointGroup;
//!
//! # fn server_config() -> quinn::ServerConfig { unimplemented!() }
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut config = DeviceConfig::new("eth1", Via::AfXdp);
//! config.take = "udp:443".parse()?;
//! let device = Device::open(&config)?;
//! let (net, engine) = Net::over(&Config::live(), &NetConfig::default(), &mut [device])?;
//! let group = EndpointGroup::new(&net, "0.0.0.0:443".parse()?, EndpointGroup::ID_BYTES)?;
//! engine.control().set("flow_key", &group.flow_key())?; // auto,quic:443:12
//! for (place, cpu) in (0..).zip(net.cpus().to_vec()) {
//!     let group = group.clone();
//!     std::thread::spawn(move || -> std::io::Result<()> {
//!         forebay_sys::pin_to(cpu)?;
//!         let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
//!         runtime.block_on(async move {
//!             let config = quinn::EndpointConfig::default();
//!             let endpoint = group.endpoint(EndpointIndex(place), config, server_config())?;
//!             while let Some(incoming) = endpoint.accept().await {
//!                 tokio::spawn(async move { incoming.await.map(drop) });
//!             }
//!             Ok(())
//!         })
//!     });
//! }
//! engine.run()?;
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

/// The blocks of a chapter of the book: they compile.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/src/guide/async-sockets.md")]
struct Chapter;

mod group; //  endpoints at one address
mod ids; //    connection IDs that say their endpoint
mod socket; // what quinn sends by and receives from

pub use group::EndpointGroup;
pub use ids::EndpointIds;
pub use socket::Socket;

//! quinn over Forebay's UDP sockets, with one endpoint per CPU and connections that stay on their
//! endpoint's CPU.
//!
//! A [`Socket`] is quinn's transport. Each datagram carries its segment size, ECN and source
//! address, merged datagrams are received as one, and a sender that ran out of packet memory is
//! woken when some is returned.
//!
//! An [`EndpointGroup`] is a set of endpoints that share an address. Its connection IDs encode,
//! readable only with the group's key, which endpoint issued them. A datagram thus reaches that
//! endpoint even after its client has migrated, and whichever CPU receives it. With the flow key of
//! [`EndpointGroup::flow_key`], a connection is a flow identified by its ID, and is steered to the
//! CPU of its endpoint.
//!
//! ```no_run
//! use forebay::net::connection_id::EndpointIndex;
//! use forebay::net::{Net, NetConfig};
//! use forebay::{Config, Device, DeviceConfig, Via};
//! use forebay_quinn::EndpointGroup;
//!
//! # fn serve(server_config: fn() -> quinn::ServerConfig) -> Result<(), Box<dyn std::error::Error>> {
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

/// Code blocks of a chapter of the book, compiled as doc tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/src/guide/async-sockets.md")]
struct Chapter;

mod group; //  groups of endpoints that share an address
mod ids; //    connection IDs that encode their endpoint
mod socket; // quinn's socket

pub use group::EndpointGroup;
pub use ids::EndpointIds;
pub use socket::Socket;

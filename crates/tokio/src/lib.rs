//! Tokio integration of Forebay's sockets, with the API of `tokio::net`.
//!
//! ```no_run
//! use forebay::net::{Net, NetConfig};
//! use forebay::{Config, Device, DeviceConfig, Via};
//! use forebay_tokio::UdpSocket;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut config = DeviceConfig::new("eth1", Via::AfXdp);
//! config.take = "udp:7".parse()?;
//! let device = Device::open(&config)?;
//! let (net, engine) = Net::over(&Config::live(), &NetConfig::default(), &mut [device])?;
//! std::thread::spawn(|| engine.run()); // CPUs of their own, not tokio's
//! let socket = UdpSocket::bind(&net, "0.0.0.0:7")?;
//! let mut buffer = vec![0; 65_536];
//! loop {
//!     let (len, from) = socket.recv_from(&mut buffer).await?;
//!     socket.send_to(&buffer[..len], from).await?;
//! }
//! # }
//! ```
//!
//! Every call is cancel-safe: a datagram is only dequeued by the poll that returns it, and bytes of a
//! stream likewise.

#![forbid(unsafe_code)]

mod udp; // datagrams
mod tcp; // streams and listeners

pub use tcp::{TcpListener, TcpStream};
pub use tokio::io::{Interest, ReadBuf, Ready};
pub use udp::UdpSocket;

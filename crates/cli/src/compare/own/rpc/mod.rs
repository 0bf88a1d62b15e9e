//! Requests and answers over TCP: a server over sockets of ours or of the kernel, and its client.
//!
//! The example `rpc` of `forebay` is made of the same modules.

mod message; // sizes of requests and answers
mod work; //    what a request costs the server
mod sockets; // sockets of the server
mod threads; // threads that answer
mod client; //  the load

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use clap::Args;
use client::{Client, LoadPlan};
use forebay::net::{Addresses, Net, NetConfig, TcpListener};
use forebay_device::rx_filter::RxFilter;
use forebay_device::{Device, DeviceConfig};
use forebay_rx::CpuId;
use forebay_sys as sys;
use sockets::RpcListener;
use threads::ServicePlan;

use super::{OwnArgs, ready, serve};
use crate::failure::Failure;
use crate::output;

/// Connections that may wait to be accepted.
const BACKLOG: u32 = 1024;

#[derive(Debug, Args)]
pub(super) struct RpcArgs {
    #[command(flatten)]
    service: ServicePlan,

    /// Serve over the kernel's sockets
    #[arg(long)]
    kernel: bool,

    /// Connections of the client
    #[arg(long, default_value_t = 1)]
    connections: u16,

    /// Knobs to be set, as in rps_cpus=3
    #[arg(long = "set", value_name = "KNOB=VALUE")]
    knobs: Vec<String>,

    /// Address on a device that only this process has, as in 10.0.0.2/24
    #[arg(long, value_parser = Addresses::parse_prefix)]
    address: Option<(std::net::IpAddr, u8)>,
}

/// Answers requests until the program is ended.
pub(super) fn serve(args: &OwnArgs) -> Result<(), Failure> {
    let refused = |error: std::io::Error| {
        Failure::usage(format!("port {}: {error}", args.port), "give another --port")
    };
    let local = SocketAddr::from((Ipv4Addr::UNSPECIFIED, args.port));
    let cpus: Vec<CpuId> = args.cpus.iter().copied().map(CpuId).collect();
    let service = args.rpc.service;
    // Else the kernel's stack, or ours, could have more CPUs than the other.
    sys::keep_on(&cpus).map_err(|error| {
        Failure::usage(format!("--cpus: {error}"), "give CPUs that this process may use")
    })?;
    if args.rpc.kernel {
        let listener = std::net::TcpListener::bind(local).map_err(refused)?;
        let threads = threads::start(RpcListener::Kernel(listener), service, &cpus);
        let threads = threads.map_err(refused)?;
        ready()?;
        threads.join().map_err(refused)?;
        return Ok(());
    }
    let mut devices = devices(args, &format!("tcp:{}", args.port))?;
    let net_config = NetConfig { addresses: args.rpc.addresses(), ..NetConfig::default() };
    let (net, engine) = Net::over(&serve::tcp_config(args), &net_config, &mut devices)?;
    for knob in &args.rpc.knobs {
        let (name, value) = knob.split_once('=').unwrap_or((knob, ""));
        engine.control().set(name, value).map_err(|refused| {
            Failure::usage(format!("--set {knob}: {refused}"), "see `forebay run --help`")
        })?;
    }
    let listener = TcpListener::bind_with_backlog(&net, local, BACKLOG).map_err(refused)?;
    threads::start(RpcListener::Own(listener), service, &cpus).map_err(refused)?;
    ready()?;
    engine.run()?;
    Ok(())
}

impl RpcArgs {
    pub(super) fn is_kernel(&self) -> bool {
        self.kernel
    }

    pub(super) fn connections(&self) -> u16 {
        self.connections
    }

    /// Addresses of the device, if only this process has it.
    pub(super) fn addresses(&self) -> Vec<Addresses> {
        let own = |address| Addresses::Own { mac: None, addresses: vec![address] };
        self.address.map(own).into_iter().collect()
    }
}

/// Opens the devices: for what the filter names if the kernel has them, too, and else for all.
pub(super) fn devices(args: &OwnArgs, shared: &str) -> Result<Vec<Device>, Failure> {
    let take: RxFilter = match args.rpc.address {
        Some(_) => RxFilter::default(),
        None => shared.parse()?,
    };
    let open = |name: &String| {
        Device::open(&DeviceConfig { take: take.clone(), ..serve::device_config(name, args) })
    };
    Ok(args.device.iter().map(open).collect::<Result<Vec<_>, _>>()?)
}

/// Asks a server, and prints the figures.
pub(super) fn ask(args: &OwnArgs) -> Result<(), Failure> {
    let refused = |error: std::io::Error| {
        Failure::usage(format!("asking {}: {error}", args.to), "check that it can be reached")
    };
    if let Some(&cpu) = args.cpus.first() {
        // Ignored: figures of an unpinned client are still valid.
        let _ = sys::pin_to(CpuId(cpu));
    }
    let [warm_up, window] = [args.warm_up, args.window].map(Duration::from_millis);
    let client = Client::connect(LoadPlan {
        to: (args.to, args.port).into(),
        connections: args.rpc.connections,
        sizes: args.rpc.service.sizes,
        warm_up,
        window,
    });
    let client = client.map_err(refused)?;
    ready()?;
    let figures = client.measure().map_err(refused)?;
    output::print(&(serde_json::to_string(&figures).unwrap_or_default() + "\n"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::client::at_ns;

    #[test]
    fn percentiles_are_of_sorted_times() {
        let times: Vec<_> = (1..=100).map(Duration::from_nanos).collect();
        assert_eq!([50, 90, 99].map(|percent| at_ns(&times, percent)), [51, 91, 100]);
        assert_eq!(at_ns(&[], 99), 0);
    }
}

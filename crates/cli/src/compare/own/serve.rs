//! Receivers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use forebay::net::{Datagrams, Net, NetConfig};
use forebay_device::rx_filter::RxFilter;
use forebay_device::{Device, DeviceConfig};
use forebay_engine::Config;
use forebay_run::run::{Run, RunConfig, To};
use forebay_rx::CpuId;
use forebay_rx::steer::BalancePolicy;
use forebay_sys::cpu_list::CpuList;

use super::{OwnArgs, OwnProgram, ready, window};
use crate::failure::Failure;

/// Datagrams read at once, as by the peers.
const BATCH_MAX: usize = 64;

pub(super) fn config(args: &OwnArgs) -> Config {
    let cpus = CpuList::new(args.cpus.iter().copied().map(CpuId));
    let mut config = Config { rps_cpus: Some(cpus.clone()), cpus, ..Config::live() };
    if args.balance {
        config.balance.policy = BalancePolicy::Load;
    }
    if args.spin {
        config.spin_max_ns = u64::MAX;
    }
    config
}

/// Settings of a program with TCP, which takes merged packets whole. The kernel merges by default, too.
pub(super) fn tcp_config(args: &OwnArgs) -> Config {
    let mut config = config(args);
    config.coalesce.is_on = true;
    config
}

pub(super) fn device_config(name: &str, args: &OwnArgs) -> DeviceConfig {
    let packet_ring = args.packet_ring.map(Into::into).unwrap_or_default();
    DeviceConfig { packet_ring, ..DeviceConfig::new(name, args.via) }
}

/// Counts packets as `forebay run DEV --to count` does, or bridges two interfaces as
/// `forebay run ONE OTHER --to dev:OTHER --to dev:ONE --promiscuous` does.
pub(super) fn path(args: &OwnArgs) -> Result<(), Failure> {
    let is_bridge = args.what == OwnProgram::Bridge;
    let device =
        |name: &String| DeviceConfig { promiscuous: is_bridge, ..device_config(name, args) };
    let devices = args.device.iter().map(device).collect();
    let to = if is_bridge {
        args.device.iter().rev().cloned().map(To::Dev).collect()
    } else {
        Vec::new()
    };
    let run = Run::open(RunConfig { to, ..RunConfig::new(devices, config(args)) })?;
    if !is_bridge {
        let watch = run.watch();
        window::report(args, move || watch.look().delivered);
    }
    ready()?;
    run.run()?;
    Ok(())
}

/// Counts or answers the datagrams of a socket, on the thread of the engine's CPU.
pub(super) fn socket(args: &OwnArgs) -> Result<(), Failure> {
    let take: RxFilter = format!("udp:{}", args.port).parse()?;
    let device = |name: &String| {
        Device::open(&DeviceConfig { take: take.clone(), ..device_config(name, args) })
    };
    let mut devices = args.device.iter().map(device).collect::<Result<Vec<_>, _>>()?;
    let (net, engine) = Net::over(&config(args), &NetConfig::default(), &mut devices)?;
    let bound = net
        .cpus()
        .iter()
        .map(|&cpu| Ok((cpu, net.socket().reuse_port_on(cpu).bind(("0.0.0.0", args.port))?)));
    let sockets = bound.collect::<std::io::Result<Vec<_>>>().map_err(|error| {
        Failure::usage(format!("port {}: {error}", args.port), "give another --port")
    })?;
    let count = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&count);
    let echoes = args.what == OwnProgram::UdpEcho;
    if !echoes {
        window::report(args, move || counted.load(Ordering::Relaxed));
    }
    ready()?;
    engine.run_with(move |cpu| {
        let here = cpu.cpu();
        let Some((_, socket)) = sockets.iter().find(|(of, _)| *of == here) else { return };
        let mut batch = Datagrams::new();
        loop {
            let got = socket.recv_batch_on(cpu, &mut batch, BATCH_MAX);
            if got == 0 {
                return;
            }
            count.fetch_add(got as u64, Ordering::Relaxed);
            if echoes {
                for datagram in &mut batch {
                    let payload = datagram.payload().to_vec();
                    let _ = datagram.reply(&payload);
                }
                let _ = socket.send_replies(&mut batch);
            }
        }
    })?;
    Ok(())
}

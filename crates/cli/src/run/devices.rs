//! From the command line to the devices of a run.

use forebay_device::config::virtio::VirtioOptions;
use forebay_device::{DeviceConfig, Via, XdpOptions};
use forebay_rx::parse::Verify;
use forebay_sys::Error;
use forebay_sys::interface::Interface;

use super::args::{PacketRingArg, RunArgs};
use crate::failure::Failure;
use crate::options::hash::HashKind;

/// The devices to be opened. An option that applies to none of them is bad usage.
pub(super) fn configs(args: &RunArgs) -> Result<Vec<DeviceConfig>, Failure> {
    let vias: Vec<_> = args.devices.iter().map(|device| device.via.unwrap_or(args.via)).collect();
    let is_xdp = |via: Via| via == Via::AfXdp;
    let is_packet = |via: Via| via == Via::AfPacket;
    let is_link = |via: Via| match via {
        Via::AfXdp | Via::AfPacket => true,
        Via::Tap | Via::Tun | Via::VhostUser => false,
    };
    let is_tap = |via: Via| via == Via::Tap;
    let is_vhost_user = |via: Via| via == Via::VhostUser;
    let has_hashes = |via: Via| match via {
        Via::AfXdp | Via::AfPacket | Via::VhostUser => true,
        Via::Tap | Via::Tun => false,
    };
    type IsAbout = fn(Via) -> bool;
    let about: [(_, _, IsAbout, _); 8] = [
        ("--take", args.take.is_some(), is_link, "what is sent there is all taken"),
        ("--promiscuous", args.promiscuous, is_link, "there are no other stations"),
        (
            "--hash device",
            args.engine.hash.hash == HashKind::Device,
            has_hashes,
            "it has no hashes",
        ),
        ("--xdp-mode", args.xdp_mode.is_some(), is_xdp, "there is no XDP program"),
        ("--copy", args.copy.is_some(), is_xdp, "who copies cannot be chosen there"),
        ("--packet-ring", args.packet_ring.is_some(), is_packet, "there is no packet socket"),
        ("--busy-poll", args.busy_poll, is_xdp, "it cannot be driven by polling"),
        ("--replace", args.replace, is_xdp, "there is no XDP program"),
    ];
    let of_rings = args.vhost_user.given();
    let of_rings = of_rings.map(|(option, is_given)| {
        (option, is_given, is_vhost_user as IsAbout, "it is about the rings of vhost-user alone")
    });
    for (option, is_given, is_about, why) in about.into_iter().chain(of_rings) {
        if is_given && !vias.iter().any(|via| is_about(*via)) {
            let vias: Vec<_> = vias.iter().map(|via| via.name()).collect();
            let problem = format!("{option} with {}: {why}", vias.join(", "));
            return Err(Failure::usage(problem, "leave it out, or give another --via"));
        }
    }
    if args.packet_ring == Some(PacketRingArg::Frames) && args.engine.hash.hash == HashKind::Device
    {
        let problem = "--packet-ring frames with --hash device: the kernel gives hashes by blocks";
        return Err(Failure::usage(problem, "leave one of them out"));
    }
    let virtio = args.vhost_user.options()?;
    let configs = args.devices.iter().zip(vias).map(|(device, via)| DeviceConfig {
        queues: args.queues.get(),
        take: args.take.clone().filter(|_| is_link(via)).unwrap_or_default(),
        packet_ring: args
            .packet_ring
            .map(Into::into)
            .filter(|_| is_packet(via))
            .unwrap_or_default(),
        xdp: if is_xdp(via) { xdp(args) } else { XdpOptions::default() },
        whole_tunnels: args.whole_tunnels && is_tap(via),
        virtio: if is_vhost_user(via) { virtio.clone() } else { VirtioOptions::default() },
        promiscuous: args.promiscuous && is_link(via),
        device_hash: args.engine.hash.hash == HashKind::Device && has_hashes(via),
        verify: if args.engine.no_checksums { Verify::Nothing } else { Verify::Checksums },
        ..DeviceConfig::new(&device.name, via)
    });
    Ok(configs.collect())
}

fn xdp(args: &RunArgs) -> XdpOptions {
    XdpOptions {
        mode: args.xdp_mode.map(Into::into).unwrap_or_default(),
        copy: args.copy.map(Into::into).unwrap_or_default(),
        busy_poll: args.busy_poll,
        replace: args.replace,
    }
}

/// Checks the interfaces before any is opened. Refuses an interface that does not exist, and one
/// with a default route, by which this machine is reached, unless the filter or `--yes` confirms
/// it.
pub(super) fn check_interfaces(args: &RunArgs, devices: &[DeviceConfig]) -> Result<(), Failure> {
    DeviceConfig::check_named_once(devices)?;
    let is_meant = args.yes || args.take.is_some();
    // A machine is reached by interfaces only, never by another process.
    for DeviceConfig { name, via, .. } in devices.iter().filter(|device| device.via.is_interface())
    {
        let interface = match (Interface::named(name), via) {
            // The engine creates the interface.
            (Err(Error::NoInterface { .. }), Via::Tap | Via::Tun) => continue,
            (interface, _) => interface?,
        };
        if !is_meant && interface.is_default_route()? {
            return Err(Error::DefaultRoute { name: name.clone() }.into());
        }
    }
    Ok(())
}

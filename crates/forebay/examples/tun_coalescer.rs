//! Merges segments before they enter a TUN, until Ctrl-C:
//! `cargo run --example tun_coalescer veth0 tun0`.
//!
//! For authors of a tunnel: packets received from the wire reach the kernel's stack as few large
//! ones, with one write each.

use std::error::Error;

use forebay::{
    Batch, Coalesce, Config, Device, DeviceConfig, Engine, Handler, Sink, TunDevice, Via,
};
use signal_hook::consts::SIGINT;
use signal_hook::iterator::Signals;

/// One CPU's sink into the kernel's stack.
struct Inject {
    tun: Box<dyn Sink>,
    frames: u64,
}

impl Handler for Inject {
    fn handle(&mut self, batch: &mut Batch<'_>) {
        self.frames +=
            batch.packets.iter().map(|packet| u64::from(packet.segment_count())).sum::<u64>();
        if let Err(error) = self.tun.send(batch.packets) {
            eprintln!("{error}");
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut names = std::env::args().skip(1);
    let (from, to) = names.next().zip(names.next()).ok_or("usage: tun_coalescer FROM TUN")?;
    let mut config = Config::live();
    config.coalesce = Coalesce { is_on: true, ..Coalesce::default() };
    let device = Device::open(&DeviceConfig::new(from, Via::AfPacket))?;
    let tun = TunDevice::open_to_send(&to)?;
    let engine = Engine::over(&config, &mut [device], |_cpu| {
        let tun = Box::new(tun.sink());
        Inject { tun, frames: 0 }
    })?;
    let (stopper, mut signals) = (engine.stopper(), Signals::new([SIGINT])?);
    std::thread::spawn(move || signals.forever().take(1).for_each(|_| stopper.stop()));
    let outcome = engine.run()?;
    let frames: u64 = outcome.handlers.iter().map(|inject| inject.frames).sum();
    let packets: u64 = outcome.handlers.iter().map(|inject| inject.tun.counters().packets()).sum();
    println!("{frames} frames went into the TUN as {packets} packets");
    Ok(())
}

//! A bridge between two interfaces, until Ctrl-C: `cargo run --example bridge veth0 veth1`.
//!
//! Packets received on one interface leave by the other, spread over all CPUs in between, with
//! every flow in order. Checksums and segmentation that the kernel left to the device are passed
//! on.

use std::error::Error;

use forebay::{Batch, Config, Device, DeviceConfig, Engine, Handler, Sink, Via};
use signal_hook::consts::SIGINT;
use signal_hook::iterator::Signals;

/// One CPU's sinks, indexed by the rx queue that packets came from.
struct Bridge {
    across: [Box<dyn Sink>; 2],
    failed: Option<Box<dyn Error + Send + Sync>>,
}

impl Handler for Bridge {
    fn handle(&mut self, batch: &mut Batch<'_>) {
        let way = &mut self.across[usize::from(batch.rx_queue.0)];
        if let Err(error) = way.send(batch.packets) {
            self.failed.get_or_insert(error);
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut names = std::env::args().skip(1);
    let (one, other) = names.next().zip(names.next()).ok_or("usage: bridge ONE OTHER")?;
    let open = |name| {
        Device::open(&DeviceConfig { promiscuous: true, ..DeviceConfig::new(name, Via::AfPacket) })
    };
    let mut devices = [open(one)?, open(other)?];
    let config = Config::live();
    let bridges = config.cpus.cpus().iter().map(|_| {
        let across = [devices[1].sink()?, devices[0].sink()?];
        Ok(Bridge { across, failed: None })
    });
    let mut bridges = bridges.collect::<forebay::Result<Vec<_>>>()?.into_iter();
    let engine = Engine::over(&config, &mut devices, |_cpu| bridges.next().expect("one a CPU"))?;
    let (stopper, mut signals) = (engine.stopper(), Signals::new([SIGINT])?);
    std::thread::spawn(move || signals.forever().take(1).for_each(|_| stopper.stop()));
    let outcome = engine.run()?;
    for (cpu, bridge) in outcome.cpus.iter().zip(outcome.handlers) {
        let sent: u64 = bridge.across.iter().map(|way| way.counters().packets()).sum();
        let dropped: u64 = bridge.across.iter().map(|way| way.counters().dropped_in_all()).sum();
        println!("CPU {}: {sent} packets sent, {dropped} dropped", cpu.cpu);
        if let Some(error) = bridge.failed {
            return Err(error);
        }
    }
    Ok(())
}

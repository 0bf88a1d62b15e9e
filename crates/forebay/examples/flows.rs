//! Counts packets per flow on an interface until Ctrl-C: `cargo run --example flows veth0`.

use std::collections::HashMap;
use std::error::Error;
use std::net::IpAddr;

use forebay::{Batch, Config, Device, DeviceConfig, Engine, Handler, Via};
use signal_hook::consts::SIGINT;
use signal_hook::iterator::Signals;

/// Protocol, source and destination address, source and destination port.
type Flow = (u8, IpAddr, IpAddr, (u16, u16));

/// Flows that one CPU has seen. A flow may have been on several CPUs.
#[derive(Default)]
struct Counts(HashMap<Flow, u64>);

impl Handler for Counts {
    fn handle(&mut self, batch: &mut Batch<'_>) {
        for packet in batch.packets.iter() {
            let view = packet.view();
            let addresses = view.source().zip(view.destination());
            if let (Some(protocol), Some((from, to))) = (view.protocol(), addresses) {
                let flow = (protocol, from, to, view.ports().unwrap_or_default());
                *self.0.entry(flow).or_default() += u64::from(packet.segment_count());
            }
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let name = std::env::args().nth(1).ok_or("usage: flows INTERFACE")?;
    let device = Device::open(&DeviceConfig::new(name, Via::AfPacket))?;
    let engine = Engine::over(&Config::live(), &mut [device], |_cpu| Counts::default())?;
    let (stopper, mut signals) = (engine.stopper(), Signals::new([SIGINT])?);
    std::thread::spawn(move || signals.forever().take(1).for_each(|_| stopper.stop()));
    let mut all: HashMap<Flow, u64> = HashMap::new();
    for (flow, packets) in engine.run()?.handlers.into_iter().flat_map(|counts| counts.0) {
        *all.entry(flow).or_default() += packets;
    }
    let mut flows: Vec<_> = all.into_iter().collect();
    flows.sort_by_key(|&(_, packets)| std::cmp::Reverse(packets));
    for ((protocol, from, to, (from_port, to_port)), packets) in flows {
        println!("{packets:>10}  protocol {protocol}  {from} {from_port} > {to} {to_port}");
    }
    Ok(())
}

//! `bench virtio`: the receive side of one queue of a vhost-user device, without an engine.
//!
//! Bursts are polled, counted and returned, as in the measurement of DPDK's driver by the peer's
//! `bench_virtio`. Busy time is the time of polls that returned packets, with the return of their
//! frames.

mod driver; // one queue, polled by the calling thread
mod peer; //   words shared with the peer

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use forebay_device::{Device, DeviceConfig, Via};
use forebay_rx::CpuId;
use forebay_rx::parse::Verify;
use forebay_sys as sys;
use forebay_sys::Error;

use self::driver::{Counted, Driver};
use self::peer::{BenchPeer, PeerSent};
use super::BenchArgs;
use super::figures::{Figures, RoundSpread};
use super::solo::{as_f64, nanoseconds};
use crate::failure::Failure;
use crate::options::VhostUserOptions;

/// Default number of packets polled at once, equal to the peer's.
const BURST: u32 = 32;

/// Longest wait for the first packet.
const FIRST_PACKET_TIMEOUT: Duration = Duration::from_secs(20);

/// Time after the first packet in which packets are not counted.
const WARM_UP: Duration = Duration::from_millis(500);

/// Duration of one sample.
const SAMPLE: Duration = Duration::from_millis(100);

#[derive(Debug, Args)]
pub(crate) struct VirtioBenchOptions {
    /// virtio: the socket of the back end that packets come from
    #[arg(long, value_name = "PATH")]
    sock: Option<PathBuf>,

    /// virtio: the CPU that polls [default: the first one that may be used]
    #[arg(long, value_name = "CPU")]
    cpu: Option<u16>,

    #[command(flatten)]
    vhost_user: VhostUserOptions,
}

pub(super) fn run(args: &BenchArgs) -> Result<Figures, Failure> {
    let options = &args.virtio;
    let Some(sock) = &options.sock else {
        let problem = "virtio: there is no back end to receive from";
        return Err(Failure::usage(problem, "give its socket with --sock PATH"));
    };
    if let Some(cpu) = options.cpu {
        let refused = |error| Failure::usage(format!("--cpu {cpu}: {error}"), "give another CPU");
        sys::pin_to(CpuId(cpu)).map_err(refused)?;
    }
    let config = DeviceConfig {
        virtio: options.vhost_user.options()?,
        verify: if args.verify { Verify::Checksums } else { Verify::Nothing },
        ..DeviceConfig::new(sock.to_string_lossy(), Via::VhostUser)
    };
    let peer = BenchPeer::beside(sock);
    let mut device = Device::open(&config)?;
    let burst = args.burst.unwrap_or(BURST);
    let mut driver = Driver::over(&mut device, burst as usize, args.touch)?;
    let figures = measure(&mut driver, peer.as_ref(), args.secs, &config.name)?.figures();
    let rx_buffer_size = driver.rx_buffer_size_bytes();
    let counts = device.counts.iter().flat_map(|counts| counts.iter());
    let counts: BTreeMap<_, _> = counts.filter(|(_, count)| *count > 0).collect();
    Ok(figures
        .with("rx_buffers", config.virtio.rx_buffers.to_string())
        .with("rx_buffer_size", rx_buffer_size)
        .with("rx_buffer_max", config.virtio.rx_buffer_max_bytes)
        .with("queue_size", config.virtio.queue_size)
        .with("packed", config.virtio.packed)
        .with("burst", burst)
        .with("touch", args.touch)
        .with("verify", args.verify)
        .with("facts", device.facts.all())
        .with("driver", counts)
        .with("frames_away", driver.close()))
}

/// Measurements.
struct Measured {
    /// One value per sample.
    mpps: Vec<f64>,
    gbit_s: Vec<f64>,
    /// One value per sample with packets.
    rx_busy_ns: Vec<f64>,
    /// One value per sample in which the peer reports packets sent.
    tx_busy_cycles: Vec<f64>,
    /// Sum over all samples.
    sum: Counted,
}

/// Receives until `secs` have passed since the first packet.
fn measure(
    driver: &mut Driver,
    peer: Option<&BenchPeer>,
    secs: u64,
    name: &str,
) -> Result<Measured, Failure> {
    let first = driver.run_until(Instant::now() + FIRST_PACKET_TIMEOUT, 1)?;
    if first.packets == 0 {
        return Err(nothing_received(name, &first).into());
    }
    let end = Instant::now() + Duration::from_secs(secs);
    driver.run_until(Instant::now() + WARM_UP, usize::MAX)?;
    let mut measured = Measured {
        mpps: Vec::new(),
        gbit_s: Vec::new(),
        rx_busy_ns: Vec::new(),
        tx_busy_cycles: Vec::new(),
        sum: Counted::default(),
    };
    loop {
        let sent_before = peer.and_then(BenchPeer::sent);
        let started = Instant::now();
        let counted = driver.run_until(started + SAMPLE, usize::MAX)?;
        let lasted_ns = nanoseconds(started.elapsed());
        measured.add(&counted, lasted_ns);
        if let (Some(before), Some(after)) = (sent_before, peer.and_then(BenchPeer::sent)) {
            measured.tx_busy_cycles.extend(PeerSent::busy_cycles_per_packet(before, after));
        }
        if Instant::now() >= end {
            return Ok(measured);
        }
    }
}

impl Measured {
    fn add(&mut self, counted: &Counted, lasted_ns: f64) {
        self.mpps.push(as_f64(counted.packets) / lasted_ns * 1e3);
        self.gbit_s.push(as_f64(counted.bytes) * 8.0 / lasted_ns);
        if counted.packets > 0 {
            self.rx_busy_ns.push(nanoseconds(counted.busy) / as_f64(counted.packets));
        }
        self.sum.add(counted);
    }

    fn figures(&self) -> Figures {
        let Self { mpps, gbit_s, rx_busy_ns, tx_busy_cycles, sum } = self;
        let ratio = |count: usize, of: usize| as_f64(count) / as_f64(of.max(1));
        let figures = Figures::new("virtio", "Mpps", RoundSpread::of(mpps))
            .with("mpps", RoundSpread::of(mpps))
            .with("gbit_s", RoundSpread::of(gbit_s))
            .with("rx_busy_ns_per_pkt", RoundSpread::of(rx_busy_ns))
            .with("truesize_per_byte", ratio(sum.truesize, sum.bytes))
            .with("packets_per_nonempty_burst", ratio(sum.packets, sum.bursts))
            .with("empty_polls_share", ratio(sum.empty, sum.empty + sum.bursts))
            .with("packets", sum.packets)
            .with("refused", sum.refused());
        let figures = match sum.buffers {
            Some(buffers) => figures.with("buffers_per_packet", ratio(buffers, sum.packets)),
            None => figures,
        };
        // In cycles, as only the peer knows the frequency of its clock.
        if tx_busy_cycles.is_empty() {
            figures
        } else {
            figures.with("tx_busy_cycles_per_pkt", RoundSpread::of(tx_busy_cycles))
        }
    }
}

fn nothing_received(name: &str, came: &Counted) -> Error {
    let refused = came.refused().into_iter().map(|(reason, count)| format!("{count} {reason}"));
    let refused = refused.collect::<Vec<_>>().join(", ");
    Error::Device {
        name: name.to_owned(),
        what: format!("receive a packet within {} s", FIRST_PACKET_TIMEOUT.as_secs()),
        source: std::io::ErrorKind::TimedOut.into(),
        help: if refused.is_empty() {
            "check that the back end runs, that it is connected, and that it sends".to_owned()
        } else {
            format!("it sends what cannot be received ({refused}): see how it describes packets")
        },
    }
}

#[cfg(test)]
mod tests {
    use forebay_rx::DropReason;

    use super::*;

    #[test]
    fn figures_are_of_what_was_counted() {
        let counted = Counted {
            packets: 2000,
            bytes: 120_000,
            truesize: 240_000,
            buffers: Some(4000),
            bursts: 100,
            empty: 300,
            busy: Duration::from_micros(50),
            ..Counted::default()
        };
        let mut nothing = Counted { empty: 100, ..Counted::default() };
        nothing.refused[DropReason::VnetHeader.index()] = 3;
        let mut measured = Measured {
            mpps: Vec::new(),
            gbit_s: Vec::new(),
            rx_busy_ns: Vec::new(),
            tx_busy_cycles: vec![100.0],
            sum: Counted::default(),
        };
        measured.add(&counted, 1e6);
        measured.add(&nothing, 1e6);
        let figures = serde_json::to_value(measured.figures()).unwrap();
        let figure = |name: &str| figures.pointer(&format!("/{name}")).unwrap().as_f64().unwrap();
        for (name, expected) in [
            ("mpps/max", 2.0),
            ("mpps/min", 0.0),
            ("median", 1.0),
            ("gbit_s/max", 0.96),
            ("rx_busy_ns_per_pkt/median", 25.0),
            ("rx_busy_ns_per_pkt/n", 1.0),
            ("truesize_per_byte", 2.0),
            ("buffers_per_packet", 2.0),
            ("packets_per_nonempty_burst", 20.0),
            ("empty_polls_share", 0.8),
            ("tx_busy_cycles_per_pkt/median", 100.0),
            ("refused/vnet_header", 3.0),
        ] {
            assert!((figure(name) - expected).abs() < 1e-9, "{name}: {figures}");
        }
    }
}

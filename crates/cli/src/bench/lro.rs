//! `bench lro`: coalescing on one CPU, in the three regions of the peer's `bench_gro`.
//!
//! | region | what is timed, for each frame that comes in |
//! |---|---|
//! | `gro` | coalescing alone: frames received, parsed and hashed before |
//! | `parse_gro` | parsing and hashing too, as far as a device does not give the hash |
//! | `all` | frame allocated, filled, parsed, hashed, coalesced, returned |
//!
//! Each region is timed with checksums already verified by a device, as in the peer's benchmark,
//! which verifies none. The last two are also timed with every byte verified: in `all` while the
//! frame is filled, as with captures.

use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_buf::Pool;
use forebay_buf::frame::BEFORE_PACKET_BYTES;
use forebay_buf::pool::{CHUNK_ALIGN_BYTES, ChunkClass, carve, region_bytes};
use forebay_rx::Packet;
use forebay_rx::arrive::PollStatus;
use forebay_rx::coalesce::{CoalesceConfig, CoalesceMode, Coalescer};
use forebay_rx::counters::CoalesceCounters;
use forebay_rx::hash::{FlowHash, Hasher};
use forebay_rx::packet::Arrival;
use forebay_rx::parse::{self, Checksum, Verify, View};
use forebay_sys as sys;

use super::figures::Figures;
use super::input::{self, Sample};
use super::solo::{self, as_f64, nanoseconds};
use super::steer::hasher;
use super::{BenchArgs, BenchHash};
use crate::failure::Failure;

/// Default number of frames coalesced at once.
const BURST: u32 = 64;

/// Minimum chunk size, that of the engine's smallest chunks.
const CHUNK_BYTES_MIN: u32 = 2048;

#[derive(Clone, Copy, PartialEq, Eq)]
enum BenchRegion {
    Gro,
    ParseGro,
    All,
}

pub(super) fn run(args: &BenchArgs) -> Result<Figures, Failure> {
    let mut bench = LroBench::new(args)?;
    let overhead = clock_overhead();
    let mut measure =
        |region, verify| solo::samples(args, || bench.sample(Timing { region, verify, overhead }));
    let gro = measure(BenchRegion::Gro, Verify::Nothing);
    let parse_gro = measure(BenchRegion::ParseGro, Verify::Nothing);
    let all = measure(BenchRegion::All, Verify::Nothing);
    let verified_parse_gro = measure(BenchRegion::ParseGro, Verify::Checksums);
    let verified_all = measure(BenchRegion::All, Verify::Checksums);
    let (segments, packets, bytes) = bench.merged();
    Ok(gro
        .figures("lro", "ns/input packet")
        .with("input", input::name(args.file.as_deref()))
        .with("burst", bench.burst)
        .with("descriptors", bench.descriptors)
        .with("gro", gro.region())
        .with("parse_gro", parse_gro.region())
        .with("all", all.region())
        .with("verified_parse_gro", verified_parse_gro.region())
        .with("verified_all", verified_all.region())
        .with("coalesce_ratio", segments / packets.max(1.0))
        .with("bytes_per_packet", bytes / packets.max(1.0))
        .with("frames_away", bench.pool.in_use()))
}

/// Region to be timed, and the cost of reading the clock twice.
#[derive(Clone, Copy)]
struct Timing {
    region: BenchRegion,
    verify: Verify,
    overhead: Duration,
}

/// The input and the stages.
struct LroBench {
    samples: Vec<Sample>,
    /// Checksum state of each sample, as a verifying device would report it.
    vouched: Vec<Checksum>,
    /// Hash of each sample as a device would report it, or none.
    given: Vec<FlowHash>,
    burst: usize,
    descriptors: u32,
    pool: Pool,
    hasher: Hasher,
    coalescer: Coalescer,
    counters: Arc<CoalesceCounters>,
    /// A received burst, and the packets that coalescing returns.
    packets: Vec<Packet>,
    out: Vec<Packet>,
}

impl LroBench {
    fn new(args: &BenchArgs) -> Result<Self, Failure> {
        let Some(file) = args.file.as_deref() else {
            let problem = "lro: made-up packets have nothing to merge";
            return Err(Failure::usage(problem, "give a capture of TCP"));
        };
        let samples = input::packets(Some(file))?;
        let burst = args.burst.unwrap_or(BURST) as usize;
        if samples.len() < burst {
            let (file, count) = (file.display(), samples.len());
            let problem = format!("{file}: {count} packets, fewer than a burst of {burst}");
            return Err(Failure::usage(problem, "give a smaller --burst, or a longer capture"));
        }
        let hasher = hasher(args)?;
        let told = samples.iter().map(|Sample { bytes, wire_len, link }| {
            let headers = parse::parse(bytes, *wire_len, *link, Verify::Checksums);
            let hash = hasher.hash(&View::new(bytes, &headers));
            let given = if args.hash == BenchHash::Given { hash } else { FlowHash::NONE };
            (headers.l4_checksum, given)
        });
        let (vouched, given) = told.unzip();
        let counters = Arc::default();
        let config = CoalesceConfig {
            mode: if args.lro { CoalesceMode::Lro } else { CoalesceMode::Gro },
            descriptors: args.descriptors,
            ..CoalesceConfig::default()
        };
        Ok(Self {
            vouched,
            given,
            burst,
            descriptors: config.descriptors,
            pool: pool(&samples, burst)?,
            hasher,
            coalescer: Coalescer::new(config, Arc::clone(&counters)),
            counters,
            packets: Vec::with_capacity(burst),
            out: Vec::with_capacity(burst),
            samples,
        })
    }

    /// Processes the input for one repeat. Returns nanoseconds per frame.
    fn sample(&mut self, timing: Timing) -> f64 {
        let started = Instant::now();
        let (mut timed, mut frames) = (Duration::ZERO, 0);
        while started.elapsed() < solo::REPEAT {
            for first in (0..=self.samples.len() - self.burst).step_by(self.burst) {
                timed += self.burst(first, timing).saturating_sub(timing.overhead);
                frames += self.burst;
            }
        }
        nanoseconds(timed) / as_f64(frames)
    }

    /// Processes one burst. Returns the time spent in the region.
    fn burst(&mut self, first: usize, timing: Timing) -> Duration {
        let Timing { region, verify, .. } = timing;
        let mut started = Instant::now();
        self.receive(first, timing);
        if region == BenchRegion::ParseGro {
            started = Instant::now();
        }
        self.parse(verify);
        if region == BenchRegion::Gro {
            started = Instant::now();
        }
        self.coalescer.coalesce(&mut self.packets, 0, &mut self.out);
        self.coalescer.end_poll(PollStatus::Drained, 0, &mut self.out);
        let coalesced = started.elapsed();
        for packet in self.out.drain(..) {
            self.pool.put(packet.frame);
        }
        if region == BenchRegion::All { started.elapsed() } else { coalesced }
    }

    fn receive(&mut self, first: usize, Timing { region, verify, .. }: Timing) {
        // If filling is not part of the region, `parse` sums up the bytes, inside the region.
        let summed = if region == BenchRegion::All { verify } else { Verify::Nothing };
        for number in first..first + self.burst {
            let Sample { bytes, wire_len, link } = &self.samples[number];
            let len_bytes = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
            let Some(frame) = self.pool.allocate(len_bytes) else { return };
            let arrival = Arrival::of_frame(number as u64);
            let received = Packet::received(frame, arrival, *wire_len, *link);
            self.packets.push(Packet { hash: self.given[number], ..received });
            if let Some(packet) = self.packets.last_mut() {
                packet.fill(bytes, summed);
                if verify == Verify::Nothing {
                    packet.headers.ip_checksum = Checksum::Good;
                    packet.headers.l4_checksum = self.vouched[number];
                }
            }
        }
    }

    fn parse(&mut self, verify: Verify) {
        for packet in &mut self.packets {
            let Packet { frame, headers, wire_len, device_sum, .. } = packet;
            parse::parse_into(headers, frame.data(), *wire_len, *device_sum, verify);
        }
        for packet in self.packets.iter_mut().filter(|packet| !packet.hash.is_some()) {
            packet.hash = self.hasher.hash(&packet.view());
        }
    }

    /// Frames received, packets that resulted, and bytes of the packets.
    fn merged(&self) -> (f64, f64, f64) {
        let CoalesceCounters { segments_in, packets_out, bytes_out, .. } = &*self.counters;
        let [segments, packets, bytes] = [segments_in, packets_out, bytes_out]
            .map(|counter| as_f64(usize::try_from(counter.get()).unwrap_or(usize::MAX)));
        (segments, packets, bytes)
    }
}

fn pool(samples: &[Sample], burst: usize) -> Result<Pool, Failure> {
    let largest = samples.iter().map(|sample| sample.bytes.len()).max().unwrap_or(0);
    let chunk_bytes =
        u32::try_from(largest).unwrap_or(u32::MAX).saturating_add(BEFORE_PACKET_BYTES);
    let chunk_bytes = chunk_bytes.max(CHUNK_BYTES_MIN).next_multiple_of(CHUNK_ALIGN_BYTES);
    let chunks = 2 * u32::try_from(burst).unwrap_or(u32::MAX);
    let shares = [vec![ChunkClass { chunk_bytes, chunks }]];
    let region = sys::map_packet_memory(region_bytes(&shares))?;
    let pool = carve(region, &shares).ok().and_then(|mut pools| pools.pop());
    pool.ok_or_else(|| Failure::usage("the region is too small", "this is a bug: report it"))
}

/// Minimum time between two adjacent readings of the clock.
fn clock_overhead() -> Duration {
    let pairs = (0..20_000).map(|_| {
        let started = Instant::now();
        started.elapsed()
    });
    pairs.min().unwrap_or_default()
}

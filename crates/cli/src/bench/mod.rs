//! `forebay bench`: measures one stage, and prints one JSON line.
//!
//! Machines are noisy, and on some hosts virtual CPUs move between caches. So figures are medians
//! of many short repeats. A disturbed repeat on one core is dropped; a repeat across two cores is
//! classified by the distance of the cores at that time.

mod checksum; // the Internet checksum
mod parse; //    the walk over the headers
mod hash; //     from a parsed packet to its flow hash
mod lro; //      coalescing on one CPU
mod steer; //    a packet's whole way across two CPUs
mod ring; //     words from one CPU to another
mod pool; //     a frame allocated on one CPU, freed on another
mod udp; //      a flood of small datagrams to one socket
mod virtio; //   the receive side of a vhost-user device
mod knob; //     cost per turn of knobs that can change

mod input; //    packets to measure with
mod solo; //     repeats on one core
pub(crate) mod pair; // repeats across two cores
pub(crate) mod figures; // output

use std::path::PathBuf;
use std::thread;

use clap::{Args, ValueEnum};
use figures::Figures;
use forebay_rx::CpuId;
use forebay_sys as sys;

use crate::failure::Failure;
use crate::output;

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// The stage
    #[arg(value_enum)]
    what: BenchKind,

    /// A capture to take packets from, where that applies [default: made-up packets]
    file: Option<PathBuf>,

    /// Repeats to gather
    #[arg(long, value_name = "N", default_value_t = 61, value_parser = clap::value_parser!(u32).range(1..))]
    reps: u32,

    /// Seconds to spend at most
    #[arg(long, value_name = "S", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    secs: u64,

    /// Objects or packets handed over at once (ring, pool, steer, udp)
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=64))]
    bulk: u32,

    /// lro: frames coalesced at once [default: 64]; virtio: packets polled at once [default: 32]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    burst: Option<u32>,

    /// lro: flows whose segments can be held at once
    #[arg(long, value_name = "N", default_value_t = forebay_rx::coalesce::LRO_DESCRIPTORS,
          value_parser = clap::value_parser!(u32).range(1..=i64::from(forebay_rx::coalesce::LRO_DESCRIPTORS_MAX)))]
    descriptors: u32,

    /// lro: merge TCP whose acknowledgements, windows and timestamps advance, too
    #[arg(long)]
    lro: bool,

    /// hash, steer, lro: how packets are hashed
    #[arg(long, value_enum, default_value_t)]
    hash: BenchHash,

    /// hash: IPv6 rather than IPv4, where no capture is given
    #[arg(long)]
    v6: bool,

    /// checksum: bytes summed up at once
    #[arg(long, value_name = "BYTES", default_value_t = 1448)]
    len: u16,

    /// parse, steer, virtio: verify checksums too
    #[arg(long)]
    verify: bool,

    /// steer: every packet's flow follows its application, which says where it runs for each batch;
    /// measured against the same without, in turn
    #[arg(long)]
    rfs: bool,

    /// udp: threads that put datagrams into the socket, in one measurement after the other
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1, 2, 4, 8],
          value_parser = clap::value_parser!(u8).range(1..=64))]
    producers: Vec<u8>,

    /// udp: what a slow reader does for each datagram, in nanoseconds
    #[arg(long, value_name = "NS", default_value_t = 50)]
    work_ns: u32,

    /// udp: what the socket may hold, in bytes
    #[arg(long, value_name = "BYTES", default_value_t = forebay::net::NetConfig::RMEM_DEFAULT)]
    rcvbuf: u32,

    /// pool: write and read packet bytes too; virtio: read the first ones
    #[arg(long)]
    touch: bool,

    #[command(flatten)]
    virtio: virtio::VirtioBenchOptions,

    /// Figures are JSON with or without this
    #[arg(long)]
    pub(crate) json: bool,
}

/// A stage that can be measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum BenchKind {
    /// Headers of a frame
    Parse,
    /// The Internet checksum
    Checksum,
    /// The flow hash
    Hash,
    /// A look whether a knob was changed, as each turn has two
    Knob,
    /// One object from one CPU to another
    Ring,
    /// A frame allocated here, freed there
    Pool,
    /// Segments of a capture merged
    Lro,
    /// Frame in, parse, hash, steer, hand over, read on the other CPU, return
    Steer,
    /// A flood of small datagrams to one socket, with each buffer policy in turn: repeats are 7 at
    /// most
    Udp,
    /// Bursts of packets received from a vhost-user back end (--sock) and given back
    Virtio,
    /// All of them that need neither a capture nor a back end, one line each
    All,
}

/// Hash function of a benchmark.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum)]
pub(crate) enum BenchHash {
    /// Toeplitz with the standard key
    #[default]
    Toeplitz,
    /// SipHash
    Keyed,
    /// steer, lro: by the device
    Given,
}

/// Measures and prints.
pub(crate) fn run(args: &BenchArgs) -> Result<(), Failure> {
    let all = [
        BenchKind::Parse,
        BenchKind::Checksum,
        BenchKind::Hash,
        BenchKind::Knob,
        BenchKind::Ring,
        BenchKind::Pool,
        BenchKind::Steer,
        BenchKind::Udp,
    ];
    let stages = if args.what == BenchKind::All { all.as_slice() } else { &[args.what] };
    let cpus = sys::allowed_cpus();
    for stage in stages {
        // On a new thread, as the thread stays pinned.
        let measured = thread::scope(|scope| scope.spawn(|| measure(*stage, args, &cpus)).join());
        let figures = measured.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        let line = serde_json::to_string(&figures).unwrap_or_default() + "\n";
        output::print(&line)?;
    }
    Ok(())
}

fn measure(what: BenchKind, args: &BenchArgs, cpus: &[CpuId]) -> Result<Figures, Failure> {
    if let Some(&cpu) = cpus.first() {
        // Ignored: figures of an unpinned thread are still valid.
        let _ = sys::pin_to(cpu);
    }
    match what {
        BenchKind::Parse => parse::run(args),
        BenchKind::Checksum => Ok(checksum::run(args)),
        BenchKind::Hash => hash::run(args),
        BenchKind::Knob => Ok(knob::run(args)),
        BenchKind::Lro => lro::run(args),
        BenchKind::Ring => ring::run(args, pair::two_of(cpus)?),
        BenchKind::Pool => pool::run(args, pair::two_of(cpus)?),
        BenchKind::Udp => udp::run(args, cpus),
        BenchKind::Virtio => virtio::run(args),
        BenchKind::Steer | BenchKind::All => steer::run(args, pair::two_of(cpus)?),
    }
}

//! The command line.

use std::num::NonZeroU16;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Parser, Subcommand, ValueEnum};
use forebay::control::coalesce::{MTU_MAX, MTU_MIN};
use forebay::control::{Change, FlowName, ScriptedChange};
use forebay::device::Rate;

use crate::synthetic::SyntheticSpec;

/// Slots that a flow table may be given here. The kernel allows 2^30; each takes twelve bytes at
/// once, for every queue, and this is far beyond the flows that the order check tells apart.
const RPS_FLOW_CNT_MAX: i64 = 1 << 22;

/// A kernel's receive path in user space: packets from one queue to every core, in order.
#[derive(Debug, Parser)]
#[command(name = "forebay", version, about)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Send captures through the whole path and check every packet
    Replay(Box<ReplayArgs>),
    /// Print what knobs of a run read
    Get(crate::control::GetArgs),
    /// Set knobs of a run
    Set(crate::control::SetArgs),
    /// Print all knobs of a run
    List(crate::control::ListArgs),
    /// Print knobs of a run as they change
    Watch(crate::control::WatchArgs),
    /// Say which CPU a flow of a run is on, and why
    Explain(crate::control::ExplainArgs),
    /// Run a scenario on virtual CPUs, in virtual time, and check every step
    Sim(crate::sim::SimArgs),
    /// Say which CPUs packets should go to on this machine, and why
    Advise(AdviseArgs),
    /// Compute Toeplitz hashes
    Hash(HashArgs),
    /// Measure one stage
    Bench(crate::bench::BenchArgs),
}

#[derive(Debug, Args)]
pub(crate) struct ReplayArgs {
    /// Captures (pcap or pcapng), one after another; a bundled one if none is given
    pub(crate) files: Vec<PathBuf>,

    /// Made-up UDP flows instead of captures, as in flows=64,frames=1000000,size=18..1400,ipv6
    #[arg(long, value_name = "SPEC", conflicts_with = "files")]
    pub(crate) synthetic: Option<SyntheticSpec>,

    /// CPUs to run on: how many, or a list such as 0-3,8 [default: all that may be used]
    #[arg(long, value_name = "LIST|N")]
    pub(crate) cpus: Option<String>,

    /// Receive queues that the frames are dealt out to, by hash; 128 at most
    #[arg(long, value_name = "N", default_value = "1")]
    pub(crate) queues: NonZeroU16,

    /// CPUs that packets go to: a bitmap as for rps_cpus, or a list with a dash; 0 turns RPS off
    /// [default: those of --cpus that share a last-level cache with one that polls a queue, see
    /// advise; all of them with --deterministic]
    #[arg(long, value_name = "MASK")]
    pub(crate) rps: Option<String>,

    /// How flows are hashed
    #[arg(long, value_enum, default_value_t)]
    pub(crate) hash: HashKind,

    /// The hash's key, in hexadecimal [default: drawn for keyed, the standard one for toeplitz]
    #[arg(long, value_name = "HEX")]
    pub(crate) hash_key: Option<String>,

    /// How often all captures are gone through
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "synthetic")]
    pub(crate) loops: u64,

    /// Packets a second (with k or M), max, or capture for the capture's own times
    #[arg(long, value_name = "PPS|max|capture", default_value = "max")]
    pub(crate) rate: RateArg,

    /// Nanoseconds that the application spends on each packet
    #[arg(long, value_name = "NS", default_value_t = 0)]
    pub(crate) work: u64,

    /// What a full backlog does [default: wait at --rate max, else drop]
    #[arg(long, value_enum)]
    pub(crate) when_full: Option<WhenFullArg>,

    /// When packets leave the CPU that polls
    #[arg(long, value_enum, default_value_t)]
    pub(crate) spread: SpreadArg,

    /// Merge segments of one flow: what can be taken apart again exactly (gro), also TCP whose
    /// acknowledgement, window and timestamps advance (lro), or nothing [default: off; gro if one
    /// of the next four options is given]
    #[arg(long, value_enum)]
    pub(crate) coalesce: Option<CoalesceArg>,

    /// Where: before steering, as in the kernel, or on the CPUs that packets were steered to
    /// [default: arrive]
    #[arg(long, value_enum)]
    pub(crate) coalesce_at: Option<CoalesceAtArg>,

    /// Nanoseconds that a packet waits for more segments after the queue ran empty (arrive)
    /// [default: 0]
    #[arg(long, value_name = "NS")]
    pub(crate) gro_flush_timeout: Option<u64>,

    /// Flows of which segments can be held at once, rounded up to a power of two [default: 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32)
          .range(1..=i64::from(path::coalesce::LRO_DESCRIPTORS_MAX)))]
    pub(crate) descriptors: Option<u32>,

    /// The longest IP packet that the device receives, for which lro leaves room [default: 1500]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32)
          .range(i64::from(MTU_MIN)..=i64::from(MTU_MAX)))]
    pub(crate) mtu: Option<u32>,

    /// Set a knob before the first frame, as in netdev_max_backlog=300; repeatable
    #[arg(long, value_name = "KNOB=VALUE")]
    pub(crate) set: Vec<Change>,

    /// Change a knob before a frame, as in 10000:rps_cpus=3; repeatable
    #[arg(long, value_name = "FRAME:KNOB=VALUE")]
    pub(crate) at: Vec<ScriptedChange>,

    /// More of these, one on each line of a file; what follows a # is a remark
    #[arg(long, value_name = "FILE")]
    pub(crate) script: Option<PathBuf>,

    /// Mount the knobs on DIR, an empty directory, for as long as the run lasts: files as in sysfs
    /// and procfs, to be read and written while packets flow
    #[arg(long, value_name = "DIR", conflicts_with = "deterministic")]
    pub(crate) mount: Option<PathBuf>,

    /// Slots of each queue's flow table, rounded up to a power of two; 4194304 at most, for they
    /// take memory whether or not there are as many flows [default: 4096]
    #[arg(long, value_name = "N",
          value_parser = clap::value_parser!(u32).range(..=RPS_FLOW_CNT_MAX))]
    pub(crate) rps_flow_cnt: Option<u32>,

    /// Packets that follow their flow to a CPU it should leave before a held move begins
    #[arg(long, value_name = "PACKETS")]
    pub(crate) move_after: Option<u32>,

    /// What draws (keys, interleavings, traffic) are determined by [default: 1 with
    /// --deterministic or --synthetic, else drawn]
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<u64>,

    /// Run on one thread in virtual time, in an order that the seed determines
    #[arg(long)]
    pub(crate) deterministic: bool,

    /// Where all head and tail counters begin
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) start_counters: u32,

    /// Leave checksums unverified
    #[arg(long)]
    pub(crate) no_checksums: bool,

    /// Write delivered packets to DIR/cpuN.pcap, one capture for each CPU
    #[arg(long, value_name = "DIR")]
    pub(crate) write_pcap: Option<PathBuf>,

    /// Write merged packets as the frames they were merged of
    #[arg(long, requires = "write_pcap")]
    pub(crate) resegment: bool,

    /// Write a trace of every packet and change to DIR
    #[arg(long, value_name = "DIR")]
    pub(crate) trace: Option<PathBuf>,

    /// Trace the headers of every frame too
    #[arg(long, requires = "trace")]
    pub(crate) trace_parse: bool,

    /// Listen there for get, set, list, watch and explain
    #[arg(long, value_name = "PATH", conflicts_with = "deterministic")]
    pub(crate) control: Option<PathBuf>,

    /// Set the knobs of this file before the first frame, but for those that options set
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,

    /// Watch a flow, and say at the end where it was and why; repeatable
    #[arg(long, value_name = "FLOW")]
    pub(crate) explain: Vec<FlowName>,

    /// Print one JSON document and nothing else on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct AdviseArgs {
    /// CPUs that packets can go to: how many, or a list such as 0-3,8 [default: all that may be
    /// used]
    #[arg(long, value_name = "LIST|N")]
    pub(crate) cpus: Option<String>,

    /// The CPU that polls, or takes the interrupts of, the first queue; or a list, for the queues
    /// in turn [default: the first ones of --cpus]
    #[arg(long, value_name = "CPU")]
    pub(crate) polling: Option<String>,

    /// Receive queues [default: one for each of --polling]
    #[arg(long, value_name = "N")]
    pub(crate) queues: Option<NonZeroU16>,

    /// Where sysfs is: a copy of another machine's will do
    #[arg(long, value_name = "DIR", default_value = forebay::topology::SYSFS)]
    pub(crate) sysfs: PathBuf,

    /// Print one JSON document and nothing else on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct HashArgs {
    /// A file of tuples, raw inputs and keys; prints one line `id,hash` for each
    #[arg(long, value_name = "FILE")]
    pub(crate) vectors: PathBuf,
}

/// How flows are hashed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum)]
pub(crate) enum HashKind {
    /// SipHash under a secret key: no stranger can aim at one CPU
    #[default]
    Keyed,
    /// The same, both directions of a flow alike
    KeyedSymmetric,
    /// As network cards do it
    Toeplitz,
    /// The same, under the key 6d5a…, both directions of a flow alike
    ToeplitzSymmetric,
}

/// What a full backlog does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum WhenFullArg {
    /// The source waits
    Wait,
    /// Packets are dropped
    Drop,
}

/// When packets leave the CPU that polls.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum)]
pub(crate) enum SpreadArg {
    /// When it is busy
    #[default]
    Busy,
    /// Always, as in the kernel
    Always,
}

/// What is merged.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum CoalesceArg {
    /// What can be taken apart again exactly
    Gro,
    /// TCP whose acknowledgement, window and timestamps advance, too
    Lro,
    /// Nothing
    Off,
}

/// Where packets are coalesced.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum CoalesceAtArg {
    /// Before steering
    Arrive,
    /// On the CPUs that packets were steered to
    Deliver,
}

/// A rate on the command line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RateArg(pub(crate) Rate);

impl FromStr for RateArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let rate = match text {
            "max" => Rate::Max,
            "capture" => Rate::Capture,
            _ => {
                let (digits, factor) = match text.strip_suffix(['k', 'K']) {
                    Some(digits) => (digits, 1_000),
                    None => match text.strip_suffix('M') {
                        Some(digits) => (digits, 1_000_000),
                        None => (text, 1),
                    },
                };
                let number = digits.parse::<u64>().ok().and_then(|n| n.checked_mul(factor));
                match number {
                    Some(1..) => Rate::PerSecond(number.unwrap_or(1)),
                    _ => return Err("a rate is a number above 0, max or capture".to_owned()),
                }
            }
        };
        Ok(Self(rate))
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn rates_have_suffixes_and_are_never_zero() {
        let rate = |text: &str| text.parse::<RateArg>().map(|rate| rate.0);
        assert_eq!(rate("max"), Ok(Rate::Max));
        assert_eq!(rate("capture"), Ok(Rate::Capture));
        assert_eq!(rate("1500"), Ok(Rate::PerSecond(1500)));
        assert_eq!(rate("20k"), Ok(Rate::PerSecond(20_000)));
        assert_eq!(rate("3M"), Ok(Rate::PerSecond(3_000_000)));
        for text in ["0", "-1", "fast", "k", "99999999999999999999", "99999999999999999M"] {
            assert!(rate(text).is_err(), "{text}");
        }
    }
}

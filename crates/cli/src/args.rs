//! The command line.

use std::num::NonZeroU16;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Parser, Subcommand, ValueEnum};
use forebay_control::FlowName;
use forebay_device::Rate;
use forebay_engine::knobs::ScriptedText;

use crate::options::{
    ControlOptions, EngineOptions, HashOptions, LogOptions, MetricsOptions, RotateOptions,
    TraceOptions,
};
use crate::synthetic::SyntheticSpec;

/// A kernel's receive path in user space: packets from one queue to every core, in order.
#[derive(Debug, Parser)]
#[command(name = "forebay", version, about)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Take packets from live devices, spread them over CPUs in order, and send them on
    Run(Box<crate::run::RunArgs>),
    /// Run a program that is not ours with sockets of ours at taken ports
    Exec(crate::exec::ExecArgs),
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
    /// Show a run's rates, CPUs, queues, drops and sockets as they change
    Top(crate::top::TopArgs),
    /// Run a scenario on virtual CPUs, in virtual time, and check every step
    Sim(crate::sim::SimArgs),
    /// Say which CPUs packets should go to on this machine, and why
    Advise(AdviseArgs),
    /// Say what this machine and a device can do for a run, and what to change
    Doctor(crate::doctor::DoctorArgs),
    /// Compute Toeplitz hashes
    Hash(HashArgs),
    /// Measure one stage
    Bench(crate::bench::BenchArgs),
    /// Measure beside the programs that are installed here, in turn
    Compare(crate::compare::CompareArgs),
    /// Run our side of a comparison
    #[command(hide = true)]
    CompareOwn(crate::compare::own::OwnArgs),
    /// Remove the control socket of a run that has ended
    #[command(hide = true)]
    RemoveSocket(crate::options::RemoveSocketArgs),
    /// Write man pages or completions
    #[cfg(feature = "generate")]
    #[command(hide = true)]
    Generate(crate::generate::GenerateArgs),
}

impl Command {
    /// Form of the command's messages.
    pub(crate) fn log(&self) -> LogOptions {
        match self {
            Self::Run(args) => args.log.clone(),
            Self::Replay(args) => args.log.clone(),
            _ => LogOptions::default(),
        }
    }

    /// True if the output is to be JSON documents only.
    pub(crate) fn prints_json(&self) -> bool {
        match self {
            Self::Run(args) => args.json,
            Self::Replay(args) => args.json,
            Self::Sim(args) => args.json,
            Self::Get(args) => args.asked.json,
            Self::Set(args) => args.asked.json,
            Self::List(args) => args.asked.json,
            Self::Watch(args) => args.asked.json,
            Self::Explain(args) => args.asked.json,
            Self::Advise(args) => args.json,
            Self::Doctor(args) => args.json,
            Self::Bench(args) => args.json,
            Self::Compare(args) => args.json,
            Self::Exec(_) | Self::Top(_) | Self::Hash(_) => false,
            Self::CompareOwn(_) | Self::RemoveSocket(_) => false,
            #[cfg(feature = "generate")]
            Self::Generate(_) => false,
        }
    }
}

/// Largest `--work`, in nanoseconds. A run that is to end delivers what it has received, up to a full backlog of
/// each CPU, so that this bounds the time until it has ended.
const WORK_NS_MAX: u64 = 1_000_000;

#[derive(Debug, Args)]
pub(crate) struct ReplayArgs {
    /// Captures (pcap or pcapng, packed with gzip or not), one after another; - is standard input;
    /// a bundled one if none is given
    pub(crate) files: Vec<PathBuf>,

    /// Made-up UDP flows instead of captures, as in flows=64,frames=1000000,size=18..1400,ipv6
    #[arg(long, value_name = "SPEC", conflicts_with = "files")]
    pub(crate) synthetic: Option<SyntheticSpec>,

    /// Receive queues that the frames are dealt out to, by hash; 128 at most
    #[arg(long, value_name = "N", default_value = "1")]
    pub(crate) queues: NonZeroU16,

    #[command(flatten)]
    pub(crate) engine: EngineOptions,

    /// How often all captures are gone through
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "synthetic")]
    pub(crate) loops: u64,

    /// Packets a second (with k or M), max, or capture for the capture's own times
    #[arg(long, value_name = "PPS|max|capture", default_value = "max")]
    pub(crate) rate: RateArg,

    /// Nanoseconds that the application spends on each packet; 1000000 at most
    #[arg(long, value_name = "NS", default_value_t = 0,
          value_parser = clap::value_parser!(u64).range(..=WORK_NS_MAX))]
    pub(crate) work: u64,

    /// What a full backlog does [default: wait at --rate max, else drop]
    #[arg(long, value_enum)]
    pub(crate) when_full: Option<WhenFullArg>,

    /// Change a knob before a frame, as in 10000:rps_cpus=3; repeatable
    #[arg(long, value_name = "FRAME:KNOB=VALUE")]
    pub(crate) at: Vec<ScriptedText>,

    /// More of these, one on each line of a file; what follows a # is a remark
    #[arg(long, value_name = "FILE")]
    pub(crate) script: Option<PathBuf>,

    /// Seed of all random draws: keys, interleavings, traffic [default: 1 with --deterministic or
    /// --synthetic, else drawn]
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<u64>,

    /// Run on one thread in virtual time, in an order that the seed determines
    #[arg(long, conflicts_with_all = ["control", "name", "mount", "metrics"])]
    pub(crate) deterministic: bool,

    /// Initial value of all head and tail counters
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) start_counters: u32,

    /// Write delivered packets to DIR/cpuN.pcap, one capture for each CPU
    #[arg(long, value_name = "DIR")]
    pub(crate) write_pcap: Option<PathBuf>,

    /// Write merged packets as the frames they were merged from; lro keeps only the
    /// newest acknowledgement, window, timestamps and id
    #[arg(long, requires = "write_pcap")]
    pub(crate) resegment: bool,

    #[command(flatten)]
    pub(crate) rotate: RotateOptions,

    /// Draw the run: shares of the CPUs, waits, moves and delays, as SVG files in DIR
    #[arg(long, value_name = "DIR")]
    pub(crate) plot: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) trace: TraceOptions,

    #[command(flatten)]
    pub(crate) control: ControlOptions,

    #[command(flatten)]
    pub(crate) metrics: MetricsOptions,

    #[command(flatten)]
    pub(crate) log: LogOptions,

    /// Watch a flow, and say at the end where it was and why; repeatable
    #[arg(long, value_name = "FLOW")]
    pub(crate) explain: Vec<FlowName>,

    /// Print one JSON document and nothing else on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct AdviseArgs {
    /// A capture of this traffic, to say how it loads the CPUs, and if rps_balance=load would help
    pub(crate) file: Option<PathBuf>,

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

    #[command(flatten)]
    pub(crate) hash: HashOptions,

    /// Where sysfs is: a copy of another machine's will do
    #[arg(long, value_name = "DIR", default_value = forebay_sys::topology::SYSFS)]
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

/// Action on a full backlog.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum WhenFullArg {
    /// The source waits
    Wait,
    /// Packets are dropped
    Drop,
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
    fn rates_have_suffixes_not_zero() {
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

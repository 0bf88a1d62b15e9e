//! `forebay compare`: our programs beside those installed on this machine, in turn, in one run.
//!
//! | kind | compared |
//! |---|---|
//! | `receive` | packets a second from a flood: UDP sockets, AF_PACKET, AF_XDP |
//! | `latency` | a request and its answer, at light load and back to back |
//! | `tcp` | requests and answers over TCP, with RPS off, RPS and RFS |
//! | `tcp-bulk` | streams over TCP, with segments and with packets of 64 KiB |
//! | `tcp-loss` | streams over TCP through a bridge that impairs frames |
//! | `bridge` | a ping through two interfaces and back |
//! | `cpu` | stages in memory, beside DPDK's |
//!
//! Peers are small C sources (`bench/peers/`), compiled when they are needed.

pub(crate) mod own; // our side: programs that the comparison starts

mod receive; //  a flood received
mod latency; //  requests and answers over UDP
mod tcp; //      requests and answers over TCP
mod tcp_bulk; // bulk streams
mod tcp_loss; // bulk streams through an impaired bridge
mod bridge; //   pings through a bridge
mod cpu; //      stages in memory, beside DPDK
mod streams; //  bulk streams over TCP
mod segments; // a capture of TCP segments
mod subject; //  a program to be measured, and the figures of one turn
mod turns; //    rounds in which subjects take turns
mod child; //    a started program: ready, result, end
mod network; //  namespaces and links between them
mod peers; //    sources of the peers, and their compilation
mod machine; //  facts about this machine
mod report; //   medians, spreads, ratios; JSON
mod text; //     the report as tables
mod chart; //    the report as a drawing

use std::fmt::Display;
use std::num::NonZeroU16;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::{Args, ValueEnum};
use forebay_rx::CpuId;
use forebay_sys as sys;
use machine::MachineFacts;
use peers::Peers;
use report::CompareReport;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use subject::Subject;

use crate::bench::pair::{self, CpuPair};
use crate::failure::Failure;
use crate::signals::on_first_signal;
use crate::{output, result_file};

#[derive(Debug, Args)]
#[command(after_help = NOTES)]
pub(crate) struct CompareArgs {
    /// What is compared
    #[arg(value_enum, default_value_t)]
    what: CompareKind,

    /// Rounds: in each, every program has one turn
    #[arg(long, value_name = "N", default_value = "7")]
    rounds: NonZeroU16,

    /// Milliseconds that each turn measures, after the warm-up
    #[arg(long, value_name = "MS", default_value_t = 400,
          value_parser = clap::value_parser!(u32).range(10..=60_000))]
    window: u32,

    /// Milliseconds of each turn before it measures
    #[arg(long, value_name = "MS", default_value_t = 200,
          value_parser = clap::value_parser!(u32).range(..=60_000))]
    warm_up: u32,

    /// Flows of a flood
    #[arg(long, value_name = "N", default_value_t = 256,
          value_parser = clap::value_parser!(u16).range(1..=4096))]
    flows: u16,

    /// receive: flow of rank r has 1/r of the first one's packets, rather than all the same
    #[arg(long)]
    skew: bool,

    /// Compare only programs whose `group: name`, as in the report, contains this
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,

    /// Write a drawing of the medians
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,

    /// Print one JSON document and nothing else on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

const NOTES: &str = "\
All but cpu make network namespaces of their own, which needs root, ip and ethtool; traffic stays in
them. While a turn with RFS lasts, net.core.rps_sock_flow_entries is set for the whole machine.";

/// True once a signal has asked the comparison to end.
static IS_INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Kind of comparison, or all.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum)]
enum CompareKind {
    /// A flood received
    Receive,
    /// Requests answered
    Latency,
    /// Requests answered over TCP
    Tcp,
    /// Streams over TCP
    TcpBulk,
    /// Streams over TCP through a bad path
    TcpLoss,
    /// Pings through a bridge
    Bridge,
    /// Stages in memory, beside DPDK
    Cpu,
    /// All of them
    #[default]
    All,
}

impl CompareKind {
    /// Name on the command line.
    fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// CPUs of a comparison.
#[derive(Clone, Copy, Debug)]
struct CompareCpus {
    /// CPU of a sender or client.
    sender: CpuId,
    /// CPU of a receiver or server.
    receiver: CpuId,
}

impl CompareCpus {
    /// Of two allowed CPUs, an engine on both polls on the first, which the sender must leave free.
    fn of(allowed: &[CpuId]) -> Result<Self, Failure> {
        let CpuPair { producer, consumer } = pair::two_of(allowed)?;
        Ok(Self { sender: consumer, receiver: producer })
    }

    /// The same CPUs in the roles that they have in `forebay bench`.
    fn of_bench(self) -> CpuPair {
        CpuPair { producer: self.receiver, consumer: self.sender }
    }
}

/// Settings that all kinds share.
struct CompareSetting {
    cpus: CompareCpus,
    window: Duration,
    warm_up: Duration,
    flows: u16,
    is_skewed: bool,
    peers: Peers,
}

/// Measures and prints.
pub(crate) fn run(args: &CompareArgs) -> Result<(), Failure> {
    let kinds = match args.what {
        CompareKind::All => {
            use CompareKind::{Bridge, Cpu, Latency, Receive, Tcp, TcpBulk, TcpLoss};
            vec![Receive, Latency, Tcp, TcpBulk, TcpLoss, Bridge, Cpu]
        }
        one => vec![one],
    };
    let setting = setting(args)?;
    if let Some(path) = &args.svg {
        // Before all measurements, which take minutes.
        written(path, result_file::check(path))?;
    }
    let ends = [SIGINT, SIGTERM, SIGHUP].into_iter();
    on_first_signal(ends, || IS_INTERRUPTED.store(true, Ordering::Relaxed))?;
    network::remove_left();
    let distance = &|| pair::distance(setting.cpus.of_bench());
    let rounds =
        turns::RoundPlan { count: args.rounds.get(), distance, is_interrupted: &IS_INTERRUPTED };
    let mut report = CompareReport::new(MachineFacts::read(), args.rounds.get(), setting.window);
    let is_only = kinds.len() == 1;
    for kind in kinds {
        let mut subjects = match subjects(kind, &setting) {
            Ok(subjects) => subjects,
            Err(problem) if is_only => return Err(unprepared(problem)),
            Err(problem) => {
                // The other kinds may need nothing that is missing here.
                report.unprepared.insert(kind.name(), problem);
                continue;
            }
        };
        if let Some(text) = &args.only {
            let is_meant = |subject: &Subject<'_>| {
                format!("{}: {}", subject.group.name, subject.name).contains(text.as_str())
            };
            subjects.retain(is_meant);
        }
        let taken = turns::take(&subjects, &rounds);
        report.add(&subjects, &taken);
    }
    report.is_interrupted = IS_INTERRUPTED.load(Ordering::Relaxed);
    if let (Some(text), []) = (&args.only, report.comparisons.as_slice()) {
        let problem = format!("--only {text}: no program has that name");
        return Err(Failure::usage(problem, "give part of a `group: name` that a report prints"));
    }
    let printed = output::print(&if args.json {
        serde_json::to_string_pretty(&report).unwrap_or_default() + "\n"
    } else {
        text::render(&report)
    });
    let drawn = args.svg.as_ref().map_or(Ok(()), |path| write_chart(&report, path));
    printed.and(drawn)
}

fn setting(args: &CompareArgs) -> Result<CompareSetting, Failure> {
    let needs_root = args.what != CompareKind::Cpu;
    if needs_root && !sys::user().is_root() {
        let problem = "compare makes network namespaces, which needs root";
        return Err(Failure::usage(problem, "run it as root, or compare cpu"));
    }
    for tool in ["ip", "ethtool"].into_iter().filter(|_| needs_root) {
        if !peers::is_installed(tool) {
            let problem = format!("{tool} is not installed");
            return Err(Failure::usage(problem, "install iproute2 and ethtool"));
        }
    }
    let cpus = CompareCpus::of(&sys::allowed_cpus())?;
    let peers = Peers::new().map_err(|problem| {
        Failure::usage(problem, "check that TMPDIR can be written and has free space")
    })?;
    Ok(CompareSetting {
        cpus,
        window: Duration::from_millis(args.window.into()),
        warm_up: Duration::from_millis(args.warm_up.into()),
        flows: args.flows,
        is_skewed: args.skew,
        peers,
    })
}

fn subjects(kind: CompareKind, setting: &CompareSetting) -> Result<Vec<Subject<'_>>, String> {
    match kind {
        CompareKind::Receive => receive::subjects(setting),
        CompareKind::Latency => latency::subjects(setting),
        CompareKind::Tcp => tcp::subjects(setting),
        CompareKind::TcpBulk => tcp_bulk::subjects(setting),
        CompareKind::TcpLoss => tcp_loss::subjects(setting),
        CompareKind::Bridge => bridge::subjects(setting),
        CompareKind::Cpu | CompareKind::All => Ok(cpu::subjects(setting)),
    }
}

fn unprepared(problem: String) -> Failure {
    Failure::usage(
        problem,
        "check that the kernel has network namespaces and veth, and that ip works",
    )
}

fn write_chart(report: &CompareReport, path: &Path) -> Result<(), Failure> {
    written(path, chart::draw(report).and_then(|svg| Ok(result_file::write(path, svg.as_bytes())?)))
}

fn written<E: Display>(path: &Path, result: Result<(), E>) -> Result<(), Failure> {
    result.map_err(|problem| {
        let problem = format!("--svg {}: {problem}", path.display());
        Failure::usage(problem, "give a file that can be written")
    })
}

//! `bench udp`: a flood of small datagrams to one socket, with each buffer policy in turn.
//!
//! Producers stand for the receiving CPUs: each allocates frames, fills and parses them, and puts
//! them into the socket's queue. One reader takes them out, reads each payload, works, and returns
//! the memory. The reader has a CPU of its own; the producers share the others.
//!
//! Policies are compared within a round, in which each policy is measured once; figures are medians
//! over the rounds. The *knee* of a policy is its throughput with unlimited offered load.

mod flood; // the producers and the reader

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use forebay_rx::CpuId;
use forebay_stack::socket::reclaim::ReclaimPolicy;
use serde_json::{Value, json};

use self::flood::{Flood, FloodLoad, FloodOutcome, Work};
use super::figures::{Figures, RoundSpread};
use super::input::{self, Sample};
use super::{BenchArgs, pair};
use crate::failure::Failure;

/// Upper bound on rounds.
const ROUNDS: u32 = 7;

/// Offered rates, in multiples of the knee.
const RATES: [f64; 4] = [0.5, 1.0, 2.0, 4.0];

pub(super) fn run(args: &BenchArgs, cpus: &[CpuId]) -> Result<Figures, Failure> {
    pair::two_of(cpus)?;
    let bench = UdpBench {
        args,
        samples: input::packets(args.file.as_deref())?,
        end: Instant::now() + Duration::from_secs(args.secs),
    };
    let (slow, fast) = (Work::of_ns(args.work_ns), Work::of_ns(0));
    let (mut runs, mut away, mut main) = (Vec::new(), 0, RoundSpread::default());
    for &producers in &args.producers {
        let mut flood = Flood::new(producers, args.rcvbuf, args.bulk as usize, cpus)?;
        for (reader, work) in [("slow", slow), ("fast", fast)] {
            let rounds =
                bench.rounds(&mut flood, |policy| FloodLoad { policy, work, offered_pps: None });
            if runs.is_empty() {
                main = rounds.spread(ReclaimPolicy::Owner, |outcome| outcome.kpps);
            }
            runs.push(rounds.described(producers, reader));
        }
        away += flood.away();
    }
    let producers = args.producers.first().copied().unwrap_or(1);
    let mut flood = Flood::new(producers, args.rcvbuf, args.bulk as usize, cpus)?;
    let rates = bench.rates(&mut flood, slow);
    away += flood.away();
    Ok(Figures::new("udp", "Kpps", main)
        .with("input", input::name(args.file.as_deref()))
        .with("bulk", args.bulk)
        .with("work_ns", args.work_ns)
        .with("rcvbuf", args.rcvbuf)
        .with("cpus", cpus.len())
        .with("runs", runs)
        .with("rates", rates)
        .with("frames_away", away))
}

struct UdpBench<'a> {
    args: &'a BenchArgs,
    samples: Vec<Sample>,
    /// Time after which no round begins.
    end: Instant,
}

impl UdpBench<'_> {
    /// Measures each policy once per round, with the load that `load` returns.
    fn rounds(&self, flood: &mut Flood, load: impl Fn(ReclaimPolicy) -> FloodLoad) -> UdpRounds {
        let mut rounds = UdpRounds::default();
        // The first round warms up.
        for round in 0..=self.args.reps.min(ROUNDS) {
            let outcomes =
                ReclaimPolicy::ALL.map(|policy| flood.repeat(load(policy), &self.samples));
            if round > 0 || self.is_late() {
                rounds.0.push(outcomes);
            }
            if self.is_late() {
                break;
            }
        }
        rounds
    }

    fn is_late(&self) -> bool {
        Instant::now() > self.end
    }

    /// Throughput of each policy at multiples of its knee.
    fn rates(&self, flood: &mut Flood, work: Work) -> Value {
        let most = self.rounds(flood, |policy| FloodLoad { policy, work, offered_pps: None });
        let knees =
            ReclaimPolicy::ALL.map(|policy| most.spread(policy, |outcome| outcome.kpps).median());
        let at = |flood: &mut Flood, rate: f64| {
            self.rounds(flood, |policy| {
                let offered_pps = Some(knees[policy.index()] * 1e3 * rate);
                FloodLoad { policy, work, offered_pps }
            })
        };
        let by_rate: Vec<_> = RATES.into_iter().map(|rate| (rate, at(flood, rate))).collect();
        let of_policy = |policy: ReclaimPolicy| {
            let rates = by_rate.iter().map(|(rate, rounds)| {
                json!({
                    "rate": rate,
                    "offered_kpps": rounds.spread(policy, |outcome| outcome.offered_kpps),
                    "kpps": rounds.spread(policy, |outcome| outcome.kpps),
                })
            });
            let rates: Vec<_> = rates.collect();
            json!({ "knee_kpps": knees[policy.index()], "rates": rates })
        };
        ReclaimPolicy::ALL.into_iter().map(|policy| (policy.name(), of_policy(policy))).collect()
    }
}

/// Outcomes of the rounds, by [`ReclaimPolicy::index`].
#[derive(Default)]
struct UdpRounds(Vec<[FloodOutcome; ReclaimPolicy::ALL.len()]>);

impl UdpRounds {
    fn spread(&self, policy: ReclaimPolicy, figure: impl Fn(&FloodOutcome) -> f64) -> RoundSpread {
        let figures = self.0.iter().map(|round| figure(&round[policy.index()]));
        RoundSpread::of(&figures.collect::<Vec<_>>())
    }

    /// Ratio of a figure between two policies, round by round.
    fn ratio(
        &self,
        policy: ReclaimPolicy,
        to: ReclaimPolicy,
        figure: impl Fn(&FloodOutcome) -> f64,
    ) -> RoundSpread {
        let ratio = |round: &[FloodOutcome; ReclaimPolicy::ALL.len()]| {
            figure(&round[policy.index()]) / figure(&round[to.index()])
        };
        // A ratio with a zero is not finite: another process had the CPU for the whole repeat.
        let ratios = self.0.iter().map(ratio).filter(|ratio| ratio.is_finite());
        RoundSpread::of(&ratios.collect::<Vec<_>>())
    }

    fn described(&self, producers: u8, reader: &str) -> Value {
        use ReclaimPolicy::{CopyCache, None, Owner};
        let policies: BTreeMap<_, _> = ReclaimPolicy::ALL
            .into_iter()
            .map(|policy| {
                let spread = |figure: fn(&FloodOutcome) -> f64| self.spread(policy, figure);
                let described = json!({
                    "kpps": spread(|outcome| outcome.kpps),
                    "offered_kpps": spread(|outcome| outcome.offered_kpps),
                    "reader_ns": spread(|outcome| outcome.reader_ns),
                    "producer_ns": spread(|outcome| outcome.producer_ns),
                    "reader_cpu_s": spread(|outcome| outcome.reader_cpu_s),
                    "producers_cpu_s": spread(|outcome| outcome.producers_cpu_s),
                    "dropped": spread(|outcome| super::solo::as_f64(outcome.dropped)),
                });
                (policy.name(), described)
            })
            .collect();
        json!({
            "producers": producers,
            "reader": reader,
            "policies": policies,
            "owner_to_none": self.ratio(Owner, None, |outcome| outcome.kpps),
            "owner_to_copy_cache": self.ratio(Owner, CopyCache, |outcome| outcome.kpps),
            // The same by CPU time, which other processes on these CPUs influence less.
            "owner_to_none_by_reader_cpu": self.ratio(None, Owner, |outcome| outcome.reader_ns),
            "owner_to_copy_cache_by_reader_cpu":
                self.ratio(CopyCache, Owner, |outcome| outcome.reader_ns),
        })
    }
}

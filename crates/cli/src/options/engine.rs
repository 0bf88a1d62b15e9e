//! Options of the path.

use std::sync::Arc;

use clap::{Args, ValueEnum};
use forebay_engine::Config;
use forebay_engine::knobs::{ChangeText, Machine, Script, ScriptedText};
use forebay_rx::parse::Verify;
use forebay_rx::steer::{MoveAfter, RPS_FLOW_CNT, SpreadPolicy};
use forebay_sys::cpu_list::CpuList;
use tracing::warn;

use super::{CoalesceOptions, CpuOptions, HashOptions};
use crate::failure::Failure;
use crate::script::PlacedChange;

/// Upper bound on the slots of a flow table at the start. The knob takes 2^30, but every slot takes
/// twelve bytes per queue, and this is far more than the flows that the order check can tell apart.
const RPS_FLOW_CNT_AT_START_MAX: i64 = 1 << 22;

/// Options of an engine.
#[derive(Debug, Args)]
pub(crate) struct EngineOptions {
    #[command(flatten)]
    pub(crate) cpus: CpuOptions,

    #[command(flatten)]
    pub(crate) hash: HashOptions,

    /// When packets leave the CPU that polls [default: busy]
    #[arg(long, value_enum)]
    pub(crate) spread: Option<SpreadArg>,

    #[command(flatten)]
    pub(crate) coalesce: CoalesceOptions,

    /// Set a knob before the first frame, as in netdev_max_backlog=300; repeatable
    #[arg(long, value_name = "KNOB=VALUE")]
    pub(crate) set: Vec<ChangeText>,

    /// Slots of each queue's flow table, rounded up to a power of two; 4194304 at most, for they
    /// take memory whether or not there are as many flows [default: 4096]
    #[arg(long, value_name = "N",
          value_parser = clap::value_parser!(u32).range(..=RPS_FLOW_CNT_AT_START_MAX))]
    pub(crate) rps_flow_cnt: Option<u32>,

    /// Packets that follow their flow to a CPU it should leave before a held move begins
    #[arg(long, value_name = "PACKETS")]
    pub(crate) move_after: Option<u32>,

    /// Leave checksums unverified
    #[arg(long)]
    pub(crate) no_checksums: bool,
}

/// Condition on which packets leave the polling CPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum SpreadArg {
    /// When it is busy
    Busy,
    /// Always, as in the kernel
    Always,
}

/// The CPUs of an engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Cpus {
    /// CPUs of this machine.
    Real,
    /// Virtual CPUs, in virtual time.
    Virtual,
}

impl EngineOptions {
    /// Configuration of the engine, with `changes` added to its script. `key` draws a key for the
    /// hash if none is given.
    pub(crate) fn config(
        &self,
        kind: Cpus,
        key: impl FnOnce() -> [u8; 16],
        changes: Vec<PlacedChange>,
    ) -> Result<Config, Failure> {
        let cpus = self.cpus.cpus(kind != Cpus::Virtual)?;
        let mut config = Config::new(cpus, Arc::new(self.hash.hasher(key)?));
        let rps_cpus = self.cpus.rps_cpus(&config.cpus)?;
        config.rps_cpus = match kind {
            Cpus::Real => rps_cpus,
            // They have no caches, and a seeded run must not depend on the machine.
            Cpus::Virtual => rps_cpus.or(config.rps_cpus),
        };
        config.script = self.script(changes, kind, &config.cpus)?;
        config.coalesce = self.coalesce.coalesce();
        if self.no_checksums && config.coalesces(|coalesce| coalesce.is_on) {
            warn!(
                "--no-checksums: what nobody has verified is not merged, so nothing will \
                 be"
            );
        }
        config.rps_flow_cnt = self.rps_flow_cnt.unwrap_or(RPS_FLOW_CNT);
        config.verify = if self.no_checksums { Verify::Nothing } else { Verify::Checksums };
        config.spread = match self.spread {
            Some(SpreadArg::Busy) | None => SpreadPolicy::WhenBusy,
            Some(SpreadArg::Always) => SpreadPolicy::Always,
        };
        if let Some(packets) = self.move_after {
            config.move_after = MoveAfter { packets, ..MoveAfter::default() };
        }
        Ok(config)
    }

    fn script(
        &self,
        changes: Vec<PlacedChange>,
        kind: Cpus,
        cpus: &CpuList,
    ) -> Result<Script, Failure> {
        let machine = match kind {
            Cpus::Real => Machine::with(cpus),
            Cpus::Virtual => Machine::of(cpus),
        };
        let set = self.set.iter().map(|change| ScriptedText { frame: 0, change: change.clone() });
        let read = set.map(PlacedChange::from).chain(changes);
        let read = read.map(|change| change.on(&machine, cpus)).collect::<Result<_, _>>()?;
        Ok(Script::new(read))
    }

    /// Knobs that these options set, which override the config file: names, and paths of those that
    /// are set for one queue or CPU and leave the others to the file. `name_of` is
    /// [`name_of`](forebay_control::Control::name_of).
    pub(crate) fn given(&self, name_of: impl Fn(&ChangeText) -> String) -> Vec<String> {
        let options = [
            ("rps_cpus", self.cpus.rps.is_some()),
            ("rps_flow_cnt", self.rps_flow_cnt.is_some()),
            ("rps_spread", self.spread.is_some()),
            ("hash_key", self.hash.hash_key.is_some()),
            ("flow_key", self.hash.flow_key.is_some()),
        ];
        let options = options.into_iter().chain(self.coalesce.given());
        let options = options.filter(|(_, is_given)| *is_given).map(|(knob, _)| knob.to_owned());
        // With the CPUs that run, the state of each is given.
        let online = self.set.iter().find(|change| change.knob() == "cpus");
        let online = online.map(|_| "online".to_owned());
        options.chain(self.set.iter().map(name_of)).chain(online).collect()
    }
}

//! List of all knobs, with their meanings.

use std::fmt;
use std::path::Path;

use forebay_engine::knobs::knob::Knob;
use forebay_engine::knobs::{BalanceChange, CoalesceChange, SpreadChange};
use forebay_rx::coalesce::LRO_DESCRIPTORS;
use forebay_rx::flow_key::FlowKeyRules;
use forebay_rx::steer::{BalanceConfig, SpreadConfig};
use forebay_sys::topology::{SYSFS, Topology};

use super::handle::Control;
use super::tree::File;

/// A knob, as in the answer to `list`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ListedKnob {
    /// Path of the knob's file.
    pub path: String,
    /// Current value.
    pub value: String,
    /// Value as written. It differs from `value` only for `rps_cpus`, of which only the CPUs that run are in force.
    pub requested: String,
    /// Default value; empty if it is random or unknown.
    pub default: String,
    /// Meaning of the value.
    pub meaning: String,
}

/// All knobs.
#[must_use]
pub fn list(control: &Control) -> Vec<ListedKnob> {
    let value = |text: String| text.trim_end().to_owned();
    let tree = control.tree();
    let mut defaults = Defaults { control, rps_cpus: None };
    let listed = tree.files().filter(|(_, file)| file.is_listed()).map(|(path, file)| {
        let name = path.rsplit_once('/').map_or(path.as_str(), |(_, name)| name);
        let now = control.read_file(file).map(value).unwrap_or_default();
        let is_in_part = matches!(file, File::Knob(Knob::RpsCpus, _));
        let requested = is_in_part.then(|| control.requested(file).map(value).unwrap_or_default());
        ListedKnob {
            requested: requested.unwrap_or_else(|| now.clone()),
            value: now,
            default: defaults.of(name).unwrap_or_default(),
            meaning: meaning(file).to_owned(),
            path,
        }
    });
    listed.collect()
}

impl ListedKnob {
    /// Reads a line of the answer to `list`.
    #[must_use]
    pub fn from_line(line: &str) -> Option<Self> {
        let mut fields = line.split('\t').map(str::to_owned);
        let mut next = || fields.next();
        let (path, value, default, meaning) = (next()?, next()?, next()?, next()?);
        let requested = next().unwrap_or_else(|| value.clone());
        Some(Self { path, value, requested, default, meaning })
    }
}

impl fmt::Display for ListedKnob {
    /// Writes the fields with tabs between them; what was requested comes last, and only if it is not wholly in force.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, value, requested, default, meaning } = self;
        write!(f, "{path}\t{value}\t{default}\t{meaning}")?;
        if requested == value { Ok(()) } else { write!(f, "\t{requested}") }
    }
}

/// Default values of knobs.
struct Defaults<'a> {
    control: &'a Control,
    /// Default `rps_cpus` of every queue, once it is known: it takes reading the machine's topology.
    rps_cpus: Option<String>,
}

impl Defaults<'_> {
    fn of(&mut self, name: &str) -> Option<String> {
        let control = self.control;
        if name != "rps_cpus" {
            return fixed_default(control, name);
        }
        let near = || {
            let (cpus, queues) = (control.state().cpus(), control.settings().queues.len());
            let near = Topology::read(Path::new(SYSFS), cpus).near_polling(queues, cpus);
            near.to_mask(control.machine().cpus)
        };
        Some(self.rps_cpus.get_or_insert_with(near).clone())
    }
}

/// Default value of a knob that takes no look at the machine.
fn fixed_default(control: &Control, name: &str) -> Option<String> {
    let cpus = control.state().cpus();
    Some(match name {
        "cpus" => cpus.to_string(),
        "online" => "1".to_owned(),
        "coalesce" => "off".to_owned(),
        "coalesce_at" => "arrive".to_owned(),
        "lro_descriptors" => LRO_DESCRIPTORS.to_string(),
        "flow_key" => FlowKeyRules::default().to_string(),
        _ if let Some(current) = BalanceChange::current(name, BalanceConfig::default()) => {
            current.value()
        }
        _ if let Some(current) = SpreadChange::current(name, SpreadConfig::default()) => {
            current.value()
        }
        _ => {
            let machine = control.machine();
            Knob::named(name)?.default(machine).print(machine).trim_end().to_owned()
        }
    })
}

fn meaning(file: File) -> &'static str {
    match file {
        File::Knob(knob, _) => of_kernel(knob),
        File::Coalesce(name) => named(&CoalesceChange::KNOBS, &COALESCE_MEANINGS, name),
        File::Balance(name) => named(&BalanceChange::KNOBS, &BALANCE_MEANINGS, name),
        File::Spread(name) => named(&SpreadChange::KNOBS, &SPREAD_MEANINGS, name),
        File::RxBufferSize(_) => {
            "bytes of the receive buffers that are posted now; the driver sets it"
        }
        File::CpuOnline(_) => "whether the CPU runs",
        File::Online | File::Cpus => "the CPUs that run",
        File::Possible => "the CPUs that may run",
        File::SoftnetStat => "counters of all CPUs, in the kernel's format",
        File::Counter(..) => "a counter of the CPU",
        File::FlowKey => {
            "what identifies a flow: auto, outer or inner headers, QUIC's connection IDs"
        }
        File::HashKey => "what flows are hashed with, in hexadecimal",
    }
}

/// Meanings of [`CoalesceChange::KNOBS`].
const COALESCE_MEANINGS: [&str; CoalesceChange::KNOBS.len()] = [
    "how segments of a flow are merged: gro, lro or off",
    "where: arrive (before steering) or deliver (on each CPU)",
    "number of flows with held segments, at most",
    of_kernel(Knob::GroFlushTimeout),
    of_kernel(Knob::NapiDeferHardIrqs),
    of_kernel(Knob::Mtu),
];

/// Meanings of [`BalanceChange::KNOBS`].
const BALANCE_MEANINGS: [&str; BalanceChange::KNOBS.len()] = [
    "whether hash ranges go to CPUs by load: load or off",
    "percent of the mean load that the busiest CPU may have",
    "hash ranges that may be assigned anew in a second",
    "microseconds between two measurements of the load",
];

/// Meanings of [`SpreadChange::KNOBS`].
const SPREAD_MEANINGS: [&str; SpreadChange::KNOBS.len()] = [
    "whether a queue gets as many CPUs as its load needs (auto), or all (always)",
    "percent of a CPU's time from which more CPUs are needed",
    "microseconds of a packet's wait from which more CPUs are needed",
    "microseconds between two measurements of the load",
];

fn named(names: &[&'static str], meanings: &'static [&'static str], name: &str) -> &'static str {
    let mut both = names.iter().zip(meanings);
    both.find_map(|(at, meaning)| (*at == name).then_some(*meaning)).unwrap_or_default()
}

const fn of_kernel(knob: Knob) -> &'static str {
    match knob {
        Knob::RpsCpus => "the CPUs that packets of the queue may go to",
        Knob::RpsFlowCnt => "slots of the queue's flow table; 0 turns RFS off for it",
        Knob::GroFlushTimeout => "nanoseconds that packets wait for more after the queue ran empty",
        Knob::NapiDeferHardIrqs => {
            "polls in a row that find nothing, gro_flush_timeout apart, before a CPU is to be woken"
        }
        Knob::Mtu => "bytes of the longest IP packet that the device receives",
        Knob::RpsSockFlowEntries => "entries of the table of where applications run; 0 is no RFS",
        Knob::RpsDefaultMask => "rps_cpus of queues that are made later",
        Knob::FlowLimitCpuBitmap => "the CPUs that limit flows when they poll",
        Knob::FlowLimitTableLen => "buckets of a flow limit that is turned on later",
        Knob::NetdevMaxBacklog => "packets that a backlog takes, less one",
        Knob::NetdevBudget => "packets that a CPU takes in one turn, from all its queues",
        Knob::NetdevBudgetUsecs => "microseconds that such a turn may last",
        Knob::DevWeight => "packets that a CPU takes from one queue in one turn",
        Knob::DevWeightRxBias => "what dev_weight is multiplied with for backlogs",
        Knob::SkbDeferMax => "frames that wait on a CPU to be returned to another; 0 is none",
    }
}

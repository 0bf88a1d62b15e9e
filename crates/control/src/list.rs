//! List of all knobs, with their meanings.

use std::fmt;
use std::path::Path;

use forebay_engine::knobs::BalanceChange;
use forebay_engine::knobs::knob::Knob;
use forebay_rx::coalesce::LRO_DESCRIPTORS;
use forebay_rx::steer::BalanceConfig;
use forebay_sys::topology::{SYSFS, Topology};

use super::handle::Control;
use super::names;
use super::tree::MERGEABLE_RX_BUFFER_SIZE;

/// A knob, as in the answer to `list`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ListedKnob {
    /// Path of the knob's file.
    pub path: String,
    /// Current value.
    pub value: String,
    /// Default value; empty if it is random or unknown.
    pub default: String,
    /// Meaning of the value.
    pub meaning: String,
}

/// All knobs.
#[must_use]
pub fn list(control: &Control) -> Vec<ListedKnob> {
    let value = |text: String| text.trim_end().to_owned();
    let listed = names::listed(control).into_iter().map(|path| {
        let name = path.rsplit_once('/').map_or(path.as_str(), |(_, name)| name);
        ListedKnob {
            value: control.read(&path).map(value).unwrap_or_default(),
            default: default(control, name).unwrap_or_default(),
            meaning: meaning(name).to_owned(),
            path,
        }
    });
    listed.collect()
}

impl ListedKnob {
    /// Reads a line of the answer to `list`.
    #[must_use]
    pub fn from_line(line: &str) -> Option<Self> {
        let mut fields = line.splitn(4, '\t').map(str::to_owned);
        let mut next = || fields.next();
        Some(Self { path: next()?, value: next()?, default: next()?, meaning: next()? })
    }
}

impl fmt::Display for ListedKnob {
    /// Writes the fields with tabs between them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, value, default, meaning } = self;
        write!(f, "{path}\t{value}\t{default}\t{meaning}")
    }
}

fn default(control: &Control, name: &str) -> Option<String> {
    let cpus = control.state().cpus();
    Some(match name {
        "rps_cpus" => {
            let queues = control.settings().queues.len();
            let near = Topology::read(Path::new(SYSFS), cpus).near_polling(queues, cpus);
            near.to_mask(control.machine().cpus)
        }
        "cpus" => cpus.to_string(),
        "online" => "1".to_owned(),
        "coalesce" => "off".to_owned(),
        "coalesce_at" => "arrive".to_owned(),
        "lro_descriptors" => LRO_DESCRIPTORS.to_string(),
        _ if let Some(current) = BalanceChange::current(name, BalanceConfig::default()) => {
            current.value()
        }
        _ => {
            let machine = control.machine();
            Knob::named(name)?.default(machine).print(machine).trim_end().to_owned()
        }
    })
}

fn meaning(name: &str) -> &'static str {
    match name {
        "rps_cpus" => "the CPUs that packets of the queue may go to",
        "rps_flow_cnt" => "slots of the queue's flow table; 0 turns RFS off for it",
        "gro_flush_timeout" => "nanoseconds that packets wait for more after the queue ran empty",
        "napi_defer_hard_irqs" => {
            "polls in a row that find nothing, gro_flush_timeout apart, before a CPU is to be woken"
        }
        "mtu" => "bytes of the longest IP packet that the device receives",
        "rps_sock_flow_entries" => "entries of the table of where applications run; 0 is no RFS",
        "rps_default_mask" => "rps_cpus of queues that are made later",
        "flow_limit_cpu_bitmap" => "the CPUs that limit flows when they poll",
        "flow_limit_table_len" => "buckets of a flow limit that is turned on later",
        "netdev_max_backlog" => "packets that a backlog takes, less one",
        "netdev_budget" => "packets that a CPU takes in one turn, from all its queues",
        "netdev_budget_usecs" => "microseconds that such a turn may last",
        "dev_weight" => "packets that a CPU takes from one queue in one turn",
        "dev_weight_rx_bias" => "what dev_weight is multiplied with for backlogs",
        "skb_defer_max" => "frames that wait on a CPU to be returned to another; 0 is none",
        MERGEABLE_RX_BUFFER_SIZE => {
            "bytes of the receive buffers that are posted now; the driver sets it"
        }
        "online" => "whether the CPU runs",
        "cpus" => "the CPUs that run",
        "coalesce" => "how segments of a flow are merged: gro, lro or off",
        "coalesce_at" => "where: arrive (before steering) or deliver (on each CPU)",
        "lro_descriptors" => "flows of which segments can be held at once",
        "rps_balance" => "whether hash ranges go to CPUs by load: load or off",
        "rps_balance_target" => "percent of the mean load that the busiest CPU may have",
        "rps_balance_rate" => "hash ranges that may be assigned anew in a second",
        "rps_balance_usecs" => "microseconds between two measurements of the load",
        "flow_key" => "what tells a flow: auto, outer or inner headers, QUIC's connection IDs",
        "hash_key" => "what flows are hashed with, in hexadecimal",
        _ => "",
    }
}

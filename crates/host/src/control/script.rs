//! Changes during a run, written down before it: at which frame, which knob, which value.

use std::str::FromStr;

use path::CpuId;
use path::backlog::FlowLimit;

use super::coalesce::CoalesceChange;
use super::cpus::CpuList;
use crate::error::Error;

/// A live change.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Change {
    /// The CPUs that packets may go to.
    RpsCpus(CpuList),
    /// Packets that a backlog takes.
    NetdevMaxBacklog(u32),
    /// The CPUs that limit flows when they poll.
    FlowLimitCpuBitmap(CpuList),
    /// Buckets of a flow limit that is turned on after this.
    FlowLimitTableLen(u32),
    /// How packets are coalesced.
    Coalesce(CoalesceChange),
    /// The CPU stops taking packets from its backlogs.
    Pause(CpuId),
    /// The CPU goes on.
    Resume(CpuId),
}

/// A change and the frame before which it takes effect.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ScriptedChange {
    /// The number of the first frame after it.
    pub frame: u64,
    /// What changes.
    pub change: Change,
}

/// Changes in the order in which they take effect.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Script(Vec<ScriptedChange>);

impl Script {
    /// Puts changes in order; those for the same frame stay as they are given.
    #[must_use]
    pub fn new(mut changes: Vec<ScriptedChange>) -> Self {
        changes.sort_by_key(|change| change.frame);
        Self(changes)
    }

    /// All of them.
    #[must_use]
    pub fn changes(&self) -> &[ScriptedChange] {
        &self.0
    }
}

impl Change {
    /// The knob's name.
    #[must_use]
    pub fn knob(&self) -> &'static str {
        match self {
            Self::RpsCpus(_) => "rps_cpus",
            Self::NetdevMaxBacklog(_) => "netdev_max_backlog",
            Self::FlowLimitCpuBitmap(_) => "flow_limit_cpu_bitmap",
            Self::FlowLimitTableLen(_) => "flow_limit_table_len",
            Self::Coalesce(change) => change.knob(),
            Self::Pause(_) => "pause",
            Self::Resume(_) => "resume",
        }
    }

    /// The value as it is read back, on a machine of `cpus` CPUs.
    #[must_use]
    pub fn value(&self, cpus: u16) -> String {
        match self {
            Self::RpsCpus(list) | Self::FlowLimitCpuBitmap(list) => list.to_mask(cpus),
            Self::NetdevMaxBacklog(number) | Self::FlowLimitTableLen(number) => number.to_string(),
            Self::Coalesce(change) => change.value(),
            Self::Pause(cpu) | Self::Resume(cpu) => cpu.to_string(),
        }
    }
}

impl FromStr for Change {
    type Err = Error;

    /// Reads `knob=value`.
    fn from_str(text: &str) -> Result<Self, Error> {
        let Some((knob, value)) = text.split_once('=') else {
            return Err(refused("a change", text, "it has the form KNOB=VALUE"));
        };
        if let Some(change) = CoalesceChange::parse(knob.trim(), value) {
            return change.map(Self::Coalesce);
        }
        let cpus = |what| {
            let parsed = CpuList::parse_mask_or_list(value);
            parsed.map_err(|error| refused(what, value, &error.to_string()))
        };
        let number = |what| {
            let parsed = value.trim().parse::<u32>();
            parsed.map_err(|_| refused(what, value, "it is a number from 0 to 4294967295"))
        };
        let cpu = |what| {
            let parsed = value.trim().parse::<u16>();
            parsed.map(CpuId).map_err(|_| refused(what, value, "it is the number of a CPU"))
        };
        Ok(match knob.trim() {
            "rps_cpus" => Self::RpsCpus(cpus("rps_cpus")?),
            "netdev_max_backlog" => Self::NetdevMaxBacklog(number("netdev_max_backlog")?),
            "flow_limit_cpu_bitmap" => Self::FlowLimitCpuBitmap(cpus("flow_limit_cpu_bitmap")?),
            "flow_limit_table_len" => {
                let len = number("flow_limit_table_len")?;
                if FlowLimit::new(len).is_none() {
                    return Err(refused("flow_limit_table_len", value, "it is a power of two"));
                }
                Self::FlowLimitTableLen(len)
            }
            "pause" => Self::Pause(cpu("pause")?),
            "resume" => Self::Resume(cpu("resume")?),
            _ => {
                return Err(refused(
                    "a knob",
                    knob,
                    "those that change during a run are rps_cpus, netdev_max_backlog, \
                     flow_limit_cpu_bitmap, flow_limit_table_len, coalesce, coalesce_at, \
                     lro_descriptors, gro_flush_timeout, mtu, pause and resume",
                ));
            }
        })
    }
}

impl FromStr for ScriptedChange {
    type Err = Error;

    /// Reads `frame:knob=value`.
    fn from_str(text: &str) -> Result<Self, Error> {
        let split = text.split_once(':');
        let frame = split.and_then(|(frame, _)| frame.trim().parse().ok());
        let (Some(frame), Some((_, change))) = (frame, split) else {
            return Err(refused(
                "a scripted change",
                text,
                "it has the form FRAME:KNOB=VALUE, as in 10000:rps_cpus=3",
            ));
        };
        Ok(Self { frame, change: change.parse()? })
    }
}

fn refused(what: &'static str, value: &str, why: &str) -> Error {
    Error::Setting { what, value: value.to_owned(), why: why.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scripted(text: &str) -> Result<ScriptedChange, String> {
        text.parse().map_err(|error: Error| error.to_string())
    }

    #[test]
    fn changes_are_read_and_put_in_order() {
        let texts = ["10000:rps_cpus=3", "500:pause=1", "10000:netdev_max_backlog=50"];
        let script = Script::new(texts.map(|text| scripted(text).unwrap()).into());
        let changes = script.changes().iter();
        let knobs: Vec<_> = changes.map(|change| (change.frame, change.change.knob())).collect();
        let ordered = [(500, "pause"), (10000, "rps_cpus"), (10000, "netdev_max_backlog")];
        assert_eq!(knobs, ordered);
    }

    #[test]
    fn what_cannot_be_set_is_refused_with_a_reason() {
        for text in [
            "rps_cpus=3",
            "x:rps_cpus=3",
            "1:rps_cpus",
            "1:rps_cpus=0x3",
            "1:rps_cpu=3",
            "1:netdev_max_backlog=-1",
            "1:flow_limit_table_len=1000",
            "1:coalesce=on",
            "1:coalesce_at=x",
            "1:lro_descriptors=0",
            "1:gro_flush_timeout=1ms",
            "1:mtu=67",
            "1:pause=x",
        ] {
            assert!(scripted(text).unwrap_err().contains("cannot be"), "{text}");
        }
    }
}

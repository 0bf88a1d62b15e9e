//! Knobs that the kernel has, each with its name, place, default and printed form. Answers to
//! writes are in `answer.rs`.

use std::fmt;

use forebay_rx::RxQueue;
use forebay_rx::backlog::NETDEV_MAX_BACKLOG;
use forebay_rx::coalesce::MTU;
use forebay_rx::intake::DEV_WEIGHT;
use forebay_sys::cpu_list::CpuList;

use super::machine::Machine;

/// A knob of the kernel.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Knob {
    /// CPUs that packets of the queue may go to (RPS-7).
    RpsCpus,
    /// Slots of the queue's flow table (RFS-9).
    RpsFlowCnt,
    /// Time that packets are held after the queue ran empty, in nanoseconds.
    GroFlushTimeout,
    /// Number of empty polls in a row before a CPU sleeps on the descriptors of its queues.
    NapiDeferHardIrqs,
    /// Length of the longest IP packet that the device receives, in bytes.
    Mtu,
    /// Slots of the socket-flow table (RFS-9).
    RpsSockFlowEntries,
    /// `rps_cpus` of queues created later.
    RpsDefaultMask,
    /// CPUs that apply the flow limit when they poll.
    FlowLimitCpuBitmap,
    /// Buckets of flow limits that are turned on later.
    FlowLimitTableLen,
    /// Length of a backlog less one, in packets.
    NetdevMaxBacklog,
    /// Maximum number of packets that a CPU takes from all its queues in one turn.
    NetdevBudget,
    /// Maximum duration of a turn, in microseconds.
    NetdevBudgetUsecs,
    /// Maximum number of packets that a CPU takes from one queue in one turn.
    DevWeight,
    /// Factor of `dev_weight` for backlogs.
    DevWeightRxBias,
    /// Maximum number of frames that wait on a CPU to be returned to another.
    SkbDeferMax,
}

/// Directory of a knob in the tree.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KnobPlace {
    /// Once for each receive queue of a device.
    Queue,
    /// Once for each device.
    Device,
    /// Once.
    NetCore,
}

/// Value of a knob.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Value {
    /// Value of a mask.
    Cpus(CpuList),
    /// Value of any other knob.
    Number(u64),
}

impl Knob {
    /// Every knob.
    pub const ALL: [Self; 15] = [
        Self::RpsCpus,
        Self::RpsFlowCnt,
        Self::GroFlushTimeout,
        Self::NapiDeferHardIrqs,
        Self::Mtu,
        Self::RpsSockFlowEntries,
        Self::RpsDefaultMask,
        Self::FlowLimitCpuBitmap,
        Self::FlowLimitTableLen,
        Self::NetdevMaxBacklog,
        Self::NetdevBudget,
        Self::NetdevBudgetUsecs,
        Self::DevWeight,
        Self::DevWeightRxBias,
        Self::SkbDeferMax,
    ];

    /// Knob with this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|knob| knob.name() == name)
    }

    /// Name of the knob and of its file.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::RpsCpus => "rps_cpus",
            Self::RpsFlowCnt => "rps_flow_cnt",
            Self::GroFlushTimeout => "gro_flush_timeout",
            Self::NapiDeferHardIrqs => "napi_defer_hard_irqs",
            Self::Mtu => "mtu",
            Self::RpsSockFlowEntries => "rps_sock_flow_entries",
            Self::RpsDefaultMask => "rps_default_mask",
            Self::FlowLimitCpuBitmap => "flow_limit_cpu_bitmap",
            Self::FlowLimitTableLen => "flow_limit_table_len",
            Self::NetdevMaxBacklog => "netdev_max_backlog",
            Self::NetdevBudget => "netdev_budget",
            Self::NetdevBudgetUsecs => "netdev_budget_usecs",
            Self::DevWeight => "dev_weight",
            Self::DevWeightRxBias => "dev_weight_rx_bias",
            Self::SkbDeferMax => "skb_defer_max",
        }
    }

    /// Directory of the knob's file.
    #[must_use]
    pub fn place(self) -> KnobPlace {
        match self {
            Self::RpsCpus | Self::RpsFlowCnt => KnobPlace::Queue,
            Self::GroFlushTimeout | Self::NapiDeferHardIrqs | Self::Mtu => KnobPlace::Device,
            _ => KnobPlace::NetCore,
        }
    }

    /// Default of Forebay. Masks are empty, since the machine's caches are not known here.
    #[must_use]
    pub fn default(self, machine: &Machine) -> Value {
        Value::Number(match self {
            Self::RpsCpus | Self::RpsDefaultMask | Self::FlowLimitCpuBitmap => {
                return Value::Cpus(CpuList::default());
            }
            // The kernel's defaults are 0, which turns RFS off.
            Self::RpsFlowCnt => 4096,
            Self::RpsSockFlowEntries => 32_768,
            Self::GroFlushTimeout | Self::NapiDeferHardIrqs => 0,
            Self::Mtu => MTU.into(),
            Self::FlowLimitTableLen => 4096,
            Self::NetdevMaxBacklog => NETDEV_MAX_BACKLOG.into(),
            Self::NetdevBudget => 300,
            Self::NetdevBudgetUsecs => machine.netdev_budget_usecs_min().into(),
            Self::DevWeight => u64::try_from(DEV_WEIGHT).unwrap_or(u64::MAX),
            Self::DevWeightRxBias => 1,
            Self::SkbDeferMax => 128,
        })
    }

    /// Description of the values that the knob takes.
    #[must_use]
    pub fn takes(self) -> &'static str {
        match self {
            Self::RpsCpus | Self::RpsDefaultMask | Self::FlowLimitCpuBitmap => {
                "a mask in hexadecimal, as in 3 or ff,00000000, or a list of CPUs, as in 0-3,8"
            }
            Self::RpsFlowCnt => "a number of slots up to 67108864, 0 for none",
            Self::GroFlushTimeout => "a number of nanoseconds",
            Self::Mtu => "a number from 68 to 65535",
            Self::RpsSockFlowEntries => "a number of slots up to 536870912, 0 for none",
            Self::FlowLimitTableLen => "a power of two up to 1073741824",
            Self::NapiDeferHardIrqs | Self::NetdevMaxBacklog | Self::NetdevBudget => {
                "a number from 0 to 2147483647"
            }
            Self::NetdevBudgetUsecs => {
                "a number of microseconds up to 2147483647, and no fewer than two ticks of the \
                 kernel's clock"
            }
            Self::DevWeight | Self::DevWeightRxBias => "a number from 1 to 2147483647",
            Self::SkbDeferMax => "a number from 0 to 2147483647, 0 for off",
        }
    }

    /// True if the value is a set of CPUs.
    #[must_use]
    pub fn is_mask(self) -> bool {
        matches!(self, Self::RpsCpus | Self::RpsDefaultMask | Self::FlowLimitCpuBitmap)
    }
}

impl KnobPlace {
    /// Path of the directory, from the root of the tree.
    #[must_use]
    pub fn directory(self, device: &str, queue: RxQueue) -> String {
        match self {
            Self::Queue => format!("sys/class/net/{device}/queues/{queue}"),
            Self::Device => format!("sys/class/net/{device}"),
            Self::NetCore => "proc/sys/net/core".to_owned(),
        }
    }
}

impl Value {
    /// Text of the value as the kernel prints it, with its newline.
    #[must_use]
    pub fn print(&self, machine: &Machine) -> String {
        match self {
            Self::Cpus(cpus) => cpus.to_mask(machine.cpus) + "\n",
            Self::Number(number) => format!("{number}\n"),
        }
    }
}

impl fmt::Display for Knob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn knobs_are_found_by_name() {
        for knob in Knob::ALL {
            assert_eq!(Knob::named(knob.name()), Some(knob));
        }
        assert_eq!(Knob::named("rps_cpu"), None);
    }

    #[test]
    fn rps_7_knobs_stand_where_kernels_do() {
        let path = |knob: Knob| format!("{}/{knob}", knob.place().directory("eth0", RxQueue(3)));
        assert_eq!(path(Knob::RpsCpus), "sys/class/net/eth0/queues/rx-3/rps_cpus");
        assert_eq!(path(Knob::GroFlushTimeout), "sys/class/net/eth0/gro_flush_timeout");
        assert_eq!(path(Knob::RpsDefaultMask), "proc/sys/net/core/rps_default_mask");
    }

    #[test]
    fn rps_12_values_print_as_in_kernel() {
        let machine = Machine { cpus: 34, jiffy_us: 4000 };
        let cpus = CpuList::parse_list("1-2,33").unwrap();
        assert_eq!(Value::Cpus(cpus).print(&machine), "2,00000006\n");
        assert_eq!(Value::Number(u64::MAX).print(&machine), "18446744073709551615\n");
    }
}

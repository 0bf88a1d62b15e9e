//! Changes as text, as command lines and scripts have them.

use std::fmt;
use std::str::FromStr;

use forebay_rx::{CpuId, RxQueue};
use forebay_sys::error::Error;
use forebay_sys::refused::Refused;

use super::change::{Change, Queues, refused};
use super::knob::{Knob, KnobPlace};
use super::machine::Machine;

/// A change as `knob=value`, or `rx-N/knob=value` for one queue. The knob is known, and the value not yet
/// read: which CPUs a mask may name depends on the machine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ChangeText {
    queues: Queues,
    knob: &'static str,
    value: String,
}

impl ChangeText {
    /// Name of the knob.
    #[must_use]
    pub fn knob(&self) -> &'static str {
        self.knob
    }

    /// Queue, numbered through all devices, if the change is of one.
    #[must_use]
    pub fn queue(&self) -> Option<RxQueue> {
        match self.queues {
            Queues::All => None,
            Queues::One(queue) => Some(queue),
        }
    }

    /// CPU, if the change is of one CPU's state: running or not.
    #[must_use]
    pub fn cpu(&self) -> Option<CpuId> {
        let (cpu, _) = self.value.split_once(':').filter(|_| self.knob == "online")?;
        cpu.trim().parse().ok().map(CpuId)
    }

    /// The change that this makes on a machine. A value is read as `echo VALUE > FILE` writes it, and so
    /// as `forebay set KNOB=VALUE` reads it.
    ///
    /// # Errors
    /// If the knob does not take the value: for knobs of the kernel with the kernel's errno.
    pub fn on(&self, machine: &Machine) -> Result<Change, Error> {
        let Self { queues, knob, value } = self;
        let Some(of_kernel) = Knob::named(knob) else { return Change::of_own(knob, value) };
        let line = format!("{value}\n");
        let written = of_kernel.write(*queues, line.as_bytes(), machine);
        let told = |Refused { errno, why }| refused(knob, value, &format!("{why} ({errno})"));
        let takes = || refused(knob, value, of_kernel.takes());
        written.map_err(told)?.change.ok_or_else(takes)
    }
}

impl FromStr for ChangeText {
    type Err = Error;

    /// Reads the name; carriage returns and newlines at the end are not part of the value.
    fn from_str(text: &str) -> Result<Self, Error> {
        let Some((name, value)) = text.split_once('=') else {
            return Err(refused("a change", text, "it has the form KNOB=VALUE"));
        };
        let (queues, name) = match name.trim().split_once('/') {
            Some((queue, name)) => (Queues::One(parse_queue(queue)?), name),
            None => (Queues::All, name.trim()),
        };
        let known = Change::known();
        let Some(knob) = known.iter().copied().find(|known| *known == name) else {
            let known = known.join(", ");
            let why = format!("those that change during a run are {known}");
            return Err(refused("a knob", name, &why));
        };
        let is_of_queues = Knob::named(knob).is_some_and(|it| it.place() == KnobPlace::Queue);
        if queues != Queues::All && !is_of_queues {
            return Err(refused(knob, value, "it is not about one queue"));
        }
        let value = value.trim_end_matches(['\r', '\n']).to_owned();
        Ok(Self { queues, knob, value })
    }
}

impl FromStr for Change {
    type Err = Error;

    /// Reads `knob=value`, or `rx-N/knob=value` for one queue, as on the
    /// [largest machine](Machine::largest).
    fn from_str(text: &str) -> Result<Self, Error> {
        text.parse::<ChangeText>()?.on(&Machine::largest())
    }
}

impl fmt::Display for ChangeText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Queues::One(queue) = self.queues {
            write!(f, "{queue}/")?;
        }
        write!(f, "{}={}", self.knob, self.value)
    }
}

fn parse_queue(text: &str) -> Result<RxQueue, Error> {
    let number = text.trim().strip_prefix("rx-").and_then(|number| number.parse().ok());
    number.map(RxQueue).ok_or_else(|| refused("a queue", text, "it has the form rx-N"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(text: &str) -> Result<Change, String> {
        text.parse().map_err(|error: Error| error.to_string())
    }

    #[test]
    fn knobs_read_and_write_back() {
        for text in [
            "rps_cpus=3",
            "rx-1/rps_cpus=2",
            "rps_default_mask=1",
            "rps_flow_cnt=4096",
            "rx-0/rps_flow_cnt=0",
            "rps_sock_flow_entries=32768",
            "rfs_desired=0badcafe:1",
            "hash_key=00112233445566778899aabbccddeeff",
            "flow_key=inner,quic:443,8443-8449:8",
            "cpus=0-1",
            "online=1:0",
            "netdev_max_backlog=50",
            "netdev_budget=300",
            "netdev_budget_usecs=20000",
            "dev_weight=64",
            "dev_weight_rx_bias=2",
            "skb_defer_max=0",
            "flow_limit_cpu_bitmap=1",
            "flow_limit_table_len=8192",
            "coalesce=gro",
            "rps_balance=load",
            "rps_spread_busy=75",
            "pause=1",
            "resume=1",
            "kill=1",
        ] {
            let change = changed(text).unwrap();
            assert_eq!(format!("{}={}", change.what(), change.value(2)), text);
        }
    }

    #[test]
    fn impossible_setting_has_reason() {
        for text in [
            "rps_cpus",
            "rps_cpus=0x3",
            "rps_cpu=3",
            "rx-/rps_cpus=3",
            "rx-0/netdev_budget=300",
            "rps_flow_cnt=67108865",
            "rps_sock_flow_entries=536870913",
            "rfs_desired=0:1",
            "rfs_desired=5",
            "rfs_desired=xyz:1",
            "hash_key=0",
            "flow_key=all",
            "flow_key=quic:443",
            "cpus=0-",
            "online=1",
            "netdev_max_backlog=-1",
            "netdev_budget=-1",
            "dev_weight=0",
            "flow_limit_table_len=1000",
            "coalesce=on",
            "rps_balance=on",
            "rps_spread=busy",
            "coalesce_at=x",
            "lro_descriptors=0",
            "gro_flush_timeout=1ms",
            "mtu=67",
            "pause=x",
            "kill=",
        ] {
            assert!(changed(text).unwrap_err().contains("cannot be"), "{text}");
        }
    }

    /// Strings of the kernel's: numbers in base 0, signs, bounds and masks.
    #[test]
    fn rfs_10_texts_read_as_the_kernel_does() {
        let machine = Machine { cpus: 2, jiffy_us: 4_000 };
        for (text, told) in [
            ("rps_flow_cnt=010", Ok("8")),
            ("rps_flow_cnt=0x10", Ok("16")),
            ("rps_flow_cnt=+5", Ok("8")),
            ("rps_flow_cnt=08", Err("(EINVAL)")),
            ("rps_flow_cnt= 8", Err("(EINVAL)")),
            ("rps_flow_cnt=67108864", Ok("67108864")),
            ("rps_flow_cnt=67108865", Err("(ENOMEM)")),
            ("rps_flow_cnt=2147483648", Err("(ENOMEM)")),
            ("netdev_max_backlog=010", Ok("8")),
            ("netdev_max_backlog= 8 ", Ok("8")),
            ("netdev_max_backlog=2147483648", Err("(EINVAL)")),
            ("netdev_max_backlog=+5", Err("(EINVAL)")),
            ("netdev_budget_usecs=1", Err("(EINVAL)")),
            ("netdev_budget_usecs=8000", Ok("8000")),
            ("netdev_budget=0", Ok("0")),
            ("mtu=0x5dc\r", Ok("1500")),
            ("gro_flush_timeout=18446744073709551616", Err("(ERANGE)")),
            ("rps_cpus=", Ok("0")),
            ("rps_cpus=3", Ok("3")),
            ("rps_cpus=4", Err("(EOVERFLOW)")),
            ("rps_cpus=ffffffff", Err("(EOVERFLOW)")),
            ("rps_cpus=1,,1", Err("(EOVERFLOW)")),
            ("rps_cpus=1 1", Err("(EOVERFLOW)")),
            ("rx-1/rps_cpus=0-1", Ok("3")),
            ("online=1:n", Ok("1:0")),
        ] {
            let read = text.parse::<ChangeText>().unwrap().on(&machine);
            let read = read.map(|change| change.value(machine.cpus)).map_err(|it| it.to_string());
            match told {
                Ok(value) => assert_eq!(read.as_deref(), Ok(value), "{text}"),
                Err(errno) => assert!(read.unwrap_err().ends_with(errno), "{text}"),
            }
        }
    }

    #[test]
    fn refused_mask_names_highest_cpu() {
        for (text, cpus, highest) in [
            ("rps_cpus=4", 2, 1),
            ("rps_default_mask=0-2", 2, 1),
            ("flow_limit_cpu_bitmap=0,1", 2, 1),
            ("rps_cpus=ffffffffffffffff", 64, 63),
        ] {
            let change = text.parse::<ChangeText>().unwrap();
            let told = change.on(&Machine { cpus, jiffy_us: 4_000 }).unwrap_err().to_string();
            let takes = format!(
                "{} takes CPUs up to {highest}, in groups of at most 8 digits, as a mask",
                change.knob()
            );
            assert!(told.contains(&takes) && told.ends_with("(EOVERFLOW)"), "{told}");
        }
    }
}

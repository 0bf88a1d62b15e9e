//! Answer of a knob that is written to: the value that it reads back, or the kernel's errno. The
//! test `rps_8_knobs_answer_as_the_kernel_answers` compares all answers with the running kernel's.

use forebay_sys::cpu_list::Mask;
use forebay_sys::errno::Errno;
use forebay_sys::number::{PAGE_BYTES, dointvec, kstrtoul};

use super::coalesce::{MTU_MAX, MTU_MIN};
use super::knob::{Knob, KnobPlace, Value};
use super::machine::Machine;

/// The largest `rps_flow_cnt` that the kernel does not answer with `EINVAL`
/// (`store_rps_dev_flow_table_cnt` in net/core/net-sysfs.c). Above
/// [`RPS_FLOW_CNT_MAX`](forebay_rx::steer::RPS_FLOW_CNT_MAX) there is no table of ours: `ENOMEM`,
/// as in the kernel when it has no memory.
pub const KERNEL_RPS_FLOW_CNT_MAX: u64 = 1 << 32;

/// The largest `rps_sock_flow_entries` (`rps_sock_flow_sysctl` in net/core/sysctl_net_core.c).
pub const RPS_SOCK_FLOW_ENTRIES_MAX: u64 = 1 << 29;

/// The largest `napi_defer_hard_irqs` (`change_napi_defer_hard_irqs` in net/core/net-sysfs.c).
const NAPI_DEFER_HARD_IRQS_MAX: u64 = (1 << 31) - 1;

/// Limit of a write to /proc/sys, in bytes: length < limit (`KMALLOC_MAX_SIZE`).
const SYSCTL_WRITE_BYTES: usize = 4 << 20;

/// Outcome of a write.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TakenValue {
    /// Value as it reads back; `None` if the write was empty and the old value stays.
    pub value: Option<Value>,
    /// Number of bytes that were taken. A writer continues with the rest, as with other files.
    pub len_bytes: usize,
}

/// A value that the kernel accepts for a knob although it cannot be meant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KnobRefusal {
    /// The knob.
    pub knob: Knob,
    /// Kind of value.
    pub nonsense: InvalidInput,
    /// Reason for refusing it.
    pub why: &'static str,
}

/// Kinds of values that cannot be meant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InvalidInput {
    /// A number below zero.
    Negative,
    /// A number of more than 32 bits, of which the kernel uses the lower 32.
    Truncated,
    /// A character that no mask has, in front of eight digits.
    Junk,
}

/// Writes that Forebay refuses with `EINVAL` and the kernel accepts. The only other difference is
/// that masks can be given as lists.
pub const REFUSED_INVALID_INPUT: [KnobRefusal; 7] = [
    refusal(
        Knob::NetdevMaxBacklog,
        InvalidInput::Negative,
        "a backlog cannot hold fewer than 0 packets",
    ),
    refusal(Knob::NetdevBudget, InvalidInput::Negative, "a turn cannot take fewer than 0 packets"),
    refusal(
        Knob::FlowLimitTableLen,
        InvalidInput::Negative,
        "-2147483648 would count as a power of two, and no table has that length",
    ),
    refusal(Knob::Mtu, InvalidInput::Truncated, "4294968796 would count as 1500"),
    refusal(Knob::RpsCpus, InvalidInput::Junk, JUNK),
    refusal(Knob::RpsDefaultMask, InvalidInput::Junk, JUNK),
    refusal(Knob::FlowLimitCpuBitmap, InvalidInput::Junk, JUNK),
];

const JUNK: &str = "x00000003 would count as 3: a character before eight digits is not read";

const fn refusal(knob: Knob, nonsense: InvalidInput, why: &'static str) -> KnobRefusal {
    KnobRefusal { knob, nonsense, why }
}

/// A write, as the kernel reads it.
struct ReadNumber {
    value: Option<Value>,
    len_bytes: usize,
    nonsense: Option<InvalidInput>,
}

impl Knob {
    /// Reads a value: the one that the knob reads back after `text` was written in one write.
    ///
    /// # Errors
    /// As the kernel's; `EINVAL` for values in [`REFUSED_INVALID_INPUT`], and for an empty text
    /// that changes nothing.
    pub fn parse(self, text: &str, machine: &Machine) -> Result<Value, Errno> {
        self.answer(text.as_bytes(), machine)?.value.ok_or(Errno::Inval)
    }

    /// Outcome of one write at the start of the file.
    ///
    /// # Errors
    /// As the kernel's, and `EINVAL` for values in [`REFUSED_INVALID_INPUT`].
    pub fn answer(self, written: &[u8], machine: &Machine) -> Result<TakenValue, Errno> {
        let ReadNumber { value, len_bytes, nonsense } = self.kernel_reads(written, machine)?;
        match nonsense.and_then(|nonsense| self.refusal(nonsense)) {
            Some(_) => Err(Errno::Inval),
            None => Ok(TakenValue { value, len_bytes }),
        }
    }

    /// Reason for refusing a write that the kernel would accept.
    #[must_use]
    pub fn refuses(self, written: &[u8], machine: &Machine) -> Option<&'static KnobRefusal> {
        self.refusal(self.kernel_reads(written, machine).ok()?.nonsense?)
    }

    fn refusal(self, nonsense: InvalidInput) -> Option<&'static KnobRefusal> {
        REFUSED_INVALID_INPUT.iter().find(|row| row.knob == self && row.nonsense == nonsense)
    }

    fn kernel_reads(self, written: &[u8], machine: &Machine) -> Result<ReadNumber, Errno> {
        match self.place() {
            // `proc_sys_call_handler` in fs/proc/proc_sysctl.c refuses a write of this size unread.
            KnobPlace::NetCore if written.len() >= SYSCTL_WRITE_BYTES => Err(Errno::NoMem),
            KnobPlace::NetCore if self.is_mask() => mask(written, machine),
            KnobPlace::NetCore => {
                let (number, len_bytes) = dointvec(written)?;
                let value = number.map(|number| self.sysctl(number, machine)).transpose()?;
                let nonsense =
                    number.is_some_and(i32::is_negative).then_some(InvalidInput::Negative);
                Ok(ReadNumber { value: value.map(Value::Number), len_bytes, nonsense })
            }
            // Sysfs does not pass on an empty write, and passes at most a page of a long one.
            _ if written.is_empty() => Ok(ReadNumber { value: None, len_bytes: 0, nonsense: None }),
            _ => self.attribute(&written[..written.len().min(PAGE_BYTES)], machine),
        }
    }

    fn attribute(self, written: &[u8], machine: &Machine) -> Result<ReadNumber, Errno> {
        if self.is_mask() {
            return mask(written, machine);
        }
        let number = kstrtoul(written)?;
        let taken = match self {
            Self::RpsFlowCnt => slots(number, KERNEL_RPS_FLOW_CNT_MAX)?,
            Self::GroFlushTimeout => number,
            Self::NapiDeferHardIrqs if number > NAPI_DEFER_HARD_IRQS_MAX => {
                return Err(Errno::Range);
            }
            Self::NapiDeferHardIrqs => number,
            // The kernel truncates the number to an int.
            Self::Mtu => mtu(number & u64::from(u32::MAX))?,
            _ => return Err(Errno::Inval),
        };
        let nonsense = (self == Self::Mtu && taken != number).then_some(InvalidInput::Truncated);
        Ok(ReadNumber { value: Some(Value::Number(taken)), len_bytes: written.len(), nonsense })
    }

    /// Number as it reads back, if it may be set. A negative number loses its sign.
    fn sysctl(self, number: i32, machine: &Machine) -> Result<u64, Errno> {
        let bits = number.cast_unsigned();
        let is_taken = match self {
            Self::RpsSockFlowEntries => return slots(bits.into(), RPS_SOCK_FLOW_ENTRIES_MAX),
            Self::FlowLimitTableLen => bits.is_power_of_two(),
            Self::NetdevMaxBacklog | Self::NetdevBudget => true,
            Self::NetdevBudgetUsecs => {
                u32::try_from(number).is_ok_and(|usecs| usecs >= machine.netdev_budget_usecs_min())
            }
            Self::DevWeight | Self::DevWeightRxBias => number >= 1,
            Self::SkbDeferMax => number >= 0,
            _ => false,
        };
        if is_taken { Ok(bits.into()) } else { Err(Errno::Inval) }
    }
}

fn mask(written: &[u8], machine: &Machine) -> Result<ReadNumber, Errno> {
    let Mask { cpus, has_junk } = Mask::read_or_list(written, machine.cpus)?;
    let nonsense = has_junk.then_some(InvalidInput::Junk);
    Ok(ReadNumber { value: Some(Value::Cpus(cpus)), len_bytes: written.len(), nonsense })
}

/// Size of a table with at least `count` slots; 0 for no table.
fn slots(count: u64, most: u64) -> Result<u64, Errno> {
    match count {
        0 => Ok(0),
        _ if count <= most => Ok(count.next_power_of_two()),
        _ => Err(Errno::Inval),
    }
}

fn mtu(number: u64) -> Result<u64, Errno> {
    let is_possible = (u64::from(MTU_MIN)..=u64::from(MTU_MAX)).contains(&number);
    if is_possible { Ok(number) } else { Err(Errno::Inval) }
}

#[cfg(test)]
mod tests {
    use forebay_sys::cpu_list::CpuList;
    use proptest::prelude::*;

    use super::*;

    const MACHINE: Machine = Machine { cpus: 34, jiffy_us: 4000 };
    const INVALID: Errno = Errno::Inval;

    /// Text that the knob reads back after `text` was written.
    fn read_back(knob: Knob, text: &str) -> Result<String, Errno> {
        Ok(knob.parse(text, &MACHINE)?.print(&MACHINE).trim_end().to_owned())
    }

    fn assert_answers(knob: Knob, answers: &[(&str, Result<&str, Errno>)]) {
        for (text, answer) in answers {
            assert_eq!(read_back(knob, text), answer.map(str::to_owned), "{knob} {text:?}");
        }
    }

    #[test]
    fn rps_8_masks_answer_as_the_kernel_does() {
        for knob in [Knob::RpsCpus, Knob::RpsDefaultMask, Knob::FlowLimitCpuBitmap] {
            assert_answers(
                knob,
                &[
                    ("3\n", Ok("0,00000003")),
                    ("\n", Ok("0,00000000")),
                    ("2 ,1", Ok("2,00000001")),
                    ("4,0", Err(Errno::Overflow)),
                    ("0,0,0", Err(Errno::Overflow)),
                    ("000000003", Err(Errno::Overflow)),
                    ("0x3", Err(INVALID)),
                    ("x00000003", Err(INVALID)),
                    ("1-2,33", Ok("2,00000006")),
                    ("0-34", Err(Errno::Overflow)),
                ],
            );
        }
    }

    #[test]
    fn rfs_9_table_sizes_rounded_and_bounded() {
        let both = [
            ("0", Ok("0")),
            ("1", Ok("1")),
            ("3", Ok("4")),
            ("0x401", Ok("2048")),
            ("536870912", Ok("536870912")),
            ("-1", Err(INVALID)),
            ("4294967297", Err(INVALID)),
        ];
        assert_answers(Knob::RpsFlowCnt, &both);
        assert_answers(Knob::RpsSockFlowEntries, &both);
        let per_queue = [
            ("536870913", Ok("1073741824")),
            ("4294967296", Ok("4294967296")),
            ("18446744073709551615", Err(INVALID)),
            ("18446744073709551616", Err(Errno::Range)),
        ];
        assert_answers(Knob::RpsFlowCnt, &per_queue);
        let shared = [("536870913", Err(INVALID)), ("2147483648", Err(INVALID))];
        assert_answers(Knob::RpsSockFlowEntries, &shared);
    }

    #[test]
    fn rps_8_numbers_have_the_kernels_bounds() {
        let int_max = "2147483647";
        for (knob, least, most) in [
            (Knob::GroFlushTimeout, "0", "18446744073709551615"),
            (Knob::Mtu, "68", "65535"),
            (Knob::NetdevMaxBacklog, "0", int_max),
            (Knob::NetdevBudget, "0", int_max),
            (Knob::NetdevBudgetUsecs, "8000", int_max),
            (Knob::DevWeight, "1", int_max),
            (Knob::DevWeightRxBias, "1", int_max),
            (Knob::SkbDeferMax, "0", int_max),
            (Knob::FlowLimitTableLen, "1", "1073741824"),
        ] {
            let below = (least.parse::<i64>().unwrap() - 1).to_string();
            let above = (most.parse::<u128>().unwrap() + 1).to_string();
            assert_answers(knob, &[(least, Ok(least)), (most, Ok(most)), (&below, Err(INVALID))]);
            assert!(read_back(knob, &above).is_err(), "{knob} {above}");
        }
        for text in ["3", "1000", "1073741825", "-4"] {
            assert_answers(Knob::FlowLimitTableLen, &[(text, Err(INVALID))]);
        }
    }

    #[test]
    fn rps_8_kernel_accepted_nonsense_is_refused() {
        let given: [(Knob, &str); REFUSED_INVALID_INPUT.len()] = [
            (Knob::NetdevMaxBacklog, "-1"),
            (Knob::NetdevBudget, "-5"),
            (Knob::FlowLimitTableLen, "-2147483648"),
            (Knob::Mtu, "4294968796"),
            (Knob::RpsCpus, "x00000003"),
            (Knob::RpsDefaultMask, "-00000003"),
            (Knob::FlowLimitCpuBitmap, "0x00000003"),
        ];
        for (row, (knob, text)) in REFUSED_INVALID_INPUT.iter().zip(given) {
            assert_eq!(knob.answer(text.as_bytes(), &MACHINE), Err(INVALID), "{knob} {text}");
            assert_eq!(knob.refuses(text.as_bytes(), &MACHINE), Some(row), "{knob} {text}");
        }
        for text in ["-1", "-8", "x"] {
            assert_eq!(Knob::FlowLimitTableLen.refuses(text.as_bytes(), &MACHINE), None, "{text}");
        }
    }

    #[test]
    fn rps_8_empty_and_long_writes_as_kernel() {
        let taken = |knob: Knob, text: &[u8]| {
            knob.answer(text, &MACHINE).map(|taken| (taken.value, taken.len_bytes))
        };
        let none = Value::Cpus(CpuList::default());
        for knob in Knob::ALL {
            let is_sysctl_mask = knob.is_mask() && knob.place() == KnobPlace::NetCore;
            assert_eq!(taken(knob, b""), Ok((is_sysctl_mask.then(|| none.clone()), 0)), "{knob}");
            assert_eq!(knob.parse("", &MACHINE).is_ok(), is_sysctl_mask, "{knob}");
        }
        let long = format!("{:5000}1", "");
        assert_eq!(taken(Knob::RpsCpus, long.as_bytes()), Ok((Some(none), 4096)));
        let first = Value::Cpus(CpuList::parse_list("0").unwrap());
        assert_eq!(taken(Knob::RpsDefaultMask, long.as_bytes()), Ok((Some(first), 5001)));
        assert_eq!(taken(Knob::DevWeight, b"5 7"), Ok((Some(Value::Number(5)), 2)));
        let huge = vec![b' '; SYSCTL_WRITE_BYTES];
        assert_eq!(taken(Knob::RpsDefaultMask, &huge), Err(Errno::NoMem));
        assert!(taken(Knob::RpsDefaultMask, &huge[1..]).is_ok());
    }

    /// Texts that are often values, and sometimes anything.
    fn texts() -> impl Strategy<Value = Vec<u8>> {
        prop_oneof![
            (0u32..64, any::<u64>()).prop_map(|(bits, number)| (number >> bits).to_string().into()),
            any::<u32>().prop_map(|bits| (1u64 << (bits % 34)).to_string().into()),
            (0u64..1 << 34)
                .prop_map(|bits| format!("{:x},{:08x}", bits >> 32, bits << 32 >> 32).into()),
            "[0-9a-gx+, \t\n\0-]{0,24}".prop_map(String::into_bytes),
            proptest::collection::vec(any::<u8>(), 0..40),
        ]
    }

    proptest! {
        #[test]
        fn rps_12_printed_values_parse_back(text in texts()) {
            for knob in Knob::ALL {
                let Ok(TakenValue { value: Some(value), .. }) = knob.answer(&text, &MACHINE) else {
                    continue;
                };
                let printed = value.print(&MACHINE);
                let len_bytes = printed.len();
                let again = TakenValue { value: Some(value), len_bytes };
                prop_assert_eq!(knob.answer(printed.as_bytes(), &MACHINE), Ok(again), "{}", knob);
            }
        }

        #[test]
        fn defaults_are_values(cpus in 1u16..=4096, jiffy_us in 1_000u32..=10_000) {
            let machine = Machine { cpus, jiffy_us };
            for knob in Knob::ALL {
                let value = knob.default(&machine);
                prop_assert_eq!(knob.parse(&value.print(&machine), &machine), Ok(value));
            }
        }
    }
}

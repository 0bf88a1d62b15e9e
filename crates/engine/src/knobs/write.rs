//! Writes to the knobs of the kernel: the answer, and the change that it makes.

use forebay_rx::steer::RPS_FLOW_CNT_MAX;
use forebay_sys::errno::Errno;
use forebay_sys::refused::Refused;

use super::change::{Change, Queues};
use super::coalesce::CoalesceChange;
use super::knob::{Knob, Value};
use super::machine::Machine;

/// An accepted write.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KnobWrite {
    /// The change that it makes; `None` if it was empty and the old value stays.
    pub change: Option<Change>,
    /// Number of bytes that were taken.
    pub len_bytes: usize,
}

impl Knob {
    /// Change that one write makes, for one queue or all if the knob is one of queues. This is the
    /// only way from a text to a knob of the kernel: of the control socket, the mount, config files,
    /// command lines and scripts.
    ///
    /// # Errors
    /// As the kernel's, with the reason in words.
    pub fn write(
        self,
        queues: Queues,
        written: &[u8],
        machine: &Machine,
    ) -> Result<KnobWrite, Refused> {
        let taken = self.answer(written, machine).map_err(|errno| {
            let why = match self.refuses(written, machine) {
                Some(refusal) => refusal.why.to_owned(),
                None if errno == Errno::Overflow => {
                    let highest = machine.cpus.saturating_sub(1);
                    let takes = self.takes();
                    format!(
                        "{self} takes CPUs up to {highest}, in groups of at most 8 digits, as {takes}"
                    )
                }
                None => format!("{self} takes {}", self.takes()),
            };
            Refused::new(errno, why)
        })?;
        let change = taken.value.map(|value| self.change(queues, value)).transpose()?;
        Ok(KnobWrite { change, len_bytes: taken.len_bytes })
    }

    fn change(self, queues: Queues, value: Value) -> Result<Change, Refused> {
        let number = match value {
            Value::Cpus(cpus) => {
                return Ok(match self {
                    Self::RpsCpus => Change::RpsCpus(queues, cpus),
                    Self::RpsDefaultMask => Change::RpsDefaultMask(cpus),
                    _ => Change::FlowLimitCpuBitmap(cpus),
                });
            }
            Value::Number(number) => number,
        };
        if self == Self::GroFlushTimeout {
            return Ok(Change::Coalesce(CoalesceChange::GroFlushTimeout(number)));
        }
        let small = u32::try_from(number).ok();
        let slots = small.filter(|slots| self != Self::RpsFlowCnt || *slots <= RPS_FLOW_CNT_MAX);
        let Some(small) = slots else {
            let why =
                format!("a table of {number} slots is too large: {self} takes {}", self.takes());
            return Err(Refused::new(Errno::NoMem, why));
        };
        Ok(match self {
            Self::RpsFlowCnt => Change::RpsFlowCnt(queues, small),
            Self::NapiDeferHardIrqs => Change::Coalesce(CoalesceChange::NapiDeferHardIrqs(small)),
            Self::Mtu => Change::Coalesce(CoalesceChange::Mtu(small)),
            Self::RpsSockFlowEntries => Change::RpsSockFlowEntries(small),
            Self::FlowLimitTableLen => Change::FlowLimitTableLen(small),
            Self::NetdevMaxBacklog => Change::NetdevMaxBacklog(small),
            Self::NetdevBudget => Change::NetdevBudget(small),
            Self::NetdevBudgetUsecs => Change::NetdevBudgetUsecs(small),
            Self::DevWeight => Change::DevWeight(small),
            Self::DevWeightRxBias => Change::DevWeightRxBias(small),
            Self::SkbDeferMax => Change::SkbDeferMax(small),
            Self::RpsCpus
            | Self::RpsDefaultMask
            | Self::FlowLimitCpuBitmap
            | Self::GroFlushTimeout => {
                return Err(Refused::new(Errno::Inval, format!("{self} takes {}", self.takes())));
            }
        })
    }
}

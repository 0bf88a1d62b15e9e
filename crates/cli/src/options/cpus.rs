//! Options that choose CPUs.

use clap::Args;
use forebay_engine::knobs::Change;
use forebay_rx::CpuId;
use forebay_sys as sys;
use forebay_sys::cpu_list::{CpuList, MAX_CPUS};
use tracing::warn;

use crate::failure::Failure;

/// The CPUs of a run.
#[derive(Debug, Args)]
pub(crate) struct CpuOptions {
    /// CPUs to run on: how many, or a list such as 0-3,8 [default: all that may be used]
    #[arg(long, value_name = "LIST|N")]
    pub(crate) cpus: Option<String>,

    /// CPUs that packets go to: a bitmap as for rps_cpus, or a list with a dash; 0 turns RPS off
    /// [default: those of --cpus that share a last-level cache with one that polls a queue, see
    /// advise; all of them in virtual time]
    #[arg(long, value_name = "MASK")]
    pub(crate) rps: Option<String>,
}

impl CpuOptions {
    /// The CPUs to run on. `are_real` is true if threads will run on them.
    pub(crate) fn cpus(&self, are_real: bool) -> Result<CpuList, Failure> {
        let allowed = CpuList::new(sys::allowed_cpus());
        let list = cpus_of(self.cpus.as_deref(), &allowed)?;
        let missing =
            CpuList::new(list.cpus().iter().copied().filter(|cpu| !allowed.contains(*cpu)));
        if !missing.is_empty() && are_real {
            warn!(
                cpus = %missing,
                "CPUs {missing} do not exist here or may not be used: their threads run \
                 where the system puts them"
            );
        }
        Ok(list)
    }

    /// CPUs that packets go to, if the option is given.
    pub(crate) fn rps_cpus(&self, cpus: &CpuList) -> Result<Option<CpuList>, Failure> {
        let Some(mask) = &self.rps else { return Ok(None) };
        let rps_cpus = CpuList::parse_mask_or_list(mask).map_err(|error| {
            Failure::usage(format!("--rps {mask}: {error}"), "give a mask such as 3, or a list")
        })?;
        say_ignored("--rps", &rps_cpus, cpus);
        Ok(Some(rps_cpus))
    }
}

/// Parses `--cpus`. A number means that many CPUs, preferring those that may be used; anything else
/// is a list.
pub(crate) fn cpus_of(text: Option<&str>, allowed: &CpuList) -> Result<CpuList, Failure> {
    let Some(text) = text else { return Ok(allowed.clone()) };
    let help = "give a number of CPUs from 1 on, or a list such as 0-3,8";
    let list = match text.trim().parse::<u16>() {
        Ok(count) if count > MAX_CPUS => {
            let problem = format!("--cpus {count}: that is more than there can be");
            return Err(Failure::usage(problem, format!("give {MAX_CPUS} at most")));
        }
        Ok(count) => {
            let count = usize::from(count);
            let others = (0..).map(CpuId).filter(|cpu| !allowed.contains(*cpu));
            CpuList::new(allowed.cpus().iter().copied().chain(others).take(count))
        }
        Err(_) => CpuList::parse_list(text)
            .map_err(|error| Failure::usage(format!("--cpus {text}: {error}"), help))?,
    };
    if list.is_empty() {
        return Err(Failure::usage(format!("--cpus {text}: there is no CPU to run on"), help));
    }
    Ok(list)
}

/// Warns of CPUs in a change that are not in `cpus`, and refuses a change of a single CPU that is
/// not.
pub(crate) fn check_cpus(change: &Change, cpus: &CpuList) -> Result<(), Failure> {
    match change {
        Change::RpsCpus(_, list) | Change::FlowLimitCpuBitmap(list) | Change::Cpus(list) => {
            say_ignored(change.knob(), list, cpus);
        }
        Change::Pause(cpu) | Change::Resume(cpu) | Change::Kill(cpu) if !cpus.contains(*cpu) => {
            let problem = format!("{}={cpu}: that CPU is not among --cpus", change.knob());
            return Err(Failure::usage(problem, format!("give one of {cpus}")));
        }
        _ => {}
    }
    Ok(())
}

/// Warns of CPUs that are ignored: the kernel drops unusable CPUs from a mask silently (RPS-9).
fn say_ignored(what: &str, wanted: &CpuList, cpus: &CpuList) {
    let ignored = wanted.cpus().iter().copied().filter(|cpu| !cpus.contains(*cpu));
    let ignored = CpuList::new(ignored);
    if !ignored.is_empty() {
        warn!(cpus = %ignored, "{what}: CPUs {ignored} are not among --cpus ({cpus}) and are ignored");
    }
}

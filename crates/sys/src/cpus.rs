//! CPUs: those that this process may use, pinning, scheduling and CPU time.

use std::io;

use forebay_rx::CpuId;
use nix::sys::resource::{UsageWho, getrusage};
use nix::time::clock_getcpuclockid;
use nix::unistd::Pid;
use rustix::process;
use rustix::thread::{self, CpuSet};
use rustix::time::{ClockId, clock_gettime};

/// CPUs that this process may run on.
#[must_use]
pub fn allowed_cpus() -> Vec<CpuId> {
    let set = thread::sched_getaffinity(None).unwrap_or_else(|_| {
        let mut set = CpuSet::new();
        set.set(0);
        set
    });
    let ids = (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu));
    ids.filter_map(|cpu| u16::try_from(cpu).ok().map(CpuId)).collect()
}

/// CPU that the calling thread runs on at the moment.
#[must_use]
pub fn current_cpu() -> CpuId {
    CpuId(u16::try_from(thread::sched_getcpu()).unwrap_or(u16::MAX))
}

/// Pins the calling thread to `cpu`.
///
/// # Errors
/// The kernel's error if the CPU does not exist or is not allowed.
pub fn pin_to(cpu: CpuId) -> io::Result<()> {
    keep_on(&[cpu])
}

/// Keeps the calling thread, and those that it starts, on `cpus`.
///
/// # Errors
/// The kernel's error if none of the CPUs exists and is allowed.
pub fn keep_on(cpus: &[CpuId]) -> io::Result<()> {
    let mut set = CpuSet::new();
    for cpu in cpus {
        // `cpu_set_t` has bits for fewer CPUs than a `CpuId` can name.
        if cpu.index() >= CpuSet::MAX_CPU {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        set.set(cpu.index());
    }
    Ok(thread::sched_setaffinity(None, &set)?)
}

/// Sets the calling thread's timer slack to 1 µs: the default of 50 µs is longer than the
/// processing of a packet.
pub fn set_timer_slack() {
    // A refusal only makes sleeping less precise.
    let _ = thread::set_current_timer_slack(std::num::NonZeroU64::new(1_000));
}

/// Time slice of threads that must wake promptly, the shortest that the scheduler grants.
const SLICE_NS: u64 = 100_000;

/// `SCHED_FLAG_KEEP_POLICY` of include/uapi/linux/sched.h.
const SCHED_FLAG_KEEP_POLICY: u64 = 0x08;

/// `struct sched_attr` of include/uapi/linux/sched/types.h, its first version.
#[repr(C)]
struct SchedAttr {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime_ns: u64,
    deadline_ns: u64,
    period_ns: u64,
}

/// Requests short time slices for the calling thread. Its share of the CPU stays the same, but
/// after a wake-up it does not wait for the end of another thread's slice while packets wait in a
/// ring (EEVDF, Linux 6.12; older kernels give every thread the same slice).
pub fn set_sched_slice() {
    let Ok(nice) = process::getpriority_process(None) else { return };
    let attributes = SchedAttr {
        size: 48,
        policy: 0,
        flags: SCHED_FLAG_KEEP_POLICY,
        nice,
        priority: 0,
        runtime_ns: SLICE_NS,
        deadline_ns: 0,
        period_ns: 0,
    };
    const { assert!(size_of::<SchedAttr>() == 48) };
    // SAFETY: the kernel reads as many bytes as `size` says, which the structure has. A refusal
    // changes nothing.
    let _ = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
}

/// Number of involuntary context switches of the calling thread so far.
pub fn preemptions() -> u64 {
    let usage = getrusage(UsageWho::RUSAGE_THREAD);
    usage.map_or(0, |usage| u64::try_from(usage.involuntary_context_switches()).unwrap_or(0))
}

/// CPU time that this process has used so far, in nanoseconds.
#[must_use]
pub fn process_cpu_ns() -> u64 {
    clock_ns(ClockId::ProcessCPUTime)
}

/// CPU time that a process has used so far, in nanoseconds, with its threads that have ended. One that has ended itself has
/// it until it is waited for.
///
/// # Errors
/// If there is no such process.
pub fn cpu_ns_of(process_id: u32) -> io::Result<u64> {
    let id = i32::try_from(process_id).map_err(|_| io::ErrorKind::InvalidInput)?;
    let time = clock_getcpuclockid(Pid::from_raw(id))?.now()?;
    Ok(ns(time.tv_sec(), time.tv_nsec()))
}

/// CPU time that the calling thread has used so far, in nanoseconds.
#[must_use]
pub fn thread_cpu_ns() -> u64 {
    clock_ns(ClockId::ThreadCPUTime)
}

pub(crate) fn clock_ns(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    ns(time.tv_sec, time.tv_nsec)
}

fn ns(seconds: i64, nanos: i64) -> u64 {
    u64::try_from(seconds).unwrap_or(0) * 1_000_000_000 + u64::try_from(nanos).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_pins_only_to_allowed() {
        std::thread::spawn(|| {
            let cpus = allowed_cpus();
            pin_to(cpus[0]).unwrap();
            assert_eq!(allowed_cpus(), [cpus[0]]);
            assert_eq!(current_cpu(), cpus[0]);
            assert!(pin_to(CpuId(1023)).is_err());
            assert!(pin_to(CpuId(u16::MAX)).is_err());
        })
        .join()
        .unwrap();
    }

    #[test]
    fn started_threads_stay_on_its_cpus() {
        std::thread::spawn(|| {
            let cpus = allowed_cpus();
            let kept = &cpus[..cpus.len().min(2)];
            keep_on(kept).unwrap();
            assert_eq!(std::thread::spawn(allowed_cpus).join().unwrap(), kept);
            assert!(keep_on(&[]).is_err());
            assert!(keep_on(&[kept[0], CpuId(u16::MAX)]).is_err());
        })
        .join()
        .unwrap();
    }

    #[test]
    fn cpu_time_advances() {
        for cpu_ns in [process_cpu_ns, thread_cpu_ns] {
            let before = cpu_ns();
            while cpu_ns() == before {}
        }
    }

    #[test]
    fn cpu_time_is_of_any_process() {
        let before_ns = process_cpu_ns();
        let of_this_ns = cpu_ns_of(std::process::id()).unwrap();
        assert!((before_ns..=process_cpu_ns()).contains(&of_this_ns));
        // Beyond the kernel's largest (`PID_MAX_LIMIT`), and beyond any number of its type.
        assert!(cpu_ns_of(1 << 23).is_err() && cpu_ns_of(u32::MAX).is_err());
    }
}

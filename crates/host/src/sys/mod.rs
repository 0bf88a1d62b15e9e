//! What the engine asks of Linux: CPUs, memory, timers. The second island of `unsafe`.

pub mod interface; // network interfaces, in the namespace of the calling thread
pub mod bpf; //       programs and maps in the kernel
mod packet; //        packet sockets and their ring
pub mod socket_filter; // which packets a socket gets
pub(crate) mod packet; // packet sockets and their ring
mod event; //         what wakes a thread that sleeps on descriptors
mod ethtool; //       what a driver says of itself
mod netlink; //       what the kernel is asked of its network
pub mod tun; //       TUN and TAP
pub mod privilege; // what a device takes, and letting go of it

use std::io;
use std::path::Path;
use std::ptr::NonNull;

use mem::Region;
use path::CpuId;
use rustix::mm::{self, Advice, MapFlags, ProtFlags};
use rustix::mount::{self, UnmountFlags};
use rustix::process;
use rustix::thread::{self, CpuSet};

use crate::error::{Error, Result};
pub(crate) use event::Event;

/// The CPUs that this process may run on.
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

/// The CPU that the calling thread runs on right now.
#[must_use]
pub fn current_cpu() -> CpuId {
    CpuId(u16::try_from(thread::sched_getcpu()).unwrap_or(u16::MAX))
}

/// Memory that can be had without driving others out, in bytes; `None` where the kernel does not
/// say.
#[must_use]
pub fn available_memory_bytes() -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// A user, and the group that its files belong to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct User {
    /// The user's number.
    pub uid: u32,
    /// The group's.
    pub gid: u32,
}

impl User {
    /// Whether this is the one that may do anything.
    #[must_use]
    pub fn is_root(self) -> bool {
        self.uid == 0
    }
}

/// Who runs this process.
#[must_use]
pub fn user() -> User {
    User { uid: process::geteuid().as_raw(), gid: process::getegid().as_raw() }
}

/// Takes what is mounted on a directory out of the tree, in use or not: it goes when nobody uses it
/// any more.
///
/// # Errors
/// When it is not allowed, or nothing is mounted there.
pub fn unmount_lazily(directory: &Path) -> io::Result<()> {
    Ok(mount::unmount(directory, UnmountFlags::DETACH)?)
}

/// Keeps the calling thread on `cpu`.
///
/// # Errors
/// What the kernel says if the CPU does not exist or may not be used.
pub fn pin_to(cpu: CpuId) -> io::Result<()> {
    if cpu.index() >= CpuSet::MAX_CPU {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut set = CpuSet::new();
    set.set(cpu.index());
    Ok(thread::sched_setaffinity(None, &set)?)
}

/// Lets the calling thread's timers be precise: the default slack of 50 µs is more than a packet's
/// worth.
pub(crate) fn make_timers_precise() {
    // Without it sleeping is only less precise.
    let _ = thread::set_current_timer_slack(std::num::NonZeroU64::new(1_000));
}

/// A secret that nobody outside can guess.
#[must_use]
pub fn random_key() -> [u8; 16] {
    let mut key = [0; 16];
    let filled = rustix::rand::getrandom(&mut key, rustix::rand::GetRandomFlags::empty());
    // The kernel gives up to 256 bytes whole once it is up, and it is.
    debug_assert_eq!(filled.ok(), Some(key.len()));
    key
}

/// CPU time that this process has used so far, in nanoseconds.
#[must_use]
pub fn process_cpu_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    let (seconds, nanos) = (u64::try_from(time.tv_sec), u64::try_from(time.tv_nsec));
    seconds.unwrap_or(0) * 1_000_000_000 + nanos.unwrap_or(0)
}

/// Huge pages are this large on every machine that Forebay runs on.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Maps memory for packets: zeroed, and in huge pages as far as the kernel grants them. Pages are
/// taken when they are first touched.
///
/// # Errors
/// When the kernel has no such room.
pub fn map_packet_memory(bytes: usize) -> Result<Region> {
    let bytes = bytes.max(1).next_multiple_of(HUGE_PAGE_BYTES);
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a fresh mapping at an address of the kernel's choice; no memory of ours is touched.
    let mapped = unsafe {
        mm::mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, flags)
    };
    let refused = |source| Error::Memory { bytes, source };
    let address = mapped.map_err(|errno| refused(errno.into()))?;
    let base = NonNull::new(address.cast()).ok_or_else(|| refused(io::ErrorKind::Other.into()))?;
    // SAFETY: advice on the mapping made above. Refusing it costs speed only.
    let _ = unsafe { mm::madvise(address, bytes, Advice::LinuxHugepage) };
    // SAFETY: page-aligned, zeroed, readable and writable, ours alone, and unmapped by `unmap`.
    Ok(unsafe { Region::from_mapping(base, bytes, unmap) })
}

/// Gives back what [`map_packet_memory`] mapped.
///
/// # Safety
/// `base` and `bytes` are a mapping's, and nobody holds a pointer into it.
unsafe fn unmap(base: NonNull<u8>, bytes: usize) {
    // SAFETY: the caller's promise.
    let unmapped = unsafe { mm::munmap(base.as_ptr().cast(), bytes) };
    debug_assert!(unmapped.is_ok(), "a mapping of ours cannot be unmapped: {unmapped:?}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_thread_can_be_pinned_to_an_allowed_cpu_and_to_no_other() {
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
    fn packet_memory_is_rounded_up_to_huge_pages() {
        assert_eq!(map_packet_memory(5).unwrap().len_bytes(), HUGE_PAGE_BYTES);
    }

    #[test]
    fn some_memory_can_be_had() {
        assert!(available_memory_bytes().is_some_and(|bytes| bytes > 1 << 20));
    }

    #[test]
    fn cpu_time_advances() {
        let before = process_cpu_ns();
        while process_cpu_ns() == before {}
    }
}

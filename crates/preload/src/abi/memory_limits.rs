//! Limits of memory that a program sets for itself, as FTP servers do for each client. What the library has, and may take for
//! an engine, is not the program's: it comes on top.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use libc::{RLIM_INFINITY, pid_t, rlimit};

use super::next::next;
use super::{is_nowhere, read_file};

/// Room for an engine that a process starts later, as a child does.
const ENGINE_BYTES: u64 = 1 << 30;

static OF_ADDRESSES: Limited = Limited::new("VmSize:");
static OF_DATA: Limited = Limited::new("VmData:");

/// Memory of a kind that a program limits.
struct Limited {
    /// Name that `/proc/self/status` has for it.
    name: &'static str,
    /// Bytes that the library has on top of each limit; 0 before they are measured. One value for all limits of the process and of
    /// its children: a limit that is set again stays.
    room: AtomicU64,
    /// Soft limits that the process had as it set others. A program that sets one of them again has read it.
    earlier: [AtomicU64; 8],
    count: AtomicUsize,
}

impl Limited {
    const fn new(name: &'static str) -> Self {
        let earlier = [const { AtomicU64::new(RLIM_INFINITY) }; 8];
        Self { name, room: AtomicU64::new(0), earlier, count: AtomicUsize::new(0) }
    }

    /// Limit to set in place of the one that the program asks for.
    fn in_place_of(
        &self,
        asked: rlimit,
        now: rlimit,
        present_bytes: impl FnOnce() -> Option<u64>,
    ) -> rlimit {
        if !self.has_had(now.rlim_cur) {
            let index = self.count.fetch_add(1, Ordering::Relaxed) % self.earlier.len();
            self.earlier[index].store(now.rlim_cur, Ordering::Relaxed);
        }
        match self.has_had(asked.rlim_cur) {
            true => asked,
            false => with_room(asked, self.room(present_bytes), now.rlim_max),
        }
    }

    fn has_had(&self, soft: u64) -> bool {
        self.earlier.iter().any(|earlier| earlier.load(Ordering::Relaxed) == soft)
    }

    /// Room for the library, which the first call measures.
    fn room(&self, present_bytes: impl FnOnce() -> Option<u64>) -> u64 {
        let room = self.room.load(Ordering::Relaxed);
        if room != 0 {
            return room;
        }
        let present = present_bytes().unwrap_or_else(|| {
            report!(
                "forebay: /proc/self/status cannot be read: the limit of memory that the program sets has room for \
                 1 GiB of the library's alone; mount /proc if that is too little"
            );
            0
        });
        let room = present.saturating_add(ENGINE_BYTES);
        let first = self.room.compare_exchange(0, room, Ordering::Relaxed, Ordering::Relaxed);
        first.map_or_else(|first| first, |_| room)
    }

    /// Bytes that this process has now, of those that the limit counts.
    fn present_bytes(&self) -> Option<u64> {
        field_bytes(&read_file("/proc/self/status").ok()?, self.name)
    }
}

/// Limit with room for the library. The hard limit is raised no further than it may be.
fn with_room(asked: rlimit, room: u64, hard_now: u64) -> rlimit {
    if asked.rlim_cur > asked.rlim_max {
        return asked; // the kernel refuses it
    }
    let rlim_max = asked.rlim_max.saturating_add(room).min(hard_now.max(asked.rlim_max));
    let rlim_cur = asked.rlim_cur.saturating_add(room).min(rlim_max);
    rlimit { rlim_cur, rlim_max }
}

/// Value of a line such as `VmData:    264 kB`.
fn field_bytes(status: &str, name: &str) -> Option<u64> {
    let value = status.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = value.split_ascii_whitespace().next()?.parse().ok()?;
    Some(kib.saturating_mul(1024))
}

/// Limit that is to be set in place of the one at `asked`.
///
/// # Safety
/// As `setrlimit(2)`.
unsafe fn raised(resource: u32, asked: *const rlimit) -> Option<rlimit> {
    let limited = match resource {
        libc::RLIMIT_AS => &OF_ADDRESSES,
        libc::RLIMIT_DATA => &OF_DATA,
        _ => return None,
    };
    if is_nowhere(asked) {
        return None;
    }
    let mut now = rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structure has room for what the call writes.
    if unsafe { libc::getrlimit(resource, &raw mut now) } != 0 {
        return None;
    }
    // SAFETY: the caller's promise.
    let asked = unsafe { asked.read() };
    Some(limited.in_place_of(asked, now, || limited.present_bytes()))
}

/// # Safety
/// As `setrlimit(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn setrlimit(resource: u32, asked: *const rlimit) -> c_int {
    let next = next!(setrlimit(u32, *const rlimit) -> c_int);
    // SAFETY: the caller's promise.
    let raised = unsafe { raised(resource, asked) };
    // SAFETY: as above.
    unsafe { next(resource, raised.as_ref().map_or(asked, std::ptr::from_ref)) }
}

/// # Safety
/// As `setrlimit(2)`, of which it is the form of large files: on 64 bits both are one.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn setrlimit64(resource: u32, asked: *const rlimit) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { setrlimit(resource, asked) }
}

/// # Safety
/// As `prlimit(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn prlimit(
    process: pid_t,
    resource: u32,
    asked: *const rlimit,
    earlier: *mut rlimit,
) -> c_int {
    let next = next!(prlimit(pid_t, u32, *const rlimit, *mut rlimit) -> c_int);
    let is_own = process == 0 || u32::try_from(process) == Ok(std::process::id());
    // SAFETY: the caller's promise.
    let raised = if is_own { unsafe { raised(resource, asked) } } else { None };
    // SAFETY: as above.
    unsafe { next(process, resource, raised.as_ref().map_or(asked, std::ptr::from_ref), earlier) }
}

/// # Safety
/// As `prlimit(2)`, of which it is the form of large files: on 64 bits both are one.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn prlimit64(
    process: pid_t,
    resource: u32,
    asked: *const rlimit,
    earlier: *mut rlimit,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { prlimit(process, resource, asked, earlier) }
}

#[cfg(test)]
mod tests {
    use libc::{RLIM_INFINITY, rlimit};

    use super::{ENGINE_BYTES, Limited, field_bytes, with_room};

    #[test]
    fn exe_5_present_memory_is_read() {
        let status = "Name:\tx\nVmSize:\t  5740 kB\nVmData:\t     264 kB\n";
        assert_eq!(field_bytes(status, "VmSize:"), Some(5740 * 1024));
        assert_eq!(field_bytes(status, "VmData:"), Some(264 * 1024));
        assert_eq!(field_bytes(status, "VmStk:"), None);
    }

    #[test]
    fn exe_5_limits_of_memory_leave_room() {
        let raised = |soft, hard, hard_now| {
            let asked = rlimit { rlim_cur: soft, rlim_max: hard };
            let rlimit { rlim_cur, rlim_max } = with_room(asked, 100, hard_now);
            (rlim_cur, rlim_max)
        };
        assert_eq!(raised(7, 9, RLIM_INFINITY), (107, 109));
        assert_eq!(raised(7, RLIM_INFINITY, RLIM_INFINITY), (107, RLIM_INFINITY));
        assert_eq!(raised(7, 9, 50), (50, 50), "no further than the process may");
        assert_eq!(raised(7, 9, 8), (9, 9), "refused, unless the process is privileged");
        assert_eq!(raised(10, 9, RLIM_INFINITY), (10, 9), "refused by the kernel");
    }

    #[test]
    fn exe_5_limits_set_again_stay() {
        let limited = Limited::new("");
        let mut now = 5 << 40;
        let mut set = |soft, present| {
            let [asked, before] =
                [soft, now].map(|soft| rlimit { rlim_cur: soft, rlim_max: RLIM_INFINITY });
            now = limited.in_place_of(asked, before, || present).rlim_cur;
            now
        };
        let raised = 7 + 100 + ENGINE_BYTES;
        assert_eq!(set(7, Some(100)), raised);
        assert_eq!(set(7, Some(200)), raised, "set again by a process that has grown");
        assert_eq!(set(raised, None), raised, "as it was read");
        assert_eq!(set(3, None), raised - 4);
        assert_eq!(set(raised, None), raised, "as it was read before");
        assert_eq!(set(5 << 40, None), 5 << 40, "as the process was started");
        assert_eq!(set(RLIM_INFINITY, None), RLIM_INFINITY);
        assert_eq!(Limited::new("").room(|| None), ENGINE_BYTES);
    }
}

//! Limits of memory that a program sets for itself, as FTP servers do for each client. What the library has, and may take for
//! an engine, is not the program's: it comes on top.

use std::ffi::c_int;
use std::fs;

use libc::{pid_t, rlimit};

use super::is_nowhere;
use super::next::next;

/// Room for an engine that a process starts later, as a child does.
const ENGINE_BYTES: u64 = 1 << 30;

/// Limit with room for the library. The hard limit is raised no further than it may be.
fn with_room(asked: rlimit, present_bytes: u64, hard_now: u64) -> rlimit {
    if asked.rlim_cur > asked.rlim_max {
        return asked; // the kernel refuses it
    }
    let room = present_bytes.saturating_add(ENGINE_BYTES);
    let rlim_max = asked.rlim_max.saturating_add(room).min(hard_now.max(asked.rlim_max));
    let rlim_cur = asked.rlim_cur.saturating_add(room).min(rlim_max);
    rlimit { rlim_cur, rlim_max }
}

/// Bytes that this process has now, of those that a limit counts. 0 if they cannot be read.
fn present_bytes(resource: u32) -> u64 {
    let name = if resource == libc::RLIMIT_AS { "VmSize:" } else { "VmData:" };
    fs::read_to_string("/proc/self/status").map_or(0, |status| field_bytes(&status, name))
}

/// Value of a line such as `VmData:    264 kB`.
fn field_bytes(status: &str, name: &str) -> u64 {
    let value = status.lines().find_map(|line| line.strip_prefix(name));
    let kib = value.and_then(|value| value.split_ascii_whitespace().next()?.parse().ok());
    kib.unwrap_or(0u64).saturating_mul(1024)
}

/// Limit that is to be set in place of the one at `asked`.
///
/// # Safety
/// As `setrlimit(2)`.
unsafe fn raised(resource: u32, asked: *const rlimit) -> Option<rlimit> {
    if !matches!(resource, libc::RLIMIT_AS | libc::RLIMIT_DATA) || is_nowhere(asked) {
        return None;
    }
    let mut now = rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structure has room for what the call writes.
    if unsafe { libc::getrlimit(resource, &raw mut now) } != 0 {
        return None;
    }
    // SAFETY: the caller's promise.
    let asked = unsafe { asked.read() };
    Some(with_room(asked, present_bytes(resource), now.rlim_max))
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

    use super::{ENGINE_BYTES, field_bytes, with_room};

    #[test]
    fn exe_5_present_memory_is_read() {
        let status = "Name:\tx\nVmSize:\t  5740 kB\nVmData:\t     264 kB\n";
        assert_eq!(field_bytes(status, "VmSize:"), 5740 * 1024);
        assert_eq!(field_bytes(status, "VmData:"), 264 * 1024);
        assert_eq!(field_bytes(status, "VmStk:"), 0);
    }

    #[test]
    fn exe_5_limits_of_memory_leave_room() {
        let raised = |soft, hard, hard_now| {
            let asked = rlimit { rlim_cur: soft, rlim_max: hard };
            let rlimit { rlim_cur, rlim_max } = with_room(asked, 100, hard_now);
            (rlim_cur, rlim_max)
        };
        let room = ENGINE_BYTES + 100;
        assert_eq!(raised(7, 9, RLIM_INFINITY), (7 + room, 9 + room));
        assert_eq!(raised(7, RLIM_INFINITY, RLIM_INFINITY), (7 + room, RLIM_INFINITY));
        assert_eq!(raised(7, 9, 50), (50, 50), "no further than the process may");
        assert_eq!(raised(7, 9, 8), (9, 9), "refused, unless the process is privileged");
        assert_eq!(raised(10, 9, RLIM_INFINITY), (10, 9), "refused by the kernel");
    }
}

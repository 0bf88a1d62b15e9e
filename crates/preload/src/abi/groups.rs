//! setsockopt of multicast groups, on a UDP socket.

use std::ffi::c_void;

use libc::socklen_t;
use rustix::io::Errno;

use super::system::{option_bytes, set_option, set_option_at};
use super::{is_nowhere, keeping_errno};
use crate::option::SocketOption;
use crate::udp::Udp;
use crate::udp::groups::{VALUE_BYTES_MAX, names_interface, opposite};

/// Sets the option of the kernel's socket, which checks it, and then of ours. What ours refuses is taken back.
///
/// # Errors
/// As `setsockopt(2)`; those of [`Udp::change_groups`].
///
/// # Safety
/// As `setsockopt(2)`.
pub(super) unsafe fn set(
    udp: &Udp,
    option: SocketOption,
    value: *const c_void,
    len: socklen_t,
) -> Result<(), Errno> {
    let kernel = udp.checked_kernel()?;
    let before = names_interface(option).then(|| option_bytes(kernel, option)).flatten();
    // SAFETY: the caller's promise, for another socket.
    unsafe { set_option_at(kernel, option, value, len) }?;
    let count = usize::try_from(len).unwrap_or(0).min(VALUE_BYTES_MAX);
    let bytes = match is_nowhere(value) {
        true => &[], // 0, for options of IPv6
        // SAFETY: the caller's promise, for as many bytes or fewer.
        false => unsafe { std::slice::from_raw_parts(value.cast::<u8>(), count) },
    };
    let changed = keeping_errno(|| udp.change_groups(option, bytes));
    // Ignored: the first error is told.
    if let (Err(_), Some(opposite)) = (changed, opposite(option)) {
        // SAFETY: as above.
        let _ = unsafe { set_option_at(kernel, opposite, value, len) };
    }
    if let (Err(_), Some(before)) = (changed, before) {
        let _ = set_option(kernel, option, &before);
    }
    changed
}

//! Calls that end the process.

use std::ffi::c_int;

use super::next::next;
use crate::runtime::finish;

/// # Safety
/// As `_exit(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn _exit(status: c_int) -> ! {
    finish();
    let next = next!(_exit(c_int) -> !);
    // SAFETY: the caller's promise.
    unsafe { next(status) }
}

/// # Safety
/// As `_Exit(3)`.
#[cfg_attr(test, expect(non_snake_case, reason = "the C library's name"))]
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn _Exit(status: c_int) -> ! {
    // SAFETY: the caller's promise; both are one function.
    unsafe { _exit(status) }
}

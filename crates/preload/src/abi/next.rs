//! Next definitions of the exported functions, in the libraries behind this one.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// Address of the next definition of a function, kept in `found`.
pub(super) fn resolve(found: &AtomicPtr<c_void>, name: &CStr) -> *mut c_void {
    let known = found.load(Ordering::Relaxed);
    if !known.is_null() {
        return known;
    }
    // SAFETY: the name is a string that ends with 0, and the handle is one of those that dlsym defines.
    let address = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    if address.is_null() {
        report!(
            "forebay: the C library has no function {name:?}, which the program calls, so the program is aborted: run it \
             without forebay exec"
        );
        std::process::abort();
    }
    found.store(address, Ordering::Relaxed);
    address
}

/// Next definition of a function, of the type given.
macro_rules! next {
    ($name:ident($($argument:ty),* $(,)?) -> $result:ty) => {{
        static FOUND: std::sync::atomic::AtomicPtr<std::ffi::c_void> =
            std::sync::atomic::AtomicPtr::new(std::ptr::null_mut());
        const NAME: &std::ffi::CStr =
            match std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("a name has no 0"),
            };
        let address = crate::abi::next::resolve(&FOUND, NAME);
        // SAFETY: the address is not null, and is that of the C library's function of this name, which has this
        // type. fcntl, ioctl and syscall are variadic: on x86-64 and AArch64 Linux further integer arguments are passed as
        // those of a function that names them.
        unsafe {
            std::mem::transmute::<*mut std::ffi::c_void, unsafe extern "C" fn($($argument),*) -> $result>(address)
        }
    }};
}
pub(super) use next;

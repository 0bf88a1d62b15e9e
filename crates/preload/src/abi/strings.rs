//! Strings that a program gives to execve and its siblings, which answer `EFAULT` for one where it has no memory.

use std::ffi::{CStr, OsStr, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::slice;

use rustix::io::Errno;

use super::{is_nowhere, last_error};

/// Array of strings, which ends with null.
pub(super) type Strings = *const *const c_char;

/// Smallest page of memory. In one there is memory everywhere or nowhere.
const PAGE_BYTES: usize = 1 << 12;

/// Reader of a program's memory, which asks the kernel before it reads from another page.
#[derive(Default)]
struct Reader {
    /// Page that was read last, by its address.
    page: Option<usize>,
}

impl Reader {
    /// True if bytes can be read from here to the end of the page.
    fn can_read(&mut self, address: *const u8) -> bool {
        let page = address.addr() & !(PAGE_BYTES - 1);
        if self.page != Some(page) {
            if is_nowhere(address) || !has_memory(address) {
                return false;
            }
            self.page = Some(page);
        }
        true
    }

    /// String at an address, if all of it can be read.
    ///
    /// # Safety
    /// The memory that is there is not changed while the result lives.
    unsafe fn string<'a>(&mut self, string: *const c_char) -> Option<&'a CStr> {
        let first = string.cast::<u8>();
        let mut len = 0;
        loop {
            let at = first.wrapping_add(len);
            if !self.can_read(at) {
                return None;
            }
            let in_page = PAGE_BYTES - at.addr() % PAGE_BYTES;
            // SAFETY: there is memory up to the end of the page; what comes behind the string is not read.
            let here = unsafe { libc::strnlen(at.cast(), in_page) };
            len += here;
            if here < in_page {
                // SAFETY: so many bytes were read, and the one behind them, which is 0; and the caller's promise.
                let bytes = unsafe { slice::from_raw_parts(first, len + 1) };
                return CStr::from_bytes_with_nul(bytes).ok();
            }
        }
    }

    /// Address at an address, if it can be read.
    ///
    /// # Safety
    /// The memory that is there is not changed meanwhile.
    unsafe fn address(&mut self, at: Strings) -> Option<*const c_char> {
        let first = at.cast::<u8>();
        if !self.can_read(first) || !self.can_read(first.wrapping_add(size_of::<usize>() - 1)) {
            return None;
        }
        // SAFETY: there is memory at its first byte and at its last one, and the caller's promise. The kernel reads
        // addresses from anywhere.
        Some(unsafe { at.read_unaligned() })
    }
}

/// True if the byte at an address can be read. Where the kernel does not say so, as in a container that forbids the question,
/// the program is trusted.
fn has_memory(address: *const u8) -> bool {
    let mut byte = 0_u8;
    let to = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let from = libc::iovec { iov_base: address.cast_mut().cast::<c_void>(), iov_len: 1 };
    let process = i32::try_from(std::process::id()).unwrap_or_default();
    // SAFETY: the kernel writes one byte, for which there is room, and checks what it reads.
    let read = unsafe { libc::process_vm_readv(process, &raw const to, 1, &raw const from, 1, 0) };
    read == 1 || last_error() != Errno::FAULT
}

/// Strings of an array that ends with null; none of null, as for the kernel. `None` if there is no memory at the array or at a
/// string, which the kernel answers.
///
/// # Safety
/// The memory that is there is not changed while the result lives.
pub(super) unsafe fn strings<'a>(array: Strings) -> Option<Vec<&'a CStr>> {
    let (mut arrays, mut texts) = (Reader::default(), Reader::default());
    let mut found = Vec::new();
    let mut at = array;
    while !array.is_null() {
        // SAFETY: the caller's promise.
        let string = unsafe { arrays.address(at) }?;
        if string.is_null() {
            break;
        }
        // SAFETY: the caller's promise.
        found.push(unsafe { texts.string(string) }?);
        at = at.wrapping_add(1);
    }
    Some(found)
}

/// Path that a program gives; `None` of an address where it has no memory, which the kernel answers.
///
/// # Safety
/// The memory that is there is not changed while the result lives.
pub(super) unsafe fn path_at<'a>(path: *const c_char) -> Option<&'a Path> {
    // SAFETY: the caller's promise.
    let path = unsafe { Reader::default().string(path) }?;
    Some(Path::new(OsStr::from_bytes(path.to_bytes())))
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::*;

    #[test]
    fn exe_10_strings_end_with_null() {
        let words = [c"a=1", c"b"];
        let array = [words[0].as_ptr(), words[1].as_ptr(), ptr::null()];
        // SAFETY: such an array.
        assert_eq!(unsafe { strings(array.as_ptr()) }.unwrap(), words);
        // SAFETY: null.
        assert!(unsafe { strings(ptr::null()) }.unwrap().is_empty());
    }

    /// Two pages, of which the second one cannot be read, and the end of the first.
    fn end_of_memory() -> *mut u8 {
        let (len, flags) = (2 * PAGE_BYTES, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the kernel finds memory that nobody uses.
        let pages = unsafe { libc::mmap(ptr::null_mut(), len, access, flags, -1, 0) };
        assert_ne!(pages, libc::MAP_FAILED);
        let end = pages.cast::<u8>().wrapping_add(PAGE_BYTES);
        // SAFETY: the second of these pages.
        assert_eq!(unsafe { libc::mprotect(end.cast(), PAGE_BYTES, libc::PROT_NONE) }, 0);
        end
    }

    #[test]
    fn exe_10_strings_without_memory_are_none() {
        let end = end_of_memory();
        let last = end.wrapping_sub(2);
        // SAFETY: within the first page.
        unsafe { last.cast::<[u8; 2]>().write(*b"a\0") };
        // SAFETY: of these pages, nobody changes the first.
        assert_eq!(unsafe { path_at(last.cast()) }, Some(Path::new("a")));
        // SAFETY: as above.
        assert_eq!(unsafe { path_at(end.cast()) }, None);
        // SAFETY: within the first page.
        unsafe { last.cast::<[u8; 2]>().write(*b"ab") };
        for nowhere in
            [last, end, ptr::without_provenance_mut(1), ptr::without_provenance_mut(usize::MAX)]
        {
            // SAFETY: as above.
            assert_eq!(unsafe { path_at(nowhere.cast()) }, None, "{nowhere:?}");
            let array = [c"a".as_ptr(), nowhere.cast_const().cast(), ptr::null()];
            // SAFETY: as above.
            assert_eq!(unsafe { strings(array.as_ptr()) }, None, "{nowhere:?}");
            // SAFETY: as above.
            assert_eq!(unsafe { strings(nowhere.cast_const().cast()) }, None, "{nowhere:?}");
        }
        let endless = end.cast::<*const c_char>().wrapping_sub(1);
        // SAFETY: within the first page.
        unsafe { endless.write(c"a".as_ptr()) };
        // SAFETY: as above.
        assert_eq!(unsafe { strings(endless) }, None);
    }
}

//! execl and its siblings, whose strings are arguments of the call: these are gathered into an array for [`super::exec`].
//!
//! Rust cannot define functions with any number of arguments. So each is a few instructions, which store the registers of
//! arguments side by side, and pass their address, and that of the arguments on the stack, to a function of Rust.

use std::arch::naked_asm;
use std::cell::Cell;
use std::ffi::{c_char, c_int};

use super::exec::{execve, execvp};
use super::strings::Strings;

/// Arguments of a call in registers, of which the first is the path.
#[cfg(target_arch = "x86_64")]
const REGISTERS: usize = 6;
#[cfg(target_arch = "aarch64")]
const REGISTERS: usize = 8;

/// Arguments as the calling convention has them, one after the other.
struct Arguments {
    registers: Strings,
    stack: Strings,
    taken: usize,
}

impl Arguments {
    /// # Safety
    /// The call has this argument.
    unsafe fn next(&mut self) -> *const c_char {
        let at = match self.taken.checked_sub(REGISTERS) {
            None => self.registers.wrapping_add(self.taken),
            Some(on_stack) => self.stack.wrapping_add(on_stack),
        };
        self.taken += 1;
        // SAFETY: the caller's promise.
        unsafe { at.read() }
    }
}

thread_local! {
    /// Strings for the next program. Not freed by a child of `vfork`, whose memory is the parent's.
    static WORDS: Cell<Vec<*const c_char>> = const { Cell::new(Vec::new()) };
}

/// Runs a program by `run`, which gets the path, the strings up to null, and the rest of the arguments.
///
/// # Safety
/// The addresses are those of a call's arguments, of which one is null.
unsafe fn gathered(
    registers: Strings,
    stack: Strings,
    run: impl FnOnce(*const c_char, Strings, Arguments) -> c_int,
) -> c_int {
    let mut arguments = Arguments { registers, stack, taken: 0 };
    // SAFETY: the first argument.
    let path = unsafe { arguments.next() };
    let mut words = Vec::new();
    loop {
        // SAFETY: null was not found yet.
        words.push(unsafe { arguments.next() });
        if words.last().is_some_and(|word| word.is_null()) {
            break;
        }
    }
    let array = words.as_ptr();
    let words = Cell::new(words);
    // Not freed before the thread's next call: a borrow would not end in a child of `vfork`.
    if WORDS.try_with(|kept| kept.swap(&words)).is_err() {
        std::mem::forget(words.take());
    }
    run(path, array, arguments)
}

unsafe extern "C" {
    static environ: Strings;
}

unsafe extern "C" fn execl_gathered(registers: Strings, stack: Strings) -> c_int {
    // SAFETY: the promise of the caller of `execl`, and the program's own environment.
    let run = |path, words, _| unsafe { execve(path, words, environ) };
    // SAFETY: as above.
    unsafe { gathered(registers, stack, run) }
}

unsafe extern "C" fn execlp_gathered(registers: Strings, stack: Strings) -> c_int {
    // SAFETY: the promise of the caller of `execlp`.
    let run = |path, words, _| unsafe { execvp(path, words) };
    // SAFETY: as above.
    unsafe { gathered(registers, stack, run) }
}

unsafe extern "C" fn execle_gathered(registers: Strings, stack: Strings) -> c_int {
    let run = |path, words, mut rest: Arguments| {
        // SAFETY: the promise of the caller of `execle`: the environment comes behind null.
        let environment = unsafe { rest.next() }.cast();
        // SAFETY: as above.
        unsafe { execve(path, words, environment) }
    };
    // SAFETY: as above.
    unsafe { gathered(registers, stack, run) }
}

/// Functions of C that pass their arguments on to one of Rust.
macro_rules! with_arguments {
    ($($name:ident, $gathered:ident, $page:literal);* $(;)?) => {$(
        /// # Safety
        #[doc = concat!("As `", $page, "`.")]
        #[unsafe(naked)]
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub unsafe extern "C" fn $name() -> c_int {
            // The stack is aligned by 16 where a function is called.
            #[cfg(target_arch = "x86_64")]
            naked_asm!(
                "sub rsp, 56",
                "mov [rsp], rdi",
                "mov [rsp + 8], rsi",
                "mov [rsp + 16], rdx",
                "mov [rsp + 24], rcx",
                "mov [rsp + 32], r8",
                "mov [rsp + 40], r9",
                "mov rdi, rsp",
                "lea rsi, [rsp + 64]",
                "call {}",
                "add rsp, 56",
                "ret",
                sym $gathered,
            );
            #[cfg(target_arch = "aarch64")]
            naked_asm!(
                "stp x29, x30, [sp, -80]!",
                "mov x29, sp",
                "stp x0, x1, [sp, 16]",
                "stp x2, x3, [sp, 32]",
                "stp x4, x5, [sp, 48]",
                "stp x6, x7, [sp, 64]",
                "add x0, sp, 16",
                "add x1, sp, 80",
                "bl {}",
                "ldp x29, x30, [sp], 80",
                "ret",
                sym $gathered,
            );
        }
    )*};
}

with_arguments! {
    execl, execl_gathered, "execl(3)";
    execlp, execlp_gathered, "execlp(3)";
    execle, execle_gathered, "execle(3)";
}

#[cfg(test)]
mod tests {
    use std::ffi::{CStr, CString};
    use std::{ptr, slice};

    use super::*;

    #[test]
    fn exe_10_words_are_gathered() {
        let given: Vec<_> =
            (0..20).map(|index| CString::new(format!("{index}")).unwrap()).collect();
        for count in 1..given.len() {
            let mut all: Vec<_> = given[..count].iter().map(|word| word.as_ptr()).collect();
            all.extend([ptr::null(), c"behind".as_ptr()]);
            let stack = all.split_off(REGISTERS.min(all.len()));
            let result = |path: *const c_char, words: Strings, mut rest: Arguments| {
                // SAFETY: the array has the strings behind the path, and null.
                let words = unsafe { slice::from_raw_parts(words, count) };
                let found: Vec<_> = [&[path], words].concat();
                let expected = given[..count].iter().map(|word| word.as_ptr());
                assert!(found.into_iter().eq(expected.chain([ptr::null()])), "{count}");
                // SAFETY: the argument behind null.
                let behind = unsafe { rest.next() };
                // SAFETY: this string.
                assert_eq!(unsafe { CStr::from_ptr(behind) }, c"behind");
                7
            };
            // SAFETY: such arguments.
            assert_eq!(unsafe { gathered(all.as_ptr(), stack.as_ptr(), result) }, 7);
        }
    }
}

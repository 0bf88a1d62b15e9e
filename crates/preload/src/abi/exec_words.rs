//! execl and its siblings, whose strings are arguments of the call: these are gathered into an array for [`super::exec`].
//!
//! Rust cannot define functions with any number of arguments. So each is a few instructions, which store the registers of
//! arguments side by side, and pass their address, and that of the arguments on the stack, to a function of Rust.

use std::arch::naked_asm;
use std::cell::Cell;
use std::ffi::{c_char, c_int};
use std::ptr;

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

/// Strings of a call, null included, for which the stack has room: such a call needs no memory. `execl` and `execle` are
/// called in signal handlers, where none may be allocated (signal-safety(7)).
const ON_STACK: usize = 256;

thread_local! {
    /// Strings of a longer call. Not freed by a child of `vfork`, whose memory is the parent's, but by the thread's next call.
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
    let mut few = [ptr::null(); ON_STACK];
    let mut many = Vec::new();
    for count in 0_usize.. {
        // SAFETY: null was not found yet.
        let word = unsafe { arguments.next() };
        match few.get_mut(count) {
            Some(place) => *place = word,
            None if many.is_empty() => many.extend(few.into_iter().chain([word])),
            None => many.push(word),
        }
        if word.is_null() {
            break;
        }
    }
    if many.is_empty() {
        return run(path, few.as_ptr(), arguments);
    }
    let array = many.as_ptr();
    let many = Cell::new(many);
    match WORDS.try_with(|words| words.swap(&many)) {
        // Frees the array of the call before.
        Ok(()) => drop(many.take()),
        Err(_) => std::mem::forget(many.take()),
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
    use std::slice;

    use forebay_testkit::memory::{CountingAllocator, heap};

    use super::*;

    #[global_allocator]
    static ALLOCATOR: CountingAllocator = CountingAllocator;

    #[test]
    fn exe_10_words_are_gathered() {
        let given: Vec<_> =
            (0..2 * ON_STACK).map(|index| CString::new(format!("{index}")).unwrap()).collect();
        for count in (1..20).chain(ON_STACK - 2..ON_STACK + 3).chain([given.len()]) {
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

    /// A handler may have interrupted the allocator, and what a child of `vfork` allocates stays in its parent.
    #[test]
    fn exe_10_words_need_no_memory() {
        let mut words = vec![c"a".as_ptr(); ON_STACK + 1];
        words.push(ptr::null());
        let gather = |first: usize| {
            let (registers, stack) = words[first..].split_at(REGISTERS);
            let before = heap();
            // A program that runs does not come back.
            let run = |_: *const c_char, _: Strings, _: Arguments| {
                let now = heap();
                i32::try_from(now.bytes - before.bytes).unwrap()
            };
            // SAFETY: such arguments.
            let taken = unsafe { gathered(registers.as_ptr(), stack.as_ptr(), run) };
            (taken, heap().allocations - before.allocations)
        };
        assert_eq!(gather(1), (0, 0), "the longest for which the stack has room");
        let (taken, _) = gather(0);
        assert!(taken > 0);
        assert_eq!(gather(0).0, 0, "that of the call before was freed");
    }
}

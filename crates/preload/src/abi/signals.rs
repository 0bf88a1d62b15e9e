//! Handlers of signals, which run when the thread holds no lock of the library.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicUsize, Ordering};

use libc::{sighandler_t, siginfo_t, sigset_t, ucontext_t};
use rustix::io::Errno;
use rustix::process::getpid;
use rustix::thread::gettid;

use super::next::next;
use super::{answer_int, is_nowhere, last_error};
use crate::critical;
use crate::runtime::is_in_parents_memory;

/// Signals of the kernel: 1 to 64.
const SIGNALS_MAX: usize = 64;

/// Signals of what the thread itself does: they cannot wait.
const OF_THREAD: [c_int; 6] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS];

/// Flags that the kernel is not to see: with the second it would forget the handler of a signal that is held back, and with
/// the third call `handle` while that holds the signal back. The first it always sees.
const OWN_FLAGS: c_int = libc::SA_SIGINFO | libc::SA_RESETHAND | libc::SA_NODEFER;

/// Bits of `HANDLERS` for these flags, above all addresses of a program.
const IS_SIGINFO: usize = 1 << 61;
const IS_RESET: usize = 1 << 62;
const IS_NOT_DEFERRED: usize = 1 << 63;
const ADDRESS: usize = IS_SIGINFO - 1;

/// The program's handlers, with their flags; 0 without one.
static HANDLERS: [AtomicUsize; SIGNALS_MAX + 1] = [const { AtomicUsize::new(0) }; SIGNALS_MAX + 1];

type Handler = unsafe extern "C" fn(c_int, *mut siginfo_t, *mut c_void);
type Action = libc::sigaction;

/// Handler in the kernel of all signals that the program handles.
unsafe extern "C" fn handle(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    if u32::try_from(signal).is_ok_and(critical::hold) {
        // SAFETY: the kernel's arguments.
        let is_sent = unsafe { send_anew(signal, info, context) };
        if is_sent {
            return;
        }
    }
    let Some(slot) = slot(signal) else { return };
    let entry = slot.load(Ordering::Acquire);
    if entry & IS_RESET != 0 {
        let mut default = zeroed_action();
        // SAFETY: the structure outlives the call, which writes to it.
        unsafe { next_sigaction()(signal, std::ptr::null(), &raw mut default) };
        default.sa_sigaction = libc::SIG_DFL;
        default.sa_flags = default.sa_flags & !OWN_FLAGS | flags_of(entry);
        // SAFETY: the structure outlives the call.
        unsafe { next_sigaction()(signal, &raw const default, std::ptr::null_mut()) };
    }
    if entry & IS_NOT_DEFERRED != 0 {
        unblock(1 << (signal - 1));
    }
    let address = std::ptr::with_exposed_provenance::<c_void>(entry & ADDRESS);
    if address.is_null() {
        return; // none was ever set
    }
    // SAFETY: the program has set the address of a function of this type, or of one that reads fewer arguments.
    let handler = unsafe { std::mem::transmute::<*const c_void, Handler>(address) };
    // SAFETY: the kernel's arguments, of which the handler finds as many as its flags say.
    unsafe { handler(signal, info, context) };
}

/// Blocks a signal from the end of its handler on, and sends it to this thread. False if that failed.
///
/// # Safety
/// The arguments are those of a handler.
unsafe fn send_anew(signal: c_int, info: *mut siginfo_t, context: *mut c_void) -> bool {
    let (process, thread) = (getpid().as_raw_pid(), gettid().as_raw_pid());
    // SAFETY: the call reads the information, as the kernel has written it.
    let sent = unsafe { libc::syscall(libc::SYS_rt_tgsigqueueinfo, process, thread, signal, info) };
    if sent < 0 {
        return false;
    }
    let context = context.cast::<ucontext_t>();
    // SAFETY: the kernel's context.
    let mask = unsafe { &raw mut (*context).uc_sigmask };
    // SAFETY: this mask is the thread's once the handler has returned.
    unsafe { libc::sigaddset(mask, signal) };
    true
}

/// Lets signals come to this thread that are blocked, by bits.
pub(crate) fn unblock(signals: u64) {
    let mut set = MaybeUninit::<sigset_t>::uninit();
    // SAFETY: the call initialises the set.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    for signal in (1..=64).filter(|signal| signals & 1 << (signal - 1) != 0) {
        // SAFETY: the set was initialised above.
        unsafe { libc::sigaddset(set.as_mut_ptr(), signal) };
    }
    // SAFETY: as above; the mask before is not asked for.
    unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, set.as_ptr(), std::ptr::null_mut()) };
}

/// # Safety
/// As `sigaction(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn sigaction(
    signal: c_int,
    action: *const Action,
    before: *mut Action,
) -> c_int {
    let next = next_sigaction();
    let Some(slot) = slot(signal) else {
        // SAFETY: the caller's promise.
        return unsafe { next(signal, action, before) };
    };
    let entry_before = slot.load(Ordering::Acquire);
    let mut own = None;
    if !is_nowhere(action) {
        // SAFETY: the caller's promise.
        let mut wanted = unsafe { action.read() };
        // A child that uses its parent's memory has handlers of its own.
        if is_handler(wanted.sa_sigaction) && !is_in_parents_memory() {
            slot.store(entry_of(&wanted), Ordering::Release);
            wanted.sa_sigaction = handle as *const () as sighandler_t;
            wanted.sa_flags = wanted.sa_flags & !OWN_FLAGS | libc::SA_SIGINFO;
        }
        own = Some(wanted);
    }
    let told = own.as_ref().map_or(action, std::ptr::from_ref);
    // SAFETY: the caller's promise, for its structures or a copy.
    let result = unsafe { next(signal, told, before) };
    if result != 0 {
        let error = last_error();
        slot.store(entry_before, Ordering::Release);
        return answer_int(Err(error));
    }
    if !before.is_null() {
        // SAFETY: the call has written to the structure.
        let told = unsafe { &mut *before };
        if told.sa_sigaction == handle as *const () as sighandler_t {
            told.sa_sigaction = entry_before & ADDRESS;
            told.sa_flags = told.sa_flags & !OWN_FLAGS | flags_of(entry_before);
        }
    }
    result
}

/// # Safety
/// As `signal(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn signal(signal: c_int, handler: sighandler_t) -> sighandler_t {
    // SAFETY: the caller's promise.
    unsafe { set_handler(signal, handler, libc::SA_RESTART) }
}

/// # Safety
/// As `bsd_signal(3)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn bsd_signal(number: c_int, handler: sighandler_t) -> sighandler_t {
    // SAFETY: the caller's promise; both are one function.
    unsafe { signal(number, handler) }
}

/// # Safety
/// As `sysv_signal(3)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn sysv_signal(signal: c_int, handler: sighandler_t) -> sighandler_t {
    // SAFETY: the caller's promise.
    unsafe { set_handler(signal, handler, libc::SA_RESETHAND | libc::SA_NODEFER) }
}

/// # Safety
/// As `sysv_signal(3)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn __sysv_signal(signal: c_int, handler: sighandler_t) -> sighandler_t {
    // SAFETY: the caller's promise; both are one function.
    unsafe { sysv_signal(signal, handler) }
}

/// # Safety
/// As `signal(2)`.
unsafe fn set_handler(signal: c_int, handler: sighandler_t, flags: c_int) -> sighandler_t {
    if handler == libc::SIG_ERR || !(1..=64).contains(&signal) {
        answer_int(Err(Errno::INVAL));
        return libc::SIG_ERR;
    }
    let (mut action, mut before) = (zeroed_action(), zeroed_action());
    (action.sa_sigaction, action.sa_flags) = (handler, flags);
    if flags & libc::SA_NODEFER == 0 {
        // SAFETY: zeroes are the empty set.
        unsafe { libc::sigaddset(&raw mut action.sa_mask, signal) };
    }
    // SAFETY: the structures outlive the call.
    let result = unsafe { sigaction(signal, &raw const action, &raw mut before) };
    if result == 0 { before.sa_sigaction } else { libc::SIG_ERR }
}

/// Ignores the signal of a pipe or a socket that nobody reads (SIGPIPE).
pub(crate) fn ignore_broken_pipes() {
    let mut ignored = zeroed_action();
    ignored.sa_sigaction = libc::SIG_IGN;
    // SAFETY: the structure outlives the call.
    unsafe { next_sigaction()(libc::SIGPIPE, &raw const ignored, std::ptr::null_mut()) };
}

fn next_sigaction() -> unsafe extern "C" fn(c_int, *const Action, *mut Action) -> c_int {
    next!(sigaction(c_int, *const Action, *mut Action) -> c_int)
}

/// Place of a signal's handler; `None` of those that are left to the kernel.
fn slot(signal: c_int) -> Option<&'static AtomicUsize> {
    let slot = HANDLERS.get(usize::try_from(signal).ok()?)?;
    (signal > 0 && !OF_THREAD.contains(&signal)).then_some(slot)
}

fn is_handler(handler: sighandler_t) -> bool {
    !matches!(handler, libc::SIG_DFL | libc::SIG_IGN | libc::SIG_ERR)
}

fn entry_of(action: &Action) -> usize {
    let bit = |flag, bit| if action.sa_flags & flag != 0 { bit } else { 0 };
    action.sa_sigaction
        | bit(libc::SA_SIGINFO, IS_SIGINFO)
        | bit(libc::SA_RESETHAND, IS_RESET)
        | bit(libc::SA_NODEFER, IS_NOT_DEFERRED)
}

fn flags_of(entry: usize) -> c_int {
    let flag = |bit, flag| if entry & bit != 0 { flag } else { 0 };
    flag(IS_SIGINFO, libc::SA_SIGINFO)
        | flag(IS_RESET, libc::SA_RESETHAND)
        | flag(IS_NOT_DEFERRED, libc::SA_NODEFER)
}

/// The default action.
fn zeroed_action() -> Action {
    // SAFETY: zeroes are a value of the structure: the default action, no flags and no signals in its mask.
    unsafe { MaybeUninit::<Action>::zeroed().assume_init() }
}

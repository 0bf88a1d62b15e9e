//! Handlers of signals, which run when the thread holds no lock of the library.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering};

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

/// Signals of what the thread itself does: they cannot wait. After that of `abort` no call goes on.
const OF_THREAD: [c_int; 7] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGILL,
    libc::SIGTRAP,
    libc::SIGSYS,
    libc::SIGABRT,
];

/// First real-time signal of the kernel. From this one on, several of one number may wait.
const FIRST_QUEUED: c_int = 32;

/// Code of a signal that stands for [`EARLIER`].
const STANDS_FOR_EARLIER: c_int = -0x0f0b_a700;

/// Flags that the kernel is not to see: with the second it would forget the handler of a signal that is held back, and with
/// the third call `handle` while that holds the signal back. The first it always sees.
const OWN_FLAGS: c_int = libc::SA_SIGINFO | libc::SA_RESETHAND | libc::SA_NODEFER;

/// Bits of `HANDLERS` for these flags, above all addresses of a program.
const IS_SIGINFO: usize = 1 << 61;
const IS_RESET: usize = 1 << 62;
const IS_NOT_DEFERRED: usize = 1 << 63;
/// The third one's effect, which the program's mask may undo.
const IS_UNBLOCKED: usize = 1 << 60;
const ADDRESS: usize = IS_UNBLOCKED - 1;

/// The program's handlers, with their flags; 0 without one.
static HANDLERS: [AtomicUsize; SIGNALS_MAX + 1] = [const { AtomicUsize::new(0) }; SIGNALS_MAX + 1];

/// Signals that interrupt calls though their handlers were set by `signal`, by bits (`siginterrupt`).
static INTERRUPTING: AtomicU64 = AtomicU64::new(0);

/// Earliest of a thread's real-time signals that were held back, of one number: others of it may wait already, which are to come
/// after it. Each takes the place of the one that comes before it.
struct Earlier {
    /// 0 for none.
    signal: AtomicI32,
    /// Written and read by the handler of this signal, in which it is blocked.
    info: UnsafeCell<MaybeUninit<siginfo_t>>,
}

thread_local! {
    static EARLIER: Earlier = const {
        Earlier { signal: AtomicI32::new(0), info: UnsafeCell::new(MaybeUninit::uninit()) }
    };
}

/// Disposition of `sigset`: the signal is blocked (bits/signum-generic.h).
const SIG_HOLD: sighandler_t = 2;

type Handler = unsafe extern "C" fn(c_int, *mut siginfo_t, *mut c_void);
type Action = libc::sigaction;

/// Handler in the kernel of all signals that the program handles.
unsafe extern "C" fn handle(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel's arguments.
    let hold = || critical::is_inside() && unsafe { hold_back(signal, info, context) };
    if super::keeping_errno(hold) {
        return;
    }
    // SAFETY: as above.
    unsafe { put_in_order(signal, info) };
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
    if entry & IS_UNBLOCKED != 0 {
        unblock(bit_of(signal));
    }
    let address = std::ptr::with_exposed_provenance::<c_void>(entry & ADDRESS);
    if address.is_null() {
        return; // none was ever set
    }
    // SAFETY: the program has set the address of a function of this type, or of one that reads fewer arguments.
    let handler = unsafe { std::mem::transmute::<*const c_void, Handler>(address) };
    // SAFETY: the kernel's arguments, of which the handler finds as many as its flags say.
    critical::run_handler(bit_of(signal), || unsafe { handler(signal, info, context) });
}

/// Blocks a signal from the end of its handler on, and sends it to this thread. False if that failed.
///
/// # Safety
/// The arguments are those of a handler.
unsafe fn hold_back(signal: c_int, info: *mut siginfo_t, context: *mut c_void) -> bool {
    // SAFETY: the caller's promise.
    let is_sent = unsafe { send_in_order(signal, info) };
    if !is_sent {
        return false;
    }
    critical::hold(bit_of(signal));
    let context = context.cast::<ucontext_t>();
    // SAFETY: the kernel's context.
    let mask = unsafe { &raw mut (*context).uc_sigmask };
    // SAFETY: this mask is the thread's once the handler has returned.
    unsafe { libc::sigaddset(mask, signal) };
    true
}

/// Sends a signal to this thread, or another one that stands for it.
///
/// # Safety
/// As for [`hold_back`].
unsafe fn send_in_order(signal: c_int, info: *mut siginfo_t) -> bool {
    let claim = |earlier: &Earlier| {
        let (relaxed, is_queued) = (Ordering::Relaxed, signal >= FIRST_QUEUED);
        is_queued && earlier.signal.compare_exchange(0, signal, relaxed, relaxed).is_ok()
    };
    if !EARLIER.with(claim) {
        // SAFETY: the caller's promise.
        return unsafe { send_anew(signal, info) };
    }
    // SAFETY: the caller's promise.
    let first = unsafe { info.read() };
    let mut stands = first;
    stands.si_code = STANDS_FOR_EARLIER;
    // SAFETY: a copy of the kernel's information, with another code.
    let is_sent = unsafe { send_anew(signal, &raw mut stands) };
    EARLIER.with(|earlier| {
        if is_sent {
            // SAFETY: the thread's own, and the handlers of other signals leave it alone.
            unsafe { earlier.info.get().write(MaybeUninit::new(first)) };
        } else {
            earlier.signal.store(0, Ordering::Relaxed);
        }
    });
    is_sent
}

/// Sends a signal to this thread, with this information. False if that failed.
///
/// # Safety
/// The information is the kernel's.
unsafe fn send_anew(signal: c_int, info: *mut siginfo_t) -> bool {
    let (process, thread) = (getpid().as_raw_pid(), gettid().as_raw_pid());
    // SAFETY: the call reads the information.
    let sent = unsafe { libc::syscall(libc::SYS_rt_tgsigqueueinfo, process, thread, signal, info) };
    sent >= 0
}

/// Gives a handler the information of the signal that came first, whichever was sent anew.
///
/// # Safety
/// As for [`hold_back`].
unsafe fn put_in_order(signal: c_int, info: *mut siginfo_t) {
    EARLIER.with(|earlier| {
        if earlier.signal.load(Ordering::Relaxed) != signal {
            return;
        }
        // SAFETY: the thread's own, written before the signal was held back, and left alone by handlers of others.
        let first = unsafe { earlier.info.get().read() };
        // SAFETY: the caller's promise.
        let this = unsafe { info.read() };
        if this.si_code == STANDS_FOR_EARLIER {
            earlier.signal.store(0, Ordering::Relaxed);
        } else {
            // SAFETY: as above.
            unsafe { earlier.info.get().write(MaybeUninit::new(this)) };
        }
        // SAFETY: initialised, as above.
        let first = unsafe { first.assume_init() };
        // SAFETY: the caller's promise.
        unsafe { info.write(first) };
    });
}

/// Forgets the earliest signal in a child, to which none of its parent's come.
pub(super) fn forget_earlier() {
    EARLIER.with(|earlier| earlier.signal.store(0, Ordering::Relaxed));
}

/// Lets signals come to this thread that are blocked, by bits.
pub(crate) fn unblock(signals: u64) {
    change_mask(libc::SIG_UNBLOCK, signals);
}

/// Changes the thread's mask. Returns the one before.
fn change_mask(how: c_int, signals: u64) -> sigset_t {
    let (mut set, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: the call initialises the set.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    for signal in (1..=64).filter(|signal| signals & bit_of(*signal) != 0) {
        // SAFETY: the set was initialised above.
        unsafe { libc::sigaddset(set.as_mut_ptr(), signal) };
    }
    // SAFETY: as above; the other one is room for a set.
    unsafe { libc::pthread_sigmask(how, set.as_ptr(), before.as_mut_ptr()) };
    // SAFETY: the call has written it: `how` is valid.
    unsafe { before.assume_init() }
}

/// True if the handlers of all of these signals have `SA_RESTART`.
pub(crate) fn restart(signals: u64) -> bool {
    let restarts = |signal: c_int| {
        let mut action = zeroed_action();
        // SAFETY: the structure outlives the call, which writes to it.
        unsafe { next_sigaction()(signal, std::ptr::null(), &raw mut action) };
        action.sa_flags & libc::SA_RESTART != 0
    };
    (1..=64).filter(|signal| signals & bit_of(*signal) != 0).all(restarts)
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
            slot.store(entry_of(signal, &wanted), Ordering::Release);
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
    let interrupts = INTERRUPTING.load(Ordering::Relaxed) & bit_of(signal) != 0;
    // SAFETY: the caller's promise.
    unsafe { set_handler(signal, handler, if interrupts { 0 } else { libc::SA_RESTART }) }
}

/// # Safety
/// As `ssignal(3)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn ssignal(number: c_int, handler: sighandler_t) -> sighandler_t {
    // SAFETY: the caller's promise; both are one function.
    unsafe { signal(number, handler) }
}

/// # Safety
/// As `siginterrupt(3)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn siginterrupt(signal: c_int, interrupts: c_int) -> c_int {
    let next = next!(siginterrupt(c_int, c_int) -> c_int);
    // SAFETY: the caller's promise.
    let result = unsafe { next(signal, interrupts) };
    match (result, interrupts) {
        (0, 0) => INTERRUPTING.fetch_and(!bit_of(signal), Ordering::Relaxed),
        (0, _) => INTERRUPTING.fetch_or(bit_of(signal), Ordering::Relaxed),
        _ => 0,
    };
    result
}

/// # Safety
/// As `sigset(3)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn sigset(signal: c_int, handler: sighandler_t) -> sighandler_t {
    let (mut action, mut before) = (zeroed_action(), zeroed_action());
    action.sa_sigaction = handler;
    let (told, how) = match handler {
        SIG_HOLD => (std::ptr::null(), libc::SIG_BLOCK),
        _ => (&raw const action, libc::SIG_UNBLOCK),
    };
    // SAFETY: the structures outlive the call.
    if handler == libc::SIG_ERR || unsafe { sigaction(signal, told, &raw mut before) } != 0 {
        answer_int(Err(Errno::INVAL)); // the only error
        return libc::SIG_ERR;
    }
    let mask = change_mask(how, bit_of(signal));
    // SAFETY: the set is initialised.
    let was_blocked = unsafe { libc::sigismember(&raw const mask, signal) } == 1;
    if was_blocked { SIG_HOLD } else { before.sa_sigaction }
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

/// Signals by which a process is asked to end.
const ENDS: [c_int; 4] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT];

/// Calls `act` while the process ends: another signal that asks for the end has no effect, unless the program has a handler
/// for it. SIGPIPE is ignored from then on.
pub(crate) fn while_ending<T>(act: impl FnOnce() -> T) -> T {
    let set = |signal, action: &Action| {
        let mut before = zeroed_action();
        // SAFETY: the structures outlive the call.
        unsafe { next_sigaction()(signal, &raw const *action, &raw mut before) };
        before
    };
    let mut ignored = zeroed_action();
    ignored.sa_sigaction = libc::SIG_IGN;
    set(libc::SIGPIPE, &ignored);
    // A handler, which programs that are started meanwhile do not inherit.
    let mut passed_over = zeroed_action();
    passed_over.sa_flags = libc::SA_RESTART;
    passed_over.sa_sigaction = pass_over as extern "C" fn(c_int) as libc::sighandler_t;
    let before = ENDS.map(|signal| {
        let before = set(signal, &passed_over);
        if before.sa_sigaction != libc::SIG_DFL {
            set(signal, &before);
        }
        before
    });
    let result = act();
    for (signal, before) in ENDS.into_iter().zip(before) {
        if before.sa_sigaction == libc::SIG_DFL {
            set(signal, &before);
        }
    }
    result
}

extern "C" fn pass_over(_: c_int) {}

fn next_sigaction() -> unsafe extern "C" fn(c_int, *const Action, *mut Action) -> c_int {
    next!(sigaction(c_int, *const Action, *mut Action) -> c_int)
}

/// Place of a signal's handler; `None` of those that are left to the kernel.
fn slot(signal: c_int) -> Option<&'static AtomicUsize> {
    let slot = HANDLERS.get(usize::try_from(signal).ok()?)?;
    (signal > 0 && !OF_THREAD.contains(&signal)).then_some(slot)
}

/// Bit of a signal; 0 of a number that is none.
fn bit_of(signal: c_int) -> u64 {
    let bit = |signal: u32| 1u64.checked_shl(signal.checked_sub(1)?);
    u32::try_from(signal).ok().and_then(bit).unwrap_or(0)
}

fn is_handler(handler: sighandler_t) -> bool {
    !matches!(handler, libc::SIG_DFL | libc::SIG_IGN | libc::SIG_ERR)
}

fn entry_of(signal: c_int, action: &Action) -> usize {
    let bit = |flag, bit| if action.sa_flags & flag != 0 { bit } else { 0 };
    // SAFETY: the set is the program's, as initialised as its flags.
    let is_in_mask = unsafe { libc::sigismember(&raw const action.sa_mask, signal) } == 1;
    action.sa_sigaction
        | bit(libc::SA_SIGINFO, IS_SIGINFO)
        | bit(libc::SA_RESETHAND, IS_RESET)
        | bit(libc::SA_NODEFER, IS_NOT_DEFERRED)
        | if is_in_mask { 0 } else { bit(libc::SA_NODEFER, IS_UNBLOCKED) }
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

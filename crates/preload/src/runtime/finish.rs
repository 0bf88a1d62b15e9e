//! End of the process: its connections are closed, and peers get what was written.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use forebay::net::Net;
use forebay_sys::hidden::Hidden;
use rustix::io::Errno;

use super::fork::is_in_parents_memory;
use super::{is_running, running};
use crate::critical::outside;
use crate::membership::Membership;
use crate::relay::{self, RelayOwner};
use crate::socket::Socket;
use crate::{abi, control, passing, table};

/// Time that the end of a process waits for peers, at most.
pub(crate) const FINISH_MAX: Duration = Duration::from_secs(10);
const FINISH_LOOK: Duration = Duration::from_millis(1);
/// Time for which calls of other threads are held after it: a process that lives longer runs destructors, which may wait for
/// these threads.
const HOLD_AFTER_FINISH: Duration = Duration::from_millis(100);

/// True once a thread ends the process, and in that thread.
static IS_ENDING: AtomicBool = AtomicBool::new(false);
/// True once peers have what was written, or the time for it is over.
static IS_WAIT_OVER: AtomicBool = AtomicBool::new(false);
thread_local! {
    static ENDS_PROCESS: Cell<bool> = const { Cell::new(false) };
}

/// Closes the connections that are open, as the kernel does when the process ends, and waits until peers have what was
/// written. Signal handlers may call it: another thread does the work.
pub(crate) fn finish() {
    if is_in_parents_memory() || !is_running() {
        return;
    }
    control::remove();
    // Neither what threads and handlers write, nor another signal, may end the process in the midst of this.
    abi::while_ending(close_connections);
}

/// Closes the connections on another thread, and waits for it.
fn close_connections() {
    let Ok(runtime) = running() else { return };
    ENDS_PROCESS.set(true);
    IS_ENDING.store(true, Ordering::Release);
    if rustix::io::write(&runtime.finisher, &1u64.to_ne_bytes()).is_err() {
        return IS_ENDING.store(false, Ordering::Release);
    }
    let began = Instant::now();
    while !runtime.has_finished.load(Ordering::Acquire) && began.elapsed() < FINISH_MAX {
        thread::sleep(FINISH_LOOK);
    }
    IS_WAIT_OVER.store(true, Ordering::Release);
}

/// Holds a call while another thread ends the process, with which it would end in the kernel: its socket has ended before.
pub(crate) fn hold_at_end() {
    if IS_ENDING.load(Ordering::Acquire) && !ENDS_PROCESS.get() && !is_in_parents_memory() {
        outside(|_| {
            while !IS_WAIT_OVER.load(Ordering::Acquire) {
                thread::sleep(FINISH_LOOK);
            }
            thread::sleep(HOLD_AFTER_FINISH);
        });
    }
}

/// Begins anew in a child, which has none of the threads.
pub(super) fn forked() {
    IS_ENDING.store(false, Ordering::Relaxed);
    IS_WAIT_OVER.store(false, Ordering::Relaxed);
    ENDS_PROCESS.set(false);
}

/// Waits for the end of the process, and then for the peers of its connections.
pub(super) fn await_end(
    finisher: &Hidden,
    has_finished: &AtomicBool,
    net: &Net,
    membership: Option<&Membership>,
    relay_owner: Option<&RelayOwner>,
) {
    let mut count = [0; 8];
    while rustix::io::read(finisher, &mut count) == Err(Errno::INTR) {}
    passing::end_adopting();
    while passing::is_some_adopting() {
        thread::sleep(FINISH_LOOK);
    }
    for number in table::within(0, u32::MAX) {
        let Some(socket) = table::end(number) else { continue };
        // Threads that wait may keep a socket, which is then not dropped.
        match &*socket {
            _ if socket.is_of_parent() => {}
            Socket::Listener(listener) => listener.end_here(),
            Socket::Stream(stream) => {
                if stream.may_have_copies() {
                    abi::make_unusable(number);
                }
                stream.end_here();
            }
            Socket::Udp(_) => {} // sends at once, and the membership ends with the process
        }
        socket.let_go();
    }
    if relay_owner.is_some_and(RelayOwner::has_any) {
        relay::close_own_copies();
    }
    while passing::any_leaving() || relay_owner.is_some_and(RelayOwner::has_any) {
        thread::sleep(FINISH_LOOK);
    }
    membership.into_iter().for_each(Membership::end);
    while net.unfinished_connections() > 0 {
        thread::sleep(FINISH_LOOK);
    }
    has_finished.store(true, Ordering::Release);
}

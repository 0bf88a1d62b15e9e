//! Listeners that a process keeps as it runs another program (`execve`), as the kernel's sockets are kept.
//!
//! The program is about to lose all that the library has: only its descriptors without `FD_CLOEXEC` stay. So one more is made,
//! an end of a socket pair with messages in its queue: the files by which processes find each other, and of each listener the
//! kernel's socket. An environment variable names this end. The library, loaded into the next program, takes the messages,
//! and makes the listeners that no engine serves yet, as a child has them after a fork.

mod image; //   programs that the library is not loaded into
mod message; // messages in the queue

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use forebay_sys::hidden::Hidden;
use rustix::fs::fstat;
use rustix::io::{Errno, FdFlags, fcntl_dupfd_cloexec, fcntl_getfd, fcntl_setfd};
use rustix::net::sockopt::{set_socket_send_buffer_size, set_socket_send_buffer_size_force};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use self::message::{receive, send};
use crate::engine_lock::{EngineLock, FILES, LAYOUT};
use crate::listener::{self, KeptListener};
use crate::option::SocketOption;
use crate::runtime::{self, is_in_parents_memory};
use crate::socket::Socket;
use crate::{abi, relay, table};

/// Environment variable that names the end: by the process, the number, and the file.
pub(crate) const VARIABLE: &str = "FOREBAY_KEPT";

/// Lowest number of the end, if the process may have such.
const NUMBER_FROM: RawFd = 512;

/// Room in the queue, of which each message takes about 1 KiB.
const QUEUE_BYTES: usize = 1 << 22;

/// Listeners for the next program of this process, in the queue of this end of a socket pair, with which they end.
pub(crate) struct KeptSockets(OwnedFd);

impl KeptSockets {
    /// Listeners for the program at a path, if it is to have some. One that can have none is told.
    pub(crate) fn for_program(path: impl FnOnce() -> Option<PathBuf>) -> Option<Self> {
        if !listener::exist() {
            return None;
        }
        let kept = kept_listeners();
        if kept.is_empty() {
            return None;
        }
        let with_obstacle = |path: PathBuf| image::obstacle(&path).map(|why| (path, why));
        if let Some((path, why)) = path().and_then(with_obstacle) {
            report_lost(&path, why, &kept);
            return None;
        }
        let packed = Self::of(&kept);
        packed.inspect_err(|error| report_unpacked(*error, &kept)).ok()
    }

    fn of(kept: &[KeptListener]) -> Result<Self, Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (near, far) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        // Ignored: then there is room for fewer. Without CAP_NET_ADMIN `net.core.wmem_max` limits it.
        let _ = set_socket_send_buffer_size_force(&near, QUEUE_BYTES)
            .or_else(|_| set_socket_send_buffer_size(&near, QUEUE_BYTES));
        let far = fcntl_dupfd_cloexec(&far, NUMBER_FROM).unwrap_or(far);
        let lock = runtime::shared_lock();
        let files = lock.as_ref().map(|lock| lock.files());
        let number = lock.as_ref().map_or(0, |lock| lock.number());
        send(near.as_fd(), &head(number), files.iter().flatten().copied())?;
        for listener in kept {
            listener.with_files(|files| {
                send(near.as_fd(), &listener.to_bytes(), files.iter().copied())
            })?;
        }
        Ok(Self(far))
    }

    /// Environment variable that names the end, with its value.
    pub(crate) fn variable(&self) -> Option<String> {
        let file = fstat(&self.0).ok()?.st_ino;
        let number = abi::number(self.0.as_fd());
        Some(format!("{VARIABLE}={}:{number}:{file}", process::id()))
    }

    /// Lets the next program have the end.
    pub(crate) fn keep(&self) {
        // Ignored: it is open, and then as lost as without it.
        let _ = fcntl_setfd(&self.0, FdFlags::empty());
    }
}

/// First message: what the library must have alike to use the files.
fn head(number: u32) -> Vec<u8> {
    let [words, table] = LAYOUT;
    let text = format!("forebay {} {words} {table}\n", env!("CARGO_PKG_VERSION"));
    [&number.to_ne_bytes()[..], text.as_bytes()].concat()
}

/// Listeners of which this process has numbers without `FD_CLOEXEC`.
fn kept_listeners() -> Vec<KeptListener> {
    let mut seen = BTreeSet::new();
    let mut kept = Vec::new();
    let open = is_in_parents_memory().then(relay::open_numbers);
    for number in table::within(0, u32::MAX) {
        let Some(found) = table::look(number) else { continue };
        if let Socket::Listener(listener) = &**found.shared()
            && seen.insert(Arc::as_ptr(found.shared()))
            && !listener.has_ended()
        {
            // A child of `vfork` has descriptors of its own, and no table.
            let numbers = match &open {
                Some(open) => open.clone(),
                None => table::numbers_of(found.shared()),
            };
            kept.extend(KeptListener::of(found.shared(), numbers));
        }
    }
    kept
}

/// True for a number that the next program of this process has.
pub(crate) fn outlives_exec(number: RawFd) -> bool {
    let flags = |file: BorrowedFd<'_>| fcntl_getfd(file);
    abi::with_number(number, flags).is_ok_and(|flags| !flags.contains(FdFlags::CLOEXEC))
}

/// Makes the listeners that this process had as the program before. True if there are some.
pub(crate) fn restore(variable: &str) -> bool {
    let Some(end) = end_of(variable) else { return false };
    match restore_from(end.as_fd()) {
        Ok(count) => count > 0,
        Err(error) => {
            report!(
                "forebay: process {} cannot use the listeners that it had before it ran this program: {error}; let the \
                 program have more descriptors (ulimit -n), and start all of it with one version of forebay",
                process::id()
            );
            false
        }
    }
}

/// The end that a variable names. `None` of one that is another process's, or that was used.
fn end_of(variable: &str) -> Option<OwnedFd> {
    let mut words = variable.split(':');
    let is_own = words.next()?.parse() == Ok(process::id());
    let number = words.next()?.parse().ok().filter(|number: &RawFd| *number >= 0)?;
    let file = words.next()?.parse::<u64>().ok()?;
    let is_it = |end: BorrowedFd<'_>| {
        let has = |name, value| abi::option_value(end, SocketOption::of_socket(name)) == Ok(value);
        fstat(end).is_ok_and(|about| about.st_ino == file)
            && has(libc::SO_DOMAIN, libc::AF_UNIX)
            && has(libc::SO_TYPE, libc::SOCK_SEQPACKET)
    };
    if !is_own || !abi::with_number(number, is_it) {
        return None;
    }
    // The number is closed, whatever comes.
    let end = abi::with_number(number, |end| fcntl_dupfd_cloexec(end, 0));
    abi::with_number(number, abi::close_forgotten);
    end.ok()
}

fn restore_from(end: BorrowedFd<'_>) -> Result<usize, Errno> {
    let (first, files) = receive(end)?.ok_or(Errno::BADMSG)?;
    let number = first.first_chunk().map_or(0, |number| u32::from_ne_bytes(*number));
    if first != head(number) || runtime::configuration().is_none() {
        return Err(Errno::BADMSG);
    }
    if !files.is_empty() {
        let files = files.into_iter().map(Hidden::new).collect::<Result<Vec<_>, _>>()?;
        let files: [Hidden; FILES] = files.try_into().map_err(|_| Errno::BADMSG)?;
        let lock = EngineLock::of_files(files, number);
        runtime::keep_lock(
            lock.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?,
        );
    }
    let mut count = 0;
    while let Some((bytes, files)) = receive(end)? {
        count += usize::from(listener::restore(&bytes, files)?);
    }
    Ok(count)
}

fn report_lost(path: &Path, why: &str, kept: &[KeptListener]) {
    static IS_REPORTED: AtomicBool = AtomicBool::new(false);
    if !IS_REPORTED.swap(true, Ordering::Relaxed) {
        report!(
            "forebay: process {} leaves its listeners {:?} to {}, which gets no connection by them, as it {why}: let it run \
             behind a TUN device (forebay run DEV --to tun:NAME), or set FD_CLOEXEC if it is not to have them",
            process::id(),
            addresses(kept),
            path.display()
        );
    }
}

fn report_unpacked(error: Errno, kept: &[KeptListener]) {
    report!(
        "forebay: process {} cannot leave its listeners {:?} to the program that it runs: {error}; let it have more \
         descriptors (ulimit -n), fewer listeners, or a longer queue (sysctl net.core.wmem_max)",
        process::id(),
        addresses(kept)
    );
}

fn addresses(kept: &[KeptListener]) -> Vec<SocketAddr> {
    kept.iter().map(KeptListener::local).collect()
}

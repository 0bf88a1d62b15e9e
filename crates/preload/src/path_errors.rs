//! ICMP errors of UDP sockets. The engine takes only the packets to its ports, so the errors come to the kernel: its socket
//! at the same port gets them, and a thread passes them on.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;

use forebay_stack::socket::queue::{Enqueue, SocketQueue};
use forebay_sys::hidden::Hidden;
use forebay_sys::signals::with_all_blocked;
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::sockopt::socket_error;

use crate::abi;
use crate::runtime::{FORKS_MAX, forks};

/// Watches of this process and of its ancestors, by number of forks: a child has none of the threads.
static WATCHES: [OnceLock<Result<Arc<Watch>, Errno>>; FORKS_MAX] =
    [const { OnceLock::new() }; FORKS_MAX];

/// Sockets of the kernel that are watched.
struct Watch {
    epoll: Hidden,
    sockets: Mutex<Watched>,
}

/// Sockets of ours, by the descriptors of the kernel's sockets at their ports.
type Watched = HashMap<RawFd, (Arc<SocketQueue>, Arc<PathError>)>;

/// Error that waits for a call.
#[derive(Default)]
pub(crate) struct PathError {
    errno: AtomicI32,
    /// True once the process sends or waits by the socket: before, the error is another's that has a copy of it.
    is_awaited: AtomicBool,
}

impl PathError {
    /// Keeps an error for the next call on the socket with this queue.
    pub(crate) fn set_pending(&self, error: Errno, queue: &SocketQueue) {
        self.errno.store(error.raw_os_error(), Ordering::Release);
        if queue.refuse() == Enqueue::WakeReader {
            queue.wake_reader();
        }
    }

    /// Begins to take errors from the kernel's socket.
    pub(crate) fn begin(&self) {
        self.is_awaited.store(true, Ordering::Release);
    }

    /// Takes the error; that of a refusal if no other was left.
    pub(crate) fn take(&self) -> Errno {
        match self.errno.swap(0, Ordering::AcqRel) {
            0 => Errno::CONNREFUSED,
            number => Errno::from_raw_os_error(number),
        }
    }
}

/// Watches the kernel's socket at the port of one of ours, from now on.
///
/// # Errors
/// If the process has no descriptors left, or no threads.
pub(crate) fn watch(
    kernels: BorrowedFd<'_>,
    queue: &Arc<SocketQueue>,
    error: &Arc<PathError>,
) -> Result<(), Errno> {
    let slot = WATCHES.get(forks()).ok_or(Errno::NODEV)?;
    let watch = slot.get_or_init(Watch::begin).as_ref().map_err(|error| *error)?;
    let watched = (Arc::clone(queue), Arc::clone(error));
    watch.sockets().insert(abi::number(kernels), watched);
    let number = u64::try_from(kernels.as_raw_fd()).unwrap_or_default();
    let data = epoll::EventData::new_u64(number);
    // Errors are always reported; once, since the queue of errors may keep them.
    match epoll::add(&watch.epoll, kernels, data, epoll::EventFlags::ET) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Ends the watch of the kernel's socket, which is about to be closed.
pub(crate) fn unwatch(kernels: BorrowedFd<'_>) {
    if let Some(Ok(watch)) = WATCHES.get(forks()).and_then(OnceLock::get) {
        let mut sockets = watch.sockets();
        // Ignored: it was not watched. A copy of it may stay open in another process.
        if sockets.remove(&abi::number(kernels)).is_some() {
            let _ = epoll::delete(&watch.epoll, kernels);
        }
    }
}

impl Watch {
    fn begin() -> Result<Arc<Self>, Errno> {
        let epoll = Hidden::new(epoll::create(epoll::CreateFlags::CLOEXEC)?)?;
        let watch = Arc::new(Self { epoll, sockets: Mutex::default() });
        let own = Arc::clone(&watch);
        let run = move || while own.pass_on().is_ok() {};
        let thread = thread::Builder::new().name("forebay-errors".into());
        with_all_blocked(|| thread.spawn(run)).map_err(|_| Errno::AGAIN)?;
        Ok(watch)
    }

    /// Waits for errors, and passes them on.
    ///
    /// # Errors
    /// If the program has closed the descriptor by a system call of its own.
    fn pass_on(&self) -> Result<(), Errno> {
        let mut events = Vec::with_capacity(16);
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), None) {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok(()),
            Err(error) => return Err(error),
        }
        for event in events {
            let sockets = self.sockets();
            let number = RawFd::try_from(event.data.u64()).unwrap_or(-1);
            let Some((queue, error)) = sockets.get(&number) else { continue };
            if !error.is_awaited.load(Ordering::Acquire) {
                continue;
            }
            // Open: `unwatch` removes it under this lock before it is closed.
            let taken = abi::with_number(number, |kernels| socket_error(kernels));
            if let Ok(Err(errno)) = taken {
                error.set_pending(errno, queue);
            }
        }
        Ok(())
    }

    fn sockets(&self) -> MutexGuard<'_, Watched> {
        self.sockets.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

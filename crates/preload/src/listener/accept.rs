//! Connections that a listener accepts, and their numbers.

use std::net::SocketAddr;
use std::os::fd::{AsFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;

use forebay::net::TcpStream;
use forebay_sys::readiness::readiness;
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::io::{Errno, fcntl_dupfd_cloexec};

use super::Listener;
use crate::critical::outside;
use crate::errno::unconnected_errno;
use crate::passing::Adopting;
use crate::runtime::FINISH_MAX;
use crate::socket::{CallWait, Socket};
use crate::stream::Stream;
use crate::{abi, relay, table};

impl Listener {
    /// Takes a connection. `socket` is the listener as the table has it. Does not return once the process ends, as in the kernel:
    /// the program could end in another way then.
    ///
    /// # Errors
    /// As `accept4(2)`.
    pub(crate) fn accept(
        &self,
        socket: &Arc<Socket>,
        flags: i32,
    ) -> Result<(RawFd, SocketAddr), Errno> {
        let accepted = self.accept_if_any(socket, flags);
        if accepted == Err(Errno::INVAL) && Adopting::are_over() {
            outside(|_| thread::sleep(FINISH_MAX));
        }
        accepted
    }

    fn accept_if_any(
        &self,
        socket: &Arc<Socket>,
        flags: i32,
    ) -> Result<(RawFd, SocketAddr), Errno> {
        if flags & !(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC) != 0 {
            return Err(Errno::INVAL);
        }
        let mut wait = CallWait::default();
        let served = loop {
            match self.serve(socket) {
                Err(Errno::BUSY) if self.is_nonblocking.load(Ordering::Relaxed) => {
                    return Err(Errno::AGAIN);
                }
                Err(Errno::BUSY) => await_turn(socket, &mut wait)?,
                served => break served?,
            }
        };
        let (mut place, mut numbers) = (None, (-1, None));
        let (tcp, peer, _change) = loop {
            let change = relay::change();
            let accepted = served.tcp.accept_reserving(|| {
                // First: those of the library come behind it.
                let number = fcntl_dupfd_cloexec(&self.inherited.kernel, 0)?;
                if !table::has_slot(abi::number(number.as_fd())) {
                    return Err(Errno::MFILE.into());
                }
                place = Some(number);
                let (setter, descriptor) = readiness()?;
                numbers = (abi::number(descriptor.as_fd()), setter.number());
                Ok((setter, descriptor))
            });
            match accepted.map_err(|error| unconnected_errno(&error)) {
                Err(Errno::AGAIN) if self.has_ended() => return Err(Errno::INVAL),
                Err(Errno::AGAIN) if !self.is_nonblocking.load(Ordering::Relaxed) => {
                    drop(change);
                    wait.readable(served.readiness()?, false)?;
                }
                accepted => break accepted.map(|(tcp, peer)| (tcp, peer, change))?,
            }
        };
        let place = place.unwrap_or_else(|| unreachable!("reserved for each connection"));
        Ok((self.enter(tcp, place, flags, numbers)?, peer))
    }

    /// Gives a connection its number, the lowest that was free, as the kernel does.
    fn enter(
        &self,
        tcp: TcpStream,
        place: OwnedFd,
        flags: i32,
        numbers: (RawFd, Option<RawFd>),
    ) -> Result<RawFd, Errno> {
        let number = abi::number(place.as_fd());
        let (inherited, is_ipv6) = (Arc::clone(&self.inherited), self.local.is_ipv6());
        let stream = Stream::accepted(tcp, inherited, is_ipv6, numbers)?;
        let is_nonblocking = flags & libc::SOCK_NONBLOCK != 0;
        stream.set_nonblocking(is_nonblocking);
        let readiness = stream.readiness()?;
        let status = if is_nonblocking { OFlags::NONBLOCK } else { OFlags::empty() };
        fcntl_setfl(readiness, status)?;
        abi::replace(number, readiness, flags & libc::SOCK_CLOEXEC != 0)?;
        let socket = Arc::new(Socket::Stream(stream));
        relay::keep(&socket);
        table::insert(number, socket);
        Ok(place.into_raw_fd())
    }
}

/// Waits until a listener is served and has a connection.
fn await_turn(socket: &Arc<Socket>, wait: &mut CallWait) -> Result<(), Errno> {
    let number = table::numbers_of(socket).first().copied().ok_or(Errno::BADF)?;
    abi::with_number(number, |descriptor| wait.readable(descriptor, false))
}

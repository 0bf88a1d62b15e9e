//! Writes to a socket, which also open a connection.

use std::net::SocketAddr;

use forebay_stack::tcp::{TcpError, WriteFlags};

use crate::calls::{Flags, Shim, State};
use crate::errno::Errno;

impl Shim {
    /// Writes all bytes, or as many as there is room for without waiting, and opens the connection if there is none
    /// (`MSG_FASTOPEN`).
    pub(crate) fn write_opening(
        &self,
        fd: i32,
        bytes: &[u8],
        flags: Flags,
        peer: SocketAddr,
    ) -> Result<usize, Errno> {
        let (waits, timeout_us) =
            self.waiting(fd, flags.never_waits, |entry| entry.send_timeout_us)?;
        self.lock().host.follow_sysctls();
        let ends = |state: &State| (SocketAddr::new(state.host.address(), 0), peer);
        let with_syn = WriteFlags { waits, ..flags.of_write() };
        let first = self.wait(false, None, |state| {
            let socket = state.entry(fd)?.socket;
            let (ends, mtu_bytes) = (ends(state), state.host.mtu_bytes());
            let begin = state.host.call(|tcp, out| {
                tcp.connect_with_data(socket, ends, mtu_bytes, bytes, with_syn, out)
            });
            Ok(begin?)
        });
        let is_opening = |error: &Errno| error.0 == libc::EINPROGRESS || error.0 == libc::EALREADY;
        let written = match first {
            Err(error) if waits && is_opening(&error) => 0,
            other => other?,
        };
        if !waits {
            return Ok(written);
        }
        let opened = self.wait(true, timeout_us, |state| {
            let socket = state.entry(fd)?.socket;
            let (ends, mtu_bytes) = (ends(state), state.host.mtu_bytes());
            match state.host.call(|tcp, out| tcp.connect(socket, ends, mtu_bytes, out)) {
                Err(TcpError::InProgress | TcpError::Already) => Err(Errno::AGAIN),
                Ok(()) | Err(TcpError::IsConnected) => Ok(()),
                Err(error) => Err(error.into()),
            }
        });
        match opened {
            Err(Errno::AGAIN) if written > 0 => return Ok(written),
            Err(Errno::AGAIN) => return Err(Errno(libc::EINPROGRESS)),
            other => other?,
        }
        match bytes.get(written..).filter(|rest| !rest.is_empty()) {
            Some(rest) => {
                Ok(written + self.write_from(fd, (bytes, bytes.len() - rest.len()), flags, &[])?)
            }
            None => Ok(written),
        }
    }

    /// Writes all bytes, or as many as there is room for without waiting. Once it waits, it goes on when a poll
    /// would tell so. Packets end at `ends`, places in the bytes.
    pub(crate) fn write(
        &self,
        fd: i32,
        bytes: &[u8],
        flags: Flags,
        ends: &[usize],
    ) -> Result<usize, Errno> {
        let peer = {
            let mut state = self.lock();
            let socket = state.entry(fd)?.socket;
            let waits_for_data = state.host.tcp.waits_for_data(socket)?;
            state.host.tcp.flow(socket).ok().filter(|_| waits_for_data).map(|flow| flow.theirs)
        };
        match peer {
            Some(peer) => self.write_opening(fd, bytes, flags, peer),
            None => self.write_from(fd, (bytes, 0), flags, ends),
        }
    }

    /// Writes bytes from a place on. Those before it were written by the same call. Returns the number of the others.
    fn write_from(
        &self,
        fd: i32,
        (bytes, begin): (&[u8], usize),
        flags: Flags,
        ends: &[usize],
    ) -> Result<usize, Errno> {
        let (waits, timeout_us) =
            self.waiting(fd, flags.never_waits, |entry| entry.send_timeout_us)?;
        let (mut written, mut is_waiting) = (begin, false);
        let result = self.wait(waits, timeout_us, |state| {
            let socket = state.entry(fd)?.socket;
            if std::mem::replace(&mut is_waiting, true) && !state.readiness(fd)?.writable {
                return Err(Errno::AGAIN);
            }
            if written > begin && state.readiness(fd)?.failed {
                // The next call tells the error.
                return Err(Errno(libc::EPIPE));
            }
            loop {
                let end = ends.iter().copied().find(|&end| end > written);
                let flags = WriteFlags {
                    is_rest: written > 0,
                    waits: waits || end.is_some(),
                    ends_packet: end.is_some(),
                    more_follows: flags.more_follows || end.is_some(),
                    ..flags.of_write()
                };
                let part = &bytes[written..end.unwrap_or(bytes.len())];
                written += state.host.call(|tcp, out| tcp.write(socket, part, flags, out))?;
                if written == bytes.len() {
                    return Ok(());
                }
                if end.is_none_or(|end| written < end) {
                    return Err(Errno::AGAIN);
                }
            }
        });
        if written < bytes.len() {
            self.lock().entry(fd)?.full_writes += 1;
        }
        match result {
            Err(error) if written == begin => Err(error),
            _ => Ok(written - begin),
        }
    }
}

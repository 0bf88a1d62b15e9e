//! Bytes from and to descriptors of the kernel: `splice`, and `sendfile`, which packetdrill calls itself.

use std::io::{ErrorKind, Read};
use std::os::fd::IntoRawFd;
use std::os::unix::net::UnixStream;

use crate::calls::{Flags, Shim};
use crate::errno::Errno;

/// Bytes of a pipe that are moved at once.
pub(crate) const PIPE_BYTES: usize = 65_536;

impl Shim {
    /// Makes a descriptor of a socket. What the kernel writes to it (`sendfile`) is written to our socket.
    pub(crate) fn new_descriptor(&self) -> Result<i32, Errno> {
        let failed = |_| Errno(libc::EMFILE);
        let (outside, inside) = UnixStream::pair().map_err(failed)?;
        inside.set_nonblocking(true).map_err(failed)?;
        let fd = outside.into_raw_fd();
        self.lock().inlets.insert(fd, inside);
        Ok(fd)
    }

    /// Writes what the kernel was told to send.
    pub(crate) fn follow_inlets(&self) {
        let mut found = Vec::new();
        for (&fd, inlet) in &mut self.lock().inlets {
            let mut bytes = vec![0; PIPE_BYTES];
            match inlet.read(&mut bytes) {
                Ok(len) if len > 0 => found.push((fd, bytes[..len].to_vec())),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                // Its descriptor was closed.
                Ok(_) | Err(_) => {}
            }
        }
        for (fd, bytes) in found {
            // The call that sent them is over.
            let _ = self.write(fd, &bytes, Flags { never_waits: true, ..Flags::default() }, &[]);
        }
    }

    pub(crate) fn is_socket(&self, fd: i32) -> bool {
        self.lock().entry(fd).is_ok()
    }

    /// Bytes of a socket for a pipe: as many as there are up to an urgent one (`tcp_splice_read`).
    pub(crate) fn take_for_pipe(
        &self,
        fd: i32,
        len: usize,
        flags: Flags,
    ) -> Result<Vec<u8>, Errno> {
        let (waits, timeout_us) =
            self.waiting(fd, flags.never_waits, |entry| entry.receive_timeout_us)?;
        self.wait(waits, timeout_us, |state| {
            let socket = state.entry(fd)?.socket;
            let mut taken = Vec::new();
            loop {
                let there = state.host.tcp.fill(socket);
                let now = there.get(..len - taken.len()).unwrap_or(there).to_vec();
                if now.is_empty() {
                    break;
                }
                state.host.call(|tcp, out| tcp.consume(socket, now.len(), out))?;
                taken.extend(now);
            }
            let unread = state.host.tcp.info(socket)?.map_or(0, |info| info.unread_bytes);
            if !taken.is_empty() || unread > 0 || len == 0 {
                return Ok(taken);
            }
            state.host.call(|tcp, out| tcp.read(socket, &mut [0], out))?;
            Ok(taken)
        })
    }
}

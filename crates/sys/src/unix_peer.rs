//! User and process at the other end of a Unix socket.

use std::os::fd::{AsFd, AsRawFd};
use std::{fs, io};

use rustix::process::Pid;

/// Peer of a connected Unix socket, as it was when it connected or listened (`SO_PEERCRED`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UnixPeer {
    /// Number of the user; `u32::MAX` without a peer.
    pub user: u32,
    /// Process, unless it is in a PID namespace that this process cannot see: the kernel reports 0 then.
    pub process: Option<Pid>,
}

impl UnixPeer {
    /// True if the process is stopped, as by SIGSTOP or by a debugger; false if nothing is known of it.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        let Some(process) = self.process else { return false };
        let stat = fs::read(format!("/proc/{}/stat", process.as_raw_nonzero())).unwrap_or_default();
        // The name, in parentheses, may contain any byte; the state is behind it.
        let name_end = stat.iter().rposition(|byte| *byte == b')');
        let state = name_end.and_then(|end| stat.get(end + 2));
        matches!(state, Some(b'T' | b't'))
    }
}

/// Peer of a connected Unix socket.
///
/// # Errors
/// If the descriptor is not that of a socket.
pub fn unix_peer(stream: impl AsFd) -> io::Result<UnixPeer> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len_bytes = libc::socklen_t::try_from(size_of::<libc::ucred>()).unwrap_or(0);
    // SAFETY: the kernel writes at most `len_bytes` into `peer`, and every value is valid there.
    let answer = unsafe {
        libc::getsockopt(
            stream.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut len_bytes,
        )
    };
    match answer {
        0 => Ok(UnixPeer { user: peer.uid, process: Pid::from_raw(peer.pid) }),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::net::UnixStream;
    use std::process::Command;

    use rustix::process::{Signal, geteuid, getpid, kill_process};

    use super::*;

    #[test]
    fn promise_3_stopped_peer_is_seen() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let process = Pid::from_child(&child);
        let peer = UnixPeer { user: 0, process: Some(process) };
        assert!(!peer.is_stopped());
        kill_process(process, Signal::STOP).unwrap();
        while !peer.is_stopped() {}
        kill_process(process, Signal::CONT).unwrap();
        while peer.is_stopped() {}
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!peer.is_stopped() && !UnixPeer { user: 0, process: None }.is_stopped());
    }

    #[test]
    fn promise_8_peer_of_pair_is_this_process() {
        let (one, _other) = UnixStream::pair().unwrap();
        let this = UnixPeer { user: geteuid().as_raw(), process: Some(getpid()) };
        assert_eq!(unix_peer(&one).unwrap(), this);
        // The peer of an unconnected socket has no process, as one in another namespace.
        let alone = rustix::net::socket(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::STREAM,
            None,
        );
        assert_eq!(unix_peer(alone.unwrap()).unwrap().process, None);
        unix_peer(File::open("/dev/null").unwrap()).unwrap_err();
    }
}

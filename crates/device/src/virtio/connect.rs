//! Connection of front end and back end: a Unix socket that one of them creates.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use forebay_sys::error::{Error, Result};
use forebay_sys::private_listener::{PrivateListener, address_of};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::ioctl_fionbio;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::config::virtio::Role;

/// Description of the socket in errors.
const WHAT: &str = "the vhost-user socket";

/// Maximum number of connections that were closed before they were accepted, and are passed over at
/// once: more than a listener's backlog holds.
const CLOSED_MAX: usize = 128;

/// Error if all connections were closed before they were accepted.
const CLOSED: &str = "one has connected, and closed the connection at once";

/// Front end's side of the socket.
#[derive(Debug)]
pub(super) enum Endpoint {
    /// The back end listens.
    Connect(SocketAddrUnix),
    /// The front end listens.
    Listen(PrivateListener),
}

impl Endpoint {
    /// Opens the endpoint. Returns a connection too if a back end is listening already.
    ///
    /// # Errors
    /// If no back end can ever connect: the path is not a socket, or may not be used. A missing
    /// listener is not an error.
    pub(super) fn open(path: &Path, role: Role) -> Result<(Self, Option<UnixStream>)> {
        match role {
            Role::Connect => {
                let address = address_of(path, WHAT)?;
                let stream = first_connection(path, &address)?;
                Ok((Self::Connect(address), stream))
            }
            Role::Listen => Ok((Self::Listen(listen(path)?), None)),
        }
    }

    /// Listens at `path` again if the socket's file is there no more, as scripts remove it before
    /// they start a back end.
    ///
    /// # Errors
    /// The reason why no back end can connect now: the system refuses, or another file is there.
    pub(super) fn restore(&mut self, path: &Path) -> Result<()> {
        if let Self::Listen(listener) = self
            && !listener.is_at_its_path()
        {
            *listener = listen(path)?;
        }
        Ok(())
    }

    /// Connects to or accepts a back end without waiting.
    ///
    /// # Errors
    /// The reason why there is no connection now. It is no [absence](is_absence) if there were only
    /// connections that were closed already: one that comes and goes again and again is to be met after
    /// a pause.
    pub(super) fn try_meet(&self) -> io::Result<UnixStream> {
        match self {
            Self::Connect(address) => try_connect(address),
            // An accepted socket is blocking, whatever the listener is (`accept4(2)`).
            Self::Listen(listener) => {
                let accept = || listener.socket().accept().map(|(stream, _)| stream);
                let mut stream = accept()?;
                for _ in 0..CLOSED_MAX {
                    if !is_closed(&stream) {
                        break;
                    }
                    // The back end has gone meanwhile: another one may wait behind it.
                    stream = accept().map_err(|error| match is_absence(&error) {
                        true => io::Error::new(ErrorKind::ConnectionAborted, CLOSED),
                        false => error,
                    })?;
                }
                Ok(stream)
            }
        }
    }

    /// Returns a descriptor that becomes readable when a back end connects; `None` if the front end
    /// must poll.
    pub(super) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Connect(_) => None,
            Self::Listen(listener) => Some(listener.socket().as_fd()),
        }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if let Self::Listen(listener) = self {
            listener.remove();
        }
    }
}

/// Listens at `path`, for connections that are accepted without waiting.
fn listen(path: &Path) -> Result<PrivateListener> {
    let listener = PrivateListener::bind(path, WHAT)?;
    listener.socket().set_nonblocking(true).map_err(Error::file("create", path))?;
    Ok(listener)
}

/// Checks that a back end may listen at `path`, and connects to it if it does.
fn first_connection(path: &Path, address: &SocketAddrUnix) -> Result<Option<UnixStream>> {
    match fs::metadata(path) {
        Ok(metadata) if !metadata.file_type().is_socket() => {
            return Err(Error::Setting {
                what: WHAT,
                value: path.display().to_string(),
                why: "there is a file that is not a socket".to_owned(),
            });
        }
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let above = above(path);
            // A back end may still create the socket.
            return match fs::metadata(&above).map_err(Error::file("look into", &above))?.is_dir() {
                true => Ok(None),
                false => Err(Error::file("look into", above)(ErrorKind::NotADirectory.into())),
            };
        }
        Err(error) => return Err(Error::file("connect to", path)(error)),
    }
    match try_connect(address) {
        Ok(stream) => Ok(Some(stream)),
        Err(error) if is_absence(&error) => Ok(None),
        Err(error) => Err(Error::file("connect to", path)(error)),
    }
}

/// True if an error means that no process listens, or that the listener's backlog is full.
pub(super) fn is_absence(error: &io::Error) -> bool {
    use ErrorKind::{ConnectionRefused, NotFound, WouldBlock};
    [ConnectionRefused, NotFound, WouldBlock].contains(&error.kind())
}

/// True if the other side has closed the connection already.
fn is_closed(stream: &UnixStream) -> bool {
    let mut watched = [PollFd::new(stream, PollFlags::RDHUP)];
    poll(&mut watched, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

/// Connects, if that is possible without waiting.
fn try_connect(address: &SocketAddrUnix) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, address)?;
    ioctl_fionbio(&socket, false)?;
    Ok(socket.into())
}

fn above(path: &Path) -> PathBuf {
    match path.parent() {
        Some(above) if !above.as_os_str().is_empty() => above.to_owned(),
        _ => PathBuf::from("."),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::fs::MetadataExt;

    use super::*;

    /// A back end that was restarted again and again while another one was there.
    #[test]
    fn closed_connections_are_passed_over() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("v.sock");
        let (endpoint, _) = Endpoint::open(&path, Role::Listen).unwrap();
        let connect = || UnixStream::connect(&path).unwrap();
        (0..20).for_each(|_| drop(connect()));
        let mut alive = connect();
        alive.write_all(&[7]).unwrap();
        drop(connect());
        let mut said = [0];
        endpoint.try_meet().unwrap().read_exact(&mut said).unwrap();
        assert_eq!(said, [7]);
        assert!(!is_absence(&endpoint.try_meet().unwrap_err()), "met again after a pause");
        assert!(is_absence(&endpoint.try_meet().unwrap_err()));
    }

    #[test]
    fn removed_socket_is_listened_at_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("v.sock");
        let (mut endpoint, _) = Endpoint::open(&path, Role::Listen).unwrap();
        let first = fs::metadata(&path).unwrap().ino();
        endpoint.restore(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().ino(), first, "kept while it is there");
        fs::remove_file(&path).unwrap();
        endpoint.restore(&path).unwrap();
        let _back_end = UnixStream::connect(&path).unwrap();
        endpoint.try_meet().unwrap();
        // Files of others stay.
        fs::remove_file(&path).unwrap();
        fs::write(&path, "another's").unwrap();
        endpoint.restore(&path).unwrap_err();
        drop(endpoint);
        assert_eq!(fs::read(&path).unwrap(), b"another's");
    }
}

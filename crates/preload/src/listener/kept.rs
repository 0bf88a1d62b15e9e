//! Listeners that a process keeps as it runs another program.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

use forebay_device::rx_filter::FilterProtocol;
use forebay_sys::hidden::Hidden;
use rustix::fs::fstat;
use rustix::io::Errno;
use rustix::net::getsockname;
use rustix::net::sockopt::socket_acceptconn;

use super::{Copies, Listener};
use crate::runtime::is_taken;
use crate::socket::Socket;
use crate::{abi, kept, table};

/// Device and number of a file.
type FileId = (u64, u64);

/// Most numbers of one listener that are kept.
const NUMBERS_MAX: usize = 1 << 10;

/// Listener that the next program of this process is to have.
pub(crate) struct KeptListener {
    socket: Arc<Socket>,
    backlog: u32,
    /// File at its numbers.
    file: FileId,
    numbers: Vec<RawFd>,
}

impl KeptListener {
    /// Listener as the next program has it by some of these numbers; `None` if it has none.
    pub(crate) fn of(socket: &Arc<Socket>, mut numbers: Vec<RawFd>) -> Option<Self> {
        let Socket::Listener(listener) = &**socket else { return None };
        let file = listener.file()?;
        let is_kept = |number: &RawFd| {
            kept::outlives_exec(*number) && abi::with_number(*number, file_of) == Some(file)
        };
        numbers.retain(is_kept);
        numbers.truncate(NUMBERS_MAX);
        let this = Self { socket: Arc::clone(socket), backlog: listener.backlog, file, numbers };
        (!this.numbers.is_empty()).then_some(this)
    }

    fn listener(&self) -> &Listener {
        match &*self.socket {
            Socket::Listener(listener) => listener,
            _ => unreachable!("made of a listener"),
        }
    }

    pub(crate) fn local(&self) -> SocketAddr {
        self.listener().local
    }

    /// Lends the files that go with it.
    pub(crate) fn with_files<T>(&self, act: impl FnOnce(&[BorrowedFd<'_>]) -> T) -> T {
        let copies = self.listener().copies();
        let mut files = vec![self.listener().kernel()];
        files.extend(copies.iter().flat_map(Copies::ends));
        act(&files)
    }

    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = self.backlog.to_ne_bytes().to_vec();
        bytes.extend_from_slice(&self.file.0.to_ne_bytes());
        bytes.extend_from_slice(&self.file.1.to_ne_bytes());
        self.numbers.iter().for_each(|number| bytes.extend_from_slice(&number.to_ne_bytes()));
        bytes
    }
}

/// Backlog, file and numbers of a message.
fn read(bytes: &[u8]) -> Option<(u32, FileId, impl Iterator<Item = RawFd>)> {
    let (backlog, rest) = bytes.split_first_chunk()?;
    let (device, rest) = rest.split_first_chunk()?;
    let (inode, rest) = rest.split_first_chunk()?;
    let file = (u64::from_ne_bytes(*device), u64::from_ne_bytes(*inode));
    let numbers = rest.as_chunks().0.iter().map(|number| RawFd::from_ne_bytes(*number));
    Some((u32::from_ne_bytes(*backlog), file, numbers.filter(|number| *number >= 0)))
}

/// Makes a listener of its message and files, at the numbers that have its file. False if it is none of ours any more.
///
/// # Errors
/// If the process has no descriptors left.
pub(crate) fn restore(bytes: &[u8], files: Vec<OwnedFd>) -> Result<bool, Errno> {
    let mut files = files.into_iter();
    let (Some((backlog, file, numbers)), Some(kernel)) = (read(bytes), files.next()) else {
        return Err(Errno::BADMSG);
    };
    let ends = files.map(Hidden::new).collect::<Result<Vec<_>, _>>()?;
    let copies =
        <[Hidden; 2]>::try_from(ends).ok().map(|[write, read]| Copies::of_ends(write, read));
    let numbers: Vec<_> =
        numbers.filter(|number| abi::with_number(*number, file_of) == Some(file)).collect();
    let Ok(local) = SocketAddr::try_from(getsockname(&kernel)?) else { return Ok(false) };
    if !is_taken(FilterProtocol::Tcp, local)
        || !abi::is_plain(kernel.as_fd(), FilterProtocol::Tcp)
        || !socket_acceptconn(&kernel)?
    {
        return Ok(false);
    }
    abi::prepare_to_close();
    let kernel = Hidden::new(kernel)?;
    for number in &numbers {
        abi::replace(*number, kernel.as_fd(), false)?;
    }
    let listener = Listener::unserved(kernel, local, backlog, copies)?;
    let socket = Arc::new(Socket::Listener(listener));
    let numbers = numbers.into_iter().filter(|number| table::has_slot(*number));
    numbers.for_each(|number| table::insert(number, Arc::clone(&socket)));
    Ok(true)
}

impl Listener {
    /// File at the listener's numbers.
    fn file(&self) -> Option<FileId> {
        if let Some(served) = &*self.served.load() {
            return file_of(served.readiness().ok()?);
        }
        match &*self.placeholder() {
            Some((_, descriptor)) => file_of(descriptor.as_fd()),
            None => file_of(self.kernel()),
        }
    }
}

fn file_of(file: BorrowedFd<'_>) -> Option<FileId> {
    fstat(file).ok().map(|about| (about.st_dev, about.st_ino))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exe_10_listeners_are_read_as_written() {
        let bytes = [
            &7_u32.to_ne_bytes()[..],
            &8_u64.to_ne_bytes(),
            &9_u64.to_ne_bytes(),
            &3_i32.to_ne_bytes(),
            &(-1_i32).to_ne_bytes(),
            &5_i32.to_ne_bytes(),
        ]
        .concat();
        let (backlog, file, numbers) = read(&bytes).unwrap();
        assert_eq!((backlog, file, numbers.collect::<Vec<_>>()), (7, (8, 9), vec![3, 5]));
        for len in 0..20 {
            assert!(read(&bytes[..len]).is_none());
        }
        assert_eq!(read(&bytes[..23]).unwrap().2.count(), 0);
    }
}

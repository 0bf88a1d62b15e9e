//! Bytes between a connection and the pair of sockets that carries them. They wait in the buffers of both alone.

use std::io::{self, ErrorKind, Read};
use std::net::Shutdown as Side;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use forebay::net::TcpStream;
use forebay_stack::tcp::WriteFlags;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};

/// Bytes that are copied at a time.
pub(super) const CHUNK_BYTES: usize = 64 << 10;

/// Copies of one relay in each direction, after which others have their turn.
const CHUNKS_MAX: usize = 16;

/// Bytes of a connection, as a relay uses them. No call waits.
pub(super) trait Connection {
    /// Copies received bytes, and leaves them there. 0 at the end.
    fn peek(&self, room: &mut [u8]) -> io::Result<usize>;
    fn read(&self, room: &mut [u8]) -> io::Result<usize>;
    fn write(&self, bytes: &[u8]) -> io::Result<usize>;
    /// Sends the end of the bytes.
    fn end_writing(&self);
}

impl Connection for TcpStream {
    fn peek(&self, room: &mut [u8]) -> io::Result<usize> {
        self.peek(room)
    }

    fn read(&self, room: &mut [u8]) -> io::Result<usize> {
        Read::read(&mut &*self, room)
    }

    fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        self.write_with(bytes, WriteFlags::default())
    }

    fn end_writing(&self) {
        // Ignored: a connection that has ended sends no end.
        let _ = self.shutdown(Side::Write);
    }
}

/// Directions of a relay that have ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Directions {
    /// No bytes follow for the program.
    pub(super) has_peer_ended: bool,
    /// No bytes follow for the peer.
    pub(super) has_program_ended: bool,
    /// The connection has failed. The program gets what has come before.
    pub(super) has_failed: bool,
}

/// State of a relay after bytes were copied.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Pumped {
    /// All that can be copied has been.
    Quiet,
    /// Others have their turn first.
    More,
    /// The program has closed its last copy, or both directions have ended.
    Closed,
    /// The program has closed its last copy with bytes unread.
    Reset,
    /// The connection has failed.
    Failed,
}

/// Outcome of one direction's copy.
#[derive(PartialEq, Eq)]
enum Copied {
    Nothing,
    Some,
    Over(Pumped),
}

/// Copies bytes in both directions, as long as there are some, and room for them.
pub(super) fn pump(
    connection: &impl Connection,
    end: BorrowedFd<'_>,
    directions: &mut Directions,
    buffer: &mut [u8],
) -> Pumped {
    for _ in 0..CHUNKS_MAX {
        let down = to_program(connection, end, directions, buffer);
        let up = to_peer(connection, end, directions, buffer);
        match (up, down) {
            (Copied::Over(over), _) | (_, Copied::Over(over)) => return over,
            _ if directions.has_peer_ended && directions.has_program_ended => {
                return Pumped::Closed;
            }
            (Copied::Nothing, Copied::Nothing) => return Pumped::Quiet,
            _ => {}
        }
    }
    Pumped::More
}

fn to_program(
    connection: &impl Connection,
    end: BorrowedFd<'_>,
    directions: &mut Directions,
    buffer: &mut [u8],
) -> Copied {
    if directions.has_peer_ended {
        return Copied::Nothing;
    }
    let len = match connection.peek(buffer) {
        Ok(len) => len,
        Err(error) if error.kind() == ErrorKind::WouldBlock => return Copied::Nothing,
        Err(_) => return Copied::Over(Pumped::Failed),
    };
    if len == 0 && directions.has_failed {
        return Copied::Over(Pumped::Failed);
    }
    if len == 0 {
        // Ignored: the program has closed its end.
        let _ = shutdown(end, Shutdown::Write);
        directions.has_peer_ended = true;
        return Copied::Some;
    }
    let bytes = buffer.get(..len).unwrap_or_default();
    match send(end, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
        Ok(sent) => consume(sent, buffer, |room| connection.read(room)),
        Err(Errno::AGAIN | Errno::NOBUFS | Errno::INTR) => return Copied::Nothing,
        // The program reads no more. As in the kernel, what the peer sends then stays where it is.
        Err(_) => directions.has_peer_ended = true,
    }
    Copied::Some
}

fn to_peer(
    connection: &impl Connection,
    end: BorrowedFd<'_>,
    directions: &mut Directions,
    buffer: &mut [u8],
) -> Copied {
    if directions.has_program_ended {
        return if has_hung_up(end) { Copied::Over(Pumped::Closed) } else { Copied::Nothing };
    }
    let len = match recv(end, &mut *buffer, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok((len, _)) => len,
        Err(Errno::AGAIN | Errno::INTR) => return Copied::Nothing,
        Err(_) => return Copied::Over(Pumped::Reset),
    };
    if len == 0 {
        if has_hung_up(end) {
            return Copied::Over(Pumped::Closed);
        }
        connection.end_writing();
        directions.has_program_ended = true;
        return Copied::Some;
    }
    match connection.write(buffer.get(..len).unwrap_or_default()) {
        Ok(written) => {
            consume(written, buffer, |room| Ok(recv(end, room, RecvFlags::DONTWAIT)?.0));
            Copied::Some
        }
        Err(error) if error.kind() == ErrorKind::WouldBlock => Copied::Nothing,
        Err(_) if directions.has_peer_ended => Copied::Over(Pumped::Failed),
        Err(_) => {
            // What is unread tells the program of the error.
            (directions.has_failed, directions.has_program_ended) = (true, true);
            Copied::Some
        }
    }
}

/// Removes bytes from the buffer that they were copied from.
fn consume(len: usize, buffer: &mut [u8], mut read: impl FnMut(&mut [u8]) -> io::Result<usize>) {
    let mut left = len;
    while left > 0
        && let Some(room) = buffer.get_mut(..left)
    {
        match read(room) {
            Ok(read) if read > 0 => left -= read.min(left),
            _ => return,
        }
    }
}

/// True if the other end has no copies left, or both its sides were shut down.
pub(super) fn has_hung_up(end: BorrowedFd<'_>) -> bool {
    let mut polled = [PollFd::new(&end, PollFlags::empty())];
    let at_once = Timespec::try_from(Duration::ZERO).unwrap_or_default();
    poll(&mut polled, Some(&at_once)).is_ok() && polled[0].revents().contains(PollFlags::HUP)
}

/// Ends the pair of a connection that has failed: the program has the error if bytes of its are unread, else the end.
pub(super) fn end(end: impl AsFd) {
    // First: other processes may have copies.
    let _ = shutdown(&end, Shutdown::Both);
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::VecDeque;
    use std::os::fd::OwnedFd;

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    /// Bytes that a connection's peer has for one call at most.
    const PIECE_BYTES: usize = 1000;

    #[derive(Default)]
    struct Fake {
        received: RefCell<VecDeque<u8>>,
        has_peer_ended: bool,
        has_failed: bool,
        sent: RefCell<Vec<u8>>,
        room_bytes: usize,
        has_ended: RefCell<bool>,
    }

    impl Fake {
        fn take(&self, room: &mut [u8], keeps: bool) -> io::Result<usize> {
            let mut received = self.received.borrow_mut();
            let len = received.len().min(room.len()).min(PIECE_BYTES);
            match len {
                0 if self.has_failed => return Err(ErrorKind::ConnectionReset.into()),
                0 if !self.has_peer_ended => return Err(ErrorKind::WouldBlock.into()),
                _ => {}
            }
            for (place, byte) in room.iter_mut().zip(received.iter().take(len)) {
                *place = *byte;
            }
            if !keeps {
                received.drain(..len);
            }
            Ok(len)
        }
    }

    impl Connection for Fake {
        fn peek(&self, room: &mut [u8]) -> io::Result<usize> {
            self.take(room, true)
        }

        fn read(&self, room: &mut [u8]) -> io::Result<usize> {
            self.take(room, false)
        }

        fn write(&self, bytes: &[u8]) -> io::Result<usize> {
            let mut sent = self.sent.borrow_mut();
            let len = bytes.len().min(self.room_bytes.saturating_sub(sent.len())).min(PIECE_BYTES);
            sent.extend_from_slice(&bytes[..len]);
            if len == 0 { Err(ErrorKind::WouldBlock.into()) } else { Ok(len) }
        }

        fn end_writing(&self) {
            *self.has_ended.borrow_mut() = true;
        }
    }

    fn pair() -> (OwnedFd, OwnedFd) {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap()
    }

    fn pumped(fake: &Fake, end: &OwnedFd, directions: &mut Directions) -> Pumped {
        loop {
            match pump(fake, end.as_fd(), directions, &mut vec![0; CHUNK_BYTES]) {
                Pumped::More => {}
                pumped => return pumped,
            }
        }
    }

    fn drained(programs: &OwnedFd) -> Vec<u8> {
        let (mut all, mut room) = (Vec::new(), [0; 4096]);
        while let Ok((len, _)) = recv(programs, &mut room, RecvFlags::DONTWAIT)
            && len > 0
        {
            all.extend_from_slice(&room[..len]);
        }
        all
    }

    #[test]
    fn exe_5_relay_keeps_order_and_bounds() {
        let bytes: Vec<u8> = (0..750_000u32).flat_map(u32::to_le_bytes).collect();
        let (end, programs) = pair();
        let received = RefCell::new(bytes.iter().copied().collect());
        let mut fake = Fake { received, has_peer_ended: true, ..Fake::default() };
        let (mut directions, mut all, mut written) = (Directions::default(), Vec::new(), 0);
        while all.len() < bytes.len() || fake.sent.borrow().len() < bytes.len() {
            while let Ok(len) = send(&programs, &bytes[written..], SendFlags::DONTWAIT)
                && len > 0
            {
                written += len;
            }
            fake.room_bytes += 100_000;
            assert_eq!(pumped(&fake, &end, &mut directions), Pumped::Quiet);
            all.extend(drained(&programs));
        }
        assert!(all == bytes && *fake.sent.borrow() == bytes);
        assert!(directions.has_peer_ended && !directions.has_program_ended);
        shutdown(&programs, Shutdown::Write).unwrap();
        assert_eq!(pumped(&fake, &end, &mut directions), Pumped::Closed);
    }

    #[test]
    fn exe_5_half_closed_relay_goes_on() {
        let (end, programs) = pair();
        let fake = Fake { received: RefCell::new([1, 2].into()), ..Fake::default() };
        let mut directions = Directions::default();
        shutdown(&programs, Shutdown::Write).unwrap();
        assert_eq!(pumped(&fake, &end, &mut directions), Pumped::Quiet);
        assert!(*fake.has_ended.borrow() && directions.has_program_ended);
        assert_eq!(drained(&programs), [1, 2]);
        fake.received.borrow_mut().extend([3]);
        assert_eq!(pumped(&fake, &end, &mut directions), Pumped::Quiet);
        assert_eq!(drained(&programs), [3]);
        drop(programs);
        assert_eq!(pumped(&fake, &end, &mut directions), Pumped::Closed);
    }

    #[test]
    fn exe_5_unread_bytes_reset_relay() {
        let (end, programs) = pair();
        let fake = Fake { received: RefCell::new([1].into()), room_bytes: 100, ..Fake::default() };
        let mut directions = Directions::default();
        send(&programs, b"last", SendFlags::DONTWAIT).unwrap();
        assert_eq!(pumped(&fake, &end, &mut directions), Pumped::Quiet);
        send(&programs, b" words", SendFlags::DONTWAIT).unwrap();
        drop(programs);
        assert_eq!(pumped(&fake, &end, &mut directions), Pumped::Reset);
        assert_eq!(*fake.sent.borrow(), b"last words");
    }

    #[test]
    fn exe_5_failed_connection_fails_relay() {
        let (programs_end, programs) = pair();
        let fake = Fake { received: RefCell::new([1].into()), has_failed: true, ..Fake::default() };
        let mut directions = Directions::default();
        // Stays unread, as the connection takes none.
        send(&programs, b"x", SendFlags::DONTWAIT).unwrap();
        assert_eq!(pumped(&fake, &programs_end, &mut directions), Pumped::Failed);
        end(&programs_end);
        drop(programs_end);
        assert_eq!(recv(&programs, &mut [0; 8], RecvFlags::DONTWAIT), Ok((1, 1)));
        assert_eq!(recv(&programs, &mut [0; 8], RecvFlags::DONTWAIT), Err(Errno::CONNRESET));
    }
}

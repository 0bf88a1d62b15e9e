//! Messages with descriptors, which wait in the queue of a socket.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Longest message, and descriptors of one.
const MESSAGE_BYTES_MAX: usize = 1 << 14;
const FILES_MAX: usize = 8;

/// Message, and the descriptors that come with it.
pub(super) type Received = (Vec<u8>, Vec<OwnedFd>);

/// Puts a message into the queue.
///
/// # Errors
/// `EMSGSIZE` for one that is too long; `EAGAIN` if the queue is full.
pub(super) fn send<'a>(
    to: BorrowedFd<'_>,
    bytes: &[u8],
    files: impl Iterator<Item = BorrowedFd<'a>>,
) -> Result<(), Errno> {
    let files: Vec<_> = files.collect();
    if bytes.len() > MESSAGE_BYTES_MAX || files.len() > FILES_MAX {
        return Err(Errno::MSGSIZE);
    }
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut room);
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&files)) {
        return Err(Errno::MSGSIZE);
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    sendmsg(to, &[IoSlice::new(bytes)], &mut control, flags).map(drop)
}

/// Takes the next message from the queue; `None` if there is none.
///
/// # Errors
/// `EMFILE` if the process has no descriptors left for all of its descriptors.
pub(super) fn receive(from: BorrowedFd<'_>) -> Result<Option<Received>, Errno> {
    let mut bytes = vec![0; MESSAGE_BYTES_MAX];
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut room);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = match recvmsg(from, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
        Err(Errno::AGAIN) => return Ok(None),
        received => received?,
    };
    let mut files = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(passed) = message {
            files.extend(passed);
        }
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(Errno::MFILE);
    }
    bytes.truncate(received.bytes);
    // The end of the queue, whose other end is closed.
    Ok((!bytes.is_empty()).then_some((bytes, files)))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    #[test]
    fn exe_10_messages_outlive_their_sender() {
        let kind = SocketType::SEQPACKET;
        let (near, far) =
            socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
        for count in 0..100_u8 {
            let files = vec![far.as_fd(); usize::from(count) % FILES_MAX];
            send(near.as_fd(), &[count, 7], files.into_iter()).unwrap();
        }
        let too_long = vec![0; MESSAGE_BYTES_MAX + 1];
        assert_eq!(send(near.as_fd(), &too_long, std::iter::empty()), Err(Errno::MSGSIZE));
        drop(near);
        for count in 0..100_u8 {
            let (bytes, files) = receive(far.as_fd()).unwrap().unwrap();
            assert_eq!((bytes, files.len()), (vec![count, 7], usize::from(count) % FILES_MAX));
        }
        assert!(receive(far.as_fd()).unwrap().is_none());
    }
}

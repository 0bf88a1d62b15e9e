//! Messages of the vhost-user protocol on the socket, from the back end's side.

use std::io::{ErrorKind, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::cmsg_space;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use vhost::vhost_user::message::FrontendReq;

/// Maximum number of descriptors with one message: the protocol allows eight memory regions.
const DESCRIPTORS_MAX: usize = 8;

/// `VHOST_USER_VERSION` and the flags of a header (the protocol's "Header" section).
const VERSION: u32 = 1;
const IS_REPLY: u32 = 1 << 2;
const NEEDS_REPLY: u32 = 1 << 3;

/// Message of a front end.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) request: FrontendReq,
    pub(crate) needs_reply: bool,
    pub(crate) payload: Vec<u8>,
    pub(crate) descriptors: Vec<OwnedFd>,
}

impl Message {
    /// Waits for the next message; `None` when the front end has closed.
    pub(crate) fn receive(mut stream: &UnixStream) -> Option<Self> {
        let mut header = [0; 12];
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let parts = &mut [IoSliceMut::new(&mut header)];
        let received = recvmsg(stream, parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC);
        let len = match received {
            Ok(received) => received.bytes,
            Err(Errno::CONNRESET) => 0,
            Err(errno) => panic!("the front end cannot be heard: {errno}"),
        };
        let mut descriptors = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                descriptors.extend(rights);
            }
        }
        if len == 0 || !fill(&mut stream, &mut header[len..]) {
            return None;
        }
        let [request, flags, size] = [0, 4, 8].map(|at| word(&header, at));
        assert_eq!(flags & 3, VERSION, "a message of another version");
        let mut payload = vec![0; usize::try_from(size).unwrap()];
        if !fill(&mut stream, &mut payload) {
            return None;
        }
        let request = FrontendReq::try_from(request)
            .unwrap_or_else(|()| panic!("there is no request {request}"));
        Some(Self { request, needs_reply: flags & NEEDS_REPLY > 0, payload, descriptors })
    }

    /// Returns a 32-bit number of the payload.
    pub(crate) fn u32_at(&self, at: usize) -> u32 {
        word(&self.payload, at)
    }

    /// Returns a 64-bit number of the payload.
    pub(crate) fn u64_at(&self, at: usize) -> u64 {
        u64::from_ne_bytes(self.payload[at..at + 8].try_into().unwrap())
    }
}

/// Defect of an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Oddity {
    /// Code of another request.
    OtherRequest,
    /// Flags without the reply bit.
    NoReply,
    /// Flags with another version.
    OtherVersion,
    /// Wrong length in the header.
    Length(u32),
    /// Number of unexpected descriptors.
    Descriptors(usize),
}

/// Answers a request. A front end that has gone is not an error.
pub(crate) fn reply(stream: &UnixStream, request: FrontendReq, payload: &[u8]) {
    let size = u32::try_from(payload.len()).unwrap();
    send(stream, [request.into(), VERSION | IS_REPLY, size], payload, &[]);
}

/// Answers a request with one defect.
pub(crate) fn reply_oddly(
    stream: &UnixStream,
    request: FrontendReq,
    payload: &[u8],
    oddity: Oddity,
) {
    let mut header = [request.into(), VERSION | IS_REPLY, u32::try_from(payload.len()).unwrap()];
    let mut descriptors = Vec::new();
    match oddity {
        Oddity::OtherRequest => header[0] += 1,
        Oddity::NoReply => header[1] = VERSION,
        Oddity::OtherVersion => header[1] = 2 | IS_REPLY,
        Oddity::Length(size) => header[2] = size,
        Oddity::Descriptors(count) => descriptors = vec![stream.as_fd(); count],
    }
    send(stream, header, payload, &descriptors);
}

fn send(stream: &UnixStream, header: [u32; 3], payload: &[u8], descriptors: &[BorrowedFd<'_>]) {
    let message = [header.map(u32::to_ne_bytes).as_flattened(), payload].concat();
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(descriptors)));
    }
    let parts = &[IoSlice::new(&message)];
    match sendmsg(stream, parts, &mut ancillary, SendFlags::NOSIGNAL) {
        Ok(sent) => assert_eq!(sent, message.len()),
        Err(Errno::PIPE | Errno::CONNRESET) => {}
        Err(error) => panic!("the front end cannot be told: {error}"),
    }
}

/// Fills `to`. Returns false if the front end closed before.
fn fill(stream: &mut &UnixStream, to: &mut [u8]) -> bool {
    match stream.read_exact(to) {
        Ok(()) => true,
        Err(error) => {
            let gone = [ErrorKind::UnexpectedEof, ErrorKind::ConnectionReset];
            assert!(gone.contains(&error.kind()), "the front end cannot be heard: {error}");
            false
        }
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap())
}

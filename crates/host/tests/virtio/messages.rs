//! Messages of the vhost-user protocol, as they are on the socket: the back end's end of it.

use std::io::{ErrorKind, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use rustix::cmsg_space;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use vhost::vhost_user::message::FrontendReq;

/// Descriptors that come with one message: regions of memory, of which eight are allowed.
const DESCRIPTORS_MAX: usize = 8;

/// `VHOST_USER_VERSION` and the flags of a header (the protocol's "Header" section).
const VERSION: u32 = 1;
const IS_REPLY: u32 = 1 << 2;
const NEEDS_REPLY: u32 = 1 << 3;

/// What a front end says.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) request: FrontendReq,
    pub(crate) needs_reply: bool,
    pub(crate) payload: Vec<u8>,
    pub(crate) descriptors: Vec<OwnedFd>,
}

impl Message {
    /// Waits for the next one; `None` when the front end has closed.
    pub(crate) fn receive(mut stream: &UnixStream) -> Option<Self> {
        let mut header = [0; 12];
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let parts = &mut [IoSliceMut::new(&mut header)];
        let received = recvmsg(stream, parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC);
        let len = match received {
            Ok(received) => received.bytes,
            Err(rustix::io::Errno::CONNRESET) => 0,
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

    /// A number of the payload.
    pub(crate) fn u32_at(&self, at: usize) -> u32 {
        word(&self.payload, at)
    }

    /// A long one.
    pub(crate) fn u64_at(&self, at: usize) -> u64 {
        u64::from_ne_bytes(self.payload[at..at + 8].try_into().unwrap())
    }
}

/// Answers a request. A front end that has gone does not hear it.
pub(crate) fn reply(mut stream: &UnixStream, request: FrontendReq, payload: &[u8]) {
    let size = u32::try_from(payload.len()).unwrap();
    let header = [u32::from(request), VERSION | IS_REPLY, size];
    let header: Vec<u8> = header.into_iter().flat_map(u32::to_ne_bytes).collect();
    let written = stream.write_all(&[&header, payload].concat());
    if let Err(error) = written {
        let gone = [ErrorKind::BrokenPipe, ErrorKind::ConnectionReset];
        assert!(gone.contains(&error.kind()), "the front end cannot be told: {error}");
    }
}

/// Reads exactly that much; says whether the front end was there for all of it.
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

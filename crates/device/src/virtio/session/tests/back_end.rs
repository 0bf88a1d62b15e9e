//! Back end whose every answer the test sees and chooses.

use std::collections::VecDeque;
use std::io::{IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};
use vhost::vhost_user::message::FrontendReq;

/// Time limit for effects of another thread.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// Header flags: `VHOST_USER_NEED_REPLY_MASK`, and the one of an answer.
const NEED_REPLY: u32 = 8;
const REPLY: u32 = 4;
const VERSION: u32 = 1;

/// Protocol features as bit masks.
pub(super) const MQ: u64 = 1;
pub(super) const REPLY_ACK: u64 = 1 << 3;
pub(super) const CONFIG: u64 = 1 << 9;

/// Features and settings that the back end answers with.
#[derive(Clone, Debug)]
pub(super) struct Offer {
    pub(super) features: u64,
    pub(super) protocol: u64,
    pub(super) pairs: u64,
    /// Bytes behind `offset`, `size` and `flags` in the answer to `GET_CONFIG`.
    pub(super) config: Vec<u8>,
}

impl Default for Offer {
    /// All features, and four queue pairs.
    fn default() -> Self {
        let mut config = vec![0; 12];
        config[10..].copy_from_slice(&9000_u16.to_le_bytes());
        Self { features: u64::MAX, protocol: u64::MAX, pairs: 4, config }
    }
}

/// Message of the front end.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) of: FrontendReq,
    flags: u32,
    pub(super) body: Vec<u8>,
    pub(super) descriptors: Vec<OwnedFd>,
}

impl Message {
    /// Returns the 32-bit word at this index of the body; word 0 is the ring's index.
    pub(super) fn word(&self, at: usize) -> u32 {
        u32::from_ne_bytes(self.body[4 * at..4 * at + 4].try_into().unwrap())
    }

    /// Returns the 64-bit number in the body.
    pub(super) fn number(&self) -> u64 {
        u64::from_ne_bytes(self.body[..8].try_into().unwrap())
    }
}

/// Connection to a front end.
pub(super) struct BackEnd {
    pub(super) stream: UnixStream,
    offer: Offer,
    is_acknowledging: bool,
    /// Descriptors received with bytes that were not read yet.
    descriptors: VecDeque<OwnedFd>,
    pub(super) log: Vec<Message>,
}

impl BackEnd {
    pub(super) fn accept(listener: &UnixListener, offer: Offer) -> Self {
        let mut watched = [PollFd::new(listener, PollFlags::IN)];
        let patience = Timespec::try_from(PATIENCE).unwrap();
        assert_eq!(poll(&mut watched, Some(&patience)), Ok(1), "no front end comes");
        Self::on(listener.accept().unwrap().0, offer)
    }

    pub(super) fn on(stream: UnixStream, offer: Offer) -> Self {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let (descriptors, log) = (VecDeque::new(), Vec::new());
        Self { stream, offer, is_acknowledging: false, descriptors, log }
    }

    /// Answers until a message was received that many times. Returns false if the front end has
    /// gone.
    pub(super) fn answer_until(&mut self, of: FrontendReq, times: usize) -> bool {
        while self.log.iter().filter(|message| message.of == of).count() < times {
            let Some(message) = self.read() else { return false };
            self.answer(&message);
            self.log.push(message);
        }
        true
    }

    /// Answers until the front end has gone.
    pub(super) fn answer_to_the_end(&mut self) {
        while let Some(message) = self.read() {
            self.answer(&message);
            self.log.push(message);
        }
    }

    /// Answers all messages up to the given one, which gets no answer.
    pub(super) fn be_silent_at(&mut self, of: FrontendReq) {
        loop {
            let message = self.read().unwrap();
            if message.of == of {
                return self.log.push(message);
            }
            self.answer(&message);
            self.log.push(message);
        }
    }

    /// Returns how many times a message was received.
    pub(super) fn count(&self, of: FrontendReq) -> usize {
        self.log.iter().filter(|message| message.of == of).count()
    }

    /// Reads the next message; `None` after the last one.
    pub(super) fn read(&mut self) -> Option<Message> {
        let header = self.read_bytes(12)?;
        let word = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().unwrap());
        let body = self.read_bytes(usize::try_from(word(8)).unwrap())?;
        let descriptors = self.descriptors.drain(..).collect();
        let of = FrontendReq::try_from(word(0)).unwrap();
        Some(Message { of, flags: word(4), body, descriptors })
    }

    fn read_bytes(&mut self, len: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0; len];
        let mut filled = 0;
        while filled < len {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let mut into = [IoSliceMut::new(&mut bytes[filled..])];
            let got = match recvmsg(&self.stream, &mut into, &mut ancillary, RecvFlags::empty()) {
                Err(Errno::CONNRESET) => return None,
                got => got.expect("the front end says nothing more, and does not go"),
            };
            assert!(!got.flags.contains(ReturnFlags::CTRUNC));
            for message in ancillary.drain() {
                if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                    self.descriptors.extend(descriptors);
                }
            }
            if got.bytes == 0 {
                return None;
            }
            filled += got.bytes;
        }
        Some(bytes)
    }

    fn answer(&mut self, message: &Message) {
        let answer = match message.of {
            FrontendReq::GET_FEATURES => self.offer.features.to_ne_bytes().to_vec(),
            FrontendReq::GET_PROTOCOL_FEATURES => self.offer.protocol.to_ne_bytes().to_vec(),
            FrontendReq::GET_QUEUE_NUM => self.offer.pairs.to_ne_bytes().to_vec(),
            FrontendReq::GET_VRING_BASE => message.body.clone(),
            FrontendReq::GET_CONFIG => [&message.body[..12], &self.offer.config].concat(),
            FrontendReq::SET_PROTOCOL_FEATURES => {
                self.is_acknowledging = message.number() & REPLY_ACK != 0;
                return;
            }
            _ if self.is_acknowledging && message.flags & NEED_REPLY != 0 => vec![0; 8],
            _ => return,
        };
        self.say(message.of, &answer);
    }

    /// Sends `body` as the answer to a message.
    pub(super) fn say(&mut self, to: FrontendReq, body: &[u8]) {
        let len = u32::try_from(body.len()).unwrap();
        let header = [u32::from(to), REPLY | VERSION, len].map(u32::to_ne_bytes);
        // A front end that has gone by now is noticed at the next read.
        let _ = self.stream.write_all(&[header.as_flattened(), body].concat());
    }
}

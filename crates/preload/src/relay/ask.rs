//! Questions of processes that want to use a connection by the kernel's calls, and the answers of its owner.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use forebay_sys::hidden::Hidden;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};

use super::name::RelayId;

/// Bytes of a question: number of the connection.
const QUESTION_BYTES: usize = 8;

/// Room for one descriptor in a message.
const CONTROL_BYTES: usize = rustix::cmsg_space!(ScmRights(1));

/// Bytes of answers.
const YES: [u8; 1] = [1];
const NO: [u8; 1] = [0];

/// Connection that a process wants to use, and where it waits for the answer.
pub(super) struct Question {
    pub(super) id: RelayId,
    answer: Hidden,
}

/// Descriptor by which a connection is used from then on.
pub(crate) enum Answer {
    /// The one that the process has.
    Same,
    /// Another one in its place.
    Other(OwnedFd),
}

/// Socket pair for questions: the end of the asking processes, and that of the owner.
pub(super) fn ways() -> Result<(OwnedFd, OwnedFd), Errno> {
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

/// Asks the owner to relay a connection, and waits for the answer. `None` if the owner has ended, or cannot relay it.
pub(super) fn ask(owner: BorrowedFd<'_>, id: RelayId) -> Option<Answer> {
    let flags = SocketFlags::CLOEXEC;
    let (near, far) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).ok()?;
    pass(owner, &id.0.to_ne_bytes(), Some(far.as_fd()), SendFlags::NOSIGNAL).ok()?;
    // The owner's copy is the last: its end ends the wait.
    drop(far);
    let mut answer = NO;
    let (_, passed) = receive(near.as_fd(), &mut answer, RecvFlags::empty()).ok()?;
    (answer == YES).then(|| passed.map_or(Answer::Same, Answer::Other))
}

impl Question {
    /// Next question, if there is one.
    pub(super) fn next(owners: BorrowedFd<'_>) -> Option<Self> {
        loop {
            let mut bytes = [0; QUESTION_BYTES];
            let (len, passed) = receive(owners, &mut bytes, RecvFlags::DONTWAIT).ok()?;
            if len == 0 && passed.is_none() {
                return None;
            }
            let question = || {
                let id = bytes.get(..len)?.first_chunk()?;
                Some(Self {
                    id: RelayId(u64::from_ne_bytes(*id)),
                    answer: Hidden::new(passed?).ok()?,
                })
            };
            if let Some(question) = question() {
                return Some(question);
            }
        }
    }

    /// Answers that the connection can be used, by another descriptor if there is one.
    pub(super) fn answer(self, other: Option<BorrowedFd<'_>>) {
        self.say(&YES, other);
    }

    /// Answers that the connection cannot be used.
    pub(super) fn refuse(self) {
        self.say(&NO, None);
    }

    fn say(&self, bytes: &[u8], other: Option<BorrowedFd<'_>>) {
        // Ignored: who has asked has ended.
        let _ = pass(self.answer.as_fd(), bytes, other, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
    }
}

/// Sends a message with a descriptor.
fn pass(
    to: BorrowedFd<'_>,
    bytes: &[u8],
    passed: Option<BorrowedFd<'_>>,
    flags: SendFlags,
) -> Result<(), Errno> {
    let mut room = [MaybeUninit::uninit(); CONTROL_BYTES];
    let mut control = SendAncillaryBuffer::new(&mut room);
    let passed: Vec<_> = passed.into_iter().collect();
    if !passed.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&passed)) {
        return Err(Errno::NOBUFS);
    }
    loop {
        match sendmsg(to, &[IoSlice::new(bytes)], &mut control, flags) {
            Err(Errno::INTR) => {}
            sent => return sent.map(drop),
        }
    }
}

/// Receives a message, and the descriptor with it if there is one.
fn receive(
    from: BorrowedFd<'_>,
    bytes: &mut [u8],
    flags: RecvFlags,
) -> Result<(usize, Option<OwnedFd>), Errno> {
    loop {
        let mut room = [MaybeUninit::uninit(); CONTROL_BYTES];
        let mut control = RecvAncillaryBuffer::new(&mut room);
        let mut into = [IoSliceMut::new(bytes)];
        match recvmsg(from, &mut into, &mut control, flags | RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
            Ok(message) => {
                let passed = control.drain().find_map(|message| match message {
                    RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
                    _ => None,
                });
                return Ok((message.bytes, passed));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::send;

    use super::*;

    #[test]
    fn exe_5_question_has_its_answer() {
        let (asks, owners) = ways().unwrap();
        for has_other in [false, true] {
            std::thread::scope(|scope| {
                let asked = scope.spawn(|| ask(asks.as_fd(), RelayId(9)));
                let question = loop {
                    match Question::next(owners.as_fd()) {
                        Some(question) => break question,
                        None => std::thread::yield_now(),
                    }
                };
                assert_eq!(question.id, RelayId(9));
                question.answer(has_other.then_some(owners.as_fd()));
                let answer = asked.join().unwrap().unwrap();
                assert_eq!(matches!(answer, Answer::Other(_)), has_other);
            });
        }
    }

    #[test]
    fn exe_5_owners_end_refuses_question() {
        let (asks, owners) = ways().unwrap();
        std::thread::scope(|scope| {
            let asked = scope.spawn(|| ask(asks.as_fd(), RelayId(1)));
            let mut questions = std::iter::from_fn(|| Some(Question::next(owners.as_fd())));
            questions.find_map(|question| question).unwrap().refuse();
            assert!(asked.join().unwrap().is_none());
        });
        std::thread::scope(|scope| {
            let asked = scope.spawn(|| ask(asks.as_fd(), RelayId(1)));
            std::thread::yield_now();
            drop(owners);
            assert!(asked.join().unwrap().is_none());
        });
        assert!(ask(asks.as_fd(), RelayId(1)).is_none());
    }

    #[test]
    fn exe_5_foreign_questions_are_passed_over() {
        let (asks, owners) = ways().unwrap();
        for bytes in [&[1; 3][..], &[1; QUESTION_BYTES], &[1; 40]] {
            send(&asks, bytes, SendFlags::empty()).unwrap();
        }
        assert!(Question::next(owners.as_fd()).is_none());
    }
}

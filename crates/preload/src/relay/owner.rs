//! Thread of the owner: it takes connections over, and copies their bytes.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use forebay::net::TcpStream;
use forebay_stack::tcp::{State, TcpInfo};
use forebay_sys::hidden::Hidden;
use forebay_sys::readiness::{ReadinessDescriptor, ReadinessSetter, Released};
use rustix::event::{Timespec, epoll};
use rustix::fs::{fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, shutdown, socketpair};

use super::ask::Question;
use super::name::{PairIndex, RelayId, RelayName};
use super::pump::{self, CHUNK_BYTES, Directions, Pumped, has_hung_up, pump};
use super::{MAY_BE_ELSEWHERE, RelayOwner, change};
use crate::abi;
use crate::socket::Socket;
use crate::stream::Stream;
use crate::tcp_options::TIMEOUTS;

/// Keys of the thread's descriptors; those of relays follow.
const ASKED: u64 = 0;
const WOKEN: u64 = 1;
const RELAYS_FROM: u64 = 2;

/// Events of one look.
const EVENTS_MAX: usize = 64;

/// Questions that wait at the same time for connections that are just being closed.
const WAITING_MAX: usize = 1024;

/// Connection that the owner has closed, and others not.
pub(super) struct Held {
    pub(super) id: RelayId,
    pub(super) relay: Relay,
}

/// Connection whose bytes a pair carries.
pub(super) struct Relay {
    /// `None` once it has ended, as long as others may ask for it.
    carrier: Option<Carrier>,
    /// Pair of the descriptor, if its sides had ended before.
    earlier: Option<Earlier>,
    /// True while the thread knows of news.
    is_ready: Arc<AtomicBool>,
}

struct Carrier {
    tcp: TcpStream,
    /// End that the program does not have.
    end: Hidden,
    directions: Directions,
}

/// Pair that carries nothing. A process with a copy of its end may ask for the end of the pair that took its place.
struct Earlier {
    end: Hidden,
    /// The other pair's end of the program.
    programs: Hidden,
}

impl Relay {
    /// Takes a connection of this process over, by the thread that has [claimed](super::Part::claim) it. `None` if that failed.
    pub(super) fn of(stream: &Stream, owner: &RelayOwner) -> Option<Self> {
        let part = &stream.part;
        let (news, id) = (Arc::clone(&owner.news), part.id);
        let is_ready = Arc::new(AtomicBool::new(false));
        let woken = Arc::clone(&is_ready);
        let wake = move || {
            if !woken.swap(true, Ordering::AcqRel) {
                news.inbox().ready.push(id);
                news.wake();
            }
        };
        let (tcp, pair) = stream.tcp.take_over(Arc::new(wake))?;
        // Segments go out as they come from the program.
        let _ = tcp.set_nodelay(true);
        let taken = pair.and_then(|pair| Self::over(&tcp, pair, owner, id));
        let Some((end, earlier)) = taken else {
            tcp.close_for_all();
            return None;
        };
        let directions = Directions::default();
        Some(Self { carrier: Some(Carrier { tcp, end, directions }), earlier, is_ready })
    }

    /// Makes a pair carry the bytes of a connection: its own, or another one if a side of that has ended.
    fn over(
        tcp: &TcpStream,
        (setter, descriptor): (ReadinessSetter, Arc<ReadinessDescriptor>),
        owner: &RelayOwner,
        id: RelayId,
    ) -> Option<(Hidden, Option<Earlier>)> {
        let polled = descriptor.as_fd();
        let name = |pair| RelayName {
            owner: owner.number,
            id,
            pair,
            local: tcp.local_addr(),
            peer: tcp.peer_addr(),
        };
        let bind = |end: &Hidden, pair| name(pair).bind(end.as_fd());
        let (end, earlier) = match setter.release(&descriptor).ok()? {
            Released::Failed => return None,
            Released::Open(end) => {
                bind(&end, PairIndex::First).ok()?;
                (end, None)
            }
            Released::Ended(earlier) => {
                bind(&earlier, PairIndex::First).ok()?;
                let (end, programs) = second_pair(polled).ok()?;
                bind(&end, PairIndex::Second).ok()?;
                (end, Some(Earlier { end: earlier, programs }))
            }
        };
        if is_writing_over(tcp) {
            let _ = shutdown(&end, Shutdown::Read);
        }
        // This copy is not the program's: it must not hold the connection.
        abi::make_unusable(abi::number(polled));
        Some((end, earlier))
    }

    /// True if a process has the program's end.
    pub(super) fn has_copies(&self) -> bool {
        let watched = self.earlier.as_ref().map(|earlier| &earlier.end);
        let watched = watched.or(self.carrier.as_ref().map(|carrier| &carrier.end));
        watched.is_some_and(|end| !has_hung_up(end.as_fd()))
    }

    /// Descriptor to answer with, if it is not the one that the asking process has.
    fn other(&self) -> Option<BorrowedFd<'_>> {
        self.earlier.as_ref().map(|earlier| earlier.programs.as_fd())
    }

    /// Copies bytes. Returns what is to be done next.
    fn pump(&mut self, buffer: &mut [u8]) -> Pumped {
        if self.earlier.as_ref().is_some_and(|earlier| has_hung_up(earlier.end.as_fd())) {
            self.earlier = None; // nobody else asks
        }
        let Some(carrier) = &mut self.carrier else { return Pumped::Quiet };
        // First: news that come from here on are told once more.
        self.is_ready.store(false, Ordering::Release);
        let Carrier { tcp, end, directions } = carrier;
        let pumped = pump(&*tcp, end.as_fd(), directions, buffer);
        match pumped {
            Pumped::Quiet | Pumped::More => return pumped,
            // Ignored: a connection that has ended is not reset.
            Pumped::Reset => drop(tcp.set_linger(Some(Duration::ZERO))),
            Pumped::Failed | Pumped::Closed => pump::end(&*end),
        }
        tcp.close_for_all();
        self.carrier = None;
        pumped
    }

    /// True if nothing is left to do.
    fn is_over(&self) -> bool {
        self.carrier.is_none() && self.earlier.is_none()
    }
}

/// True if the program has ended its side of a connection.
fn is_writing_over(tcp: &TcpStream) -> bool {
    let is_writing = |info: TcpInfo| {
        matches!(info.state, State::SynReceived | State::Established | State::CloseWait)
    };
    !tcp.info().is_some_and(is_writing)
}

/// Pair in place of one whose sides have ended, with the modes of that.
fn second_pair(polled: BorrowedFd<'_>) -> Result<(Hidden, Hidden), Errno> {
    let flags = SocketFlags::CLOEXEC;
    let (end, programs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let (end, programs) = (Hidden::new(end)?, Hidden::new(programs)?);
    fcntl_setfl(&programs, fcntl_getfl(polled)?)?;
    for option in TIMEOUTS {
        abi::copy_option(polled, programs.as_fd(), option);
    }
    abi::copy_signals(polled, programs.as_fd());
    Ok((end, programs))
}

/// Thread of the owner, as it runs.
struct RelayThread {
    owner: Arc<RelayOwner>,
    asked: Hidden,
    epoll: Hidden,
    relays: HashMap<RelayId, Relay>,
    /// Relays that are to be looked at.
    todo: VecDeque<RelayId>,
    /// Questions for connections that are just being closed.
    waiting: Vec<Question>,
    buffer: Vec<u8>,
}

/// Runs the thread, for the life of the process.
///
/// # Errors
/// If the process has no descriptors left.
pub(crate) fn run(owner: Arc<RelayOwner>, asked: Hidden) -> Result<impl FnOnce() + Send, Errno> {
    let epoll = Hidden::new(epoll::create(epoll::CreateFlags::CLOEXEC)?)?;
    let level = epoll::EventFlags::IN;
    epoll::add(&epoll, &asked, epoll::EventData::new_u64(ASKED), level)?;
    epoll::add(&epoll, &owner.news.wakes, epoll::EventData::new_u64(WOKEN), level)?;
    Ok(move || {
        let (relays, todo, waiting) = (HashMap::new(), VecDeque::new(), Vec::new());
        let buffer = vec![0; CHUNK_BYTES];
        let mut thread = RelayThread { owner, asked, epoll, relays, todo, waiting, buffer };
        loop {
            thread.turn();
        }
    })
}

impl RelayThread {
    /// Waits for news, unless some are left, and follows them.
    fn turn(&mut self) {
        let mut events = Vec::<epoll::Event>::with_capacity(EVENTS_MAX);
        let at_once = Timespec::default();
        let at_most = (!self.todo.is_empty()).then_some(&at_once);
        // Ignored: a call that was interrupted is made again.
        let _ = epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), at_most);
        let mut is_asked = false;
        for event in &events {
            match event.data.u64() {
                ASKED => is_asked = true,
                WOKEN => drop(rustix::io::read(&self.owner.news.wakes, &mut [0; 8])),
                key => self.todo.push_back(RelayId(key - RELAYS_FROM)),
            }
        }
        self.take_news();
        if is_asked {
            while let Some(question) = Question::next(self.asked.as_fd()) {
                self.answer(question);
            }
        }
        for question in std::mem::take(&mut self.waiting) {
            self.answer(question);
        }
        let kept = self.owner.news.kept();
        self.owner.news.waiting.store(self.waiting.len(), Ordering::Release);
        drop(kept);
        for _ in 0..self.todo.len() {
            let Some(id) = self.todo.pop_front() else { break };
            self.pump(id);
        }
    }

    /// Takes what threads of the process have for this one.
    fn take_news(&mut self) {
        let inbox = std::mem::take(&mut *self.owner.news.inbox());
        self.todo.extend(inbox.ready);
        for held in inbox.held {
            self.add(held.id, held.relay);
        }
    }

    fn add(&mut self, id: RelayId, relay: Relay) {
        let edges = epoll::EventFlags::IN
            | epoll::EventFlags::OUT
            | epoll::EventFlags::RDHUP
            | epoll::EventFlags::ET;
        let data = epoll::EventData::new_u64(id.0 + RELAYS_FROM);
        let ends = [
            relay.carrier.as_ref().map(|carrier| &carrier.end),
            relay.earlier.as_ref().map(|earlier| &earlier.end),
        ];
        for end in ends.into_iter().flatten() {
            if epoll::add(&self.epoll, end, data, edges).is_err() {
                report!(
                    "forebay: a connection that a child uses cannot be watched, and gets no bytes"
                );
            }
        }
        self.relays.insert(id, relay);
        self.todo.push_back(id);
    }

    /// Answers a question, or has it wait for the thread that closes the connection. Of one that is gone, the end is told by the
    /// descriptor that the asking process has.
    fn answer(&mut self, question: Question) {
        let id = question.id;
        if !self.relays.contains_key(&id) && !self.is_decided(id) {
            return match self.waiting.len() < WAITING_MAX {
                true => self.waiting.push(question),
                false => question.refuse(),
            };
        }
        if !self.relays.contains_key(&id) {
            self.take_news();
        }
        question.answer(self.relays.get(&id).and_then(Relay::other));
    }

    /// Takes a connection over that the program has open here. False if another thread is about to.
    fn is_decided(&mut self, id: RelayId) -> bool {
        let owner = Arc::clone(&self.owner);
        let _change = change();
        let kept = owner.news.kept();
        let Some(socket) = kept.get(&id) else { return true };
        // Dropped after the lock: this may be the last reference, whose end takes the lock.
        let socket = socket.upgrade();
        let is_claimed = |socket: &&Socket| match socket {
            Socket::Stream(stream) => stream.part.claim(),
            Socket::Listener(_) | Socket::Udp(_) => false,
        };
        let Some(Socket::Stream(stream)) = socket.as_deref().filter(is_claimed) else {
            // Before it is unlocked: who decides then wakes this thread.
            owner.news.waiting.store(self.waiting.len() + 1, Ordering::Release);
            drop(kept);
            return false;
        };
        drop(kept);
        MAY_BE_ELSEWHERE.store(true, Ordering::Relaxed);
        if let Some(relay) = Relay::of(stream, &owner) {
            owner.news.relays.fetch_add(1, Ordering::AcqRel);
            self.add(id, relay);
        }
        owner.news.decide(id);
        true
    }

    fn pump(&mut self, id: RelayId) {
        let Some(relay) = self.relays.get_mut(&id) else { return };
        if relay.pump(&mut self.buffer) == Pumped::More {
            self.todo.push_back(id);
        }
        if relay.is_over() {
            self.relays.remove(&id);
            self.owner.news.relays.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

//! Handle of a queue to its session: the connection state, and the negotiated features.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_rx::arrive::Waker;
use forebay_sys::{Event, PeerEvent, Signaller};

use super::ends::{EndKind, Reason};
use super::features::Features;
use crate::tx_queue::UsableQueues;

/// Session of a back end: from enabling its queues to the end of its connection.
#[derive(Debug)]
pub(super) struct PortSession {
    /// Number of the session, from 1 on; unique.
    pub(super) number: u64,
    /// Negotiated features.
    pub(super) features: Features,
    /// The device's MTU, if it reports one: IP packets are at most that long.
    pub(super) mtu: Option<u16>,
    /// Eventfds of each queue pair that the device has; possibly fewer pairs than requested.
    pub(super) pairs: Vec<PairEvents>,
}

/// Eventfds of one queue pair (kicks and calls of its two rings). New for each session, so that a
/// former back end cannot reach the next session.
#[derive(Debug)]
pub(super) struct PairEvents {
    /// Signalled from the start, as the other kick: a ring is stopped until the back end receives a
    /// kick, and there may be no other one, as a device that polls wants none.
    pub(super) rx_kick: PeerEvent,
    pub(super) tx_kick: PeerEvent,
    /// Call of both rings: one CPU drives them.
    pub(super) call: PeerEvent,
}

impl PairEvents {
    pub(super) fn new() -> std::io::Result<Self> {
        let (rx_kick, tx_kick) = (PeerEvent::happened()?, PeerEvent::happened()?);
        Ok(Self { rx_kick, tx_kick, call: PeerEvent::new()? })
    }
}

/// State shared by the session thread and the ports.
#[derive(Debug)]
pub(super) struct Switchboard {
    /// Number of session begins and ends. Written by the session thread, under the lock.
    changes: AtomicU64,
    board: Mutex<Board>,
    /// Wakes the session thread to read the board.
    pub(super) board_changed: Event,
    /// Signalled once, when the session thread is to end.
    pub(super) stop: Event,
    /// Queue pairs that can send: those of the session that are not shut; without a session, those
    /// of the last one.
    pub(super) usable: Arc<UsableQueues>,
    /// AIO context for kicking devices.
    signaller: Signaller,
    /// True if the next kick is to fail.
    #[cfg(test)]
    pub(super) fails_kick: std::sync::atomic::AtomicBool,
}

#[derive(Debug)]
struct Board {
    session: Option<Arc<PortSession>>,
    seats: Box<[QueueState]>,
}

/// State of one port.
struct QueueState {
    /// True if the source has seen the session, and so uses the rings until it releases them.
    is_held: bool,
    /// True if the port was dropped.
    is_gone: bool,
    /// Reason why the queue is unusable for the rest of this session.
    shut: Option<Reason>,
    /// RX state of this queue.
    receiving: Receiving,
    wake: Option<Waker>,
    /// Eventfd that a source without a session sleeps on.
    changed: Arc<Event>,
}

/// RX state of a queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Receiving {
    /// Receiving, if there is a session.
    On,
    /// The source has requested the end of receiving.
    Ending,
    /// The device has stopped receiving, or is not connected.
    Off,
}

/// Instruction of the sources to the session thread.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum QueueWish {
    /// Continue; some queues are shut, some are to stop receiving.
    GoOn { shut: Shut, sated: Vec<usize> },
    /// End this session and begin another: all queues are shut, and no port was dropped.
    Renew(Shut),
    /// End: all ports were dropped.
    Leave,
}

/// Shut queues, with reasons.
pub(super) type Shut = Vec<(usize, Reason)>;

impl Switchboard {
    /// Creates the state of `pairs` queue pairs, and their ports.
    ///
    /// # Errors
    /// If the process has no descriptors left.
    pub(super) fn new(
        pairs: usize,
        signaller: Signaller,
    ) -> std::io::Result<(Arc<Self>, Vec<Port>)> {
        let changed = (0..pairs).map(|_| Event::new().map(Arc::new));
        let changed = changed.collect::<std::io::Result<Vec<_>>>()?;
        let seats = changed.iter().map(|changed| QueueState {
            is_held: false,
            is_gone: false,
            shut: None,
            receiving: Receiving::On,
            wake: None,
            changed: Arc::clone(changed),
        });
        let board = Board { session: None, seats: seats.collect() };
        let shared = Arc::new(Self {
            changes: AtomicU64::new(0),
            board: Mutex::new(board),
            board_changed: Event::new()?,
            stop: Event::new()?,
            usable: Arc::new(UsableQueues::all(pairs)),
            signaller,
            #[cfg(test)]
            fails_kick: false.into(),
        });
        let ports = changed.into_iter().enumerate().map(|(index, changed)| Port {
            index,
            shared: Arc::clone(&shared),
            seen: 0,
            session: None,
            changed,
        });
        let ports = ports.collect();
        Ok((shared, ports))
    }

    /// Announces the start or end of a session to all ports.
    pub(super) fn publish(&self, session: Option<Arc<PortSession>>) {
        let mut board = self.board();
        let pairs = session.as_ref().map(|session| session.pairs.len());
        if pairs.is_some() {
            board.seats.iter_mut().for_each(|seat| seat.shut = None);
        }
        board.session = session;
        // Release: a port that sees the new number then takes the lock and reads the board.
        self.changes.fetch_add(1, Ordering::Release);
        // Only now: what a CPU sends by a queue that it finds usable is not dropped for want of a session.
        if let Some(pairs) = pairs {
            self.usable.set_first(pairs);
        }
        let woken: Vec<_> = board
            .seats
            .iter()
            .inspect(|seat| seat.changed.signal())
            .filter_map(|seat| seat.wake.clone())
            .collect();
        drop(board);
        woken.iter().for_each(|wake| wake());
    }

    /// Returns the queues whose sources still use the rings of the last session.
    pub(super) fn held(&self) -> Vec<usize> {
        let board = self.board();
        let held = board.seats.iter().enumerate().filter(|(_, seat)| seat.is_held);
        held.map(|(index, _)| index).collect()
    }

    /// Returns the sources' combined instruction.
    pub(super) fn wish(&self) -> QueueWish {
        let board = self.board();
        if board.seats.iter().all(|seat| seat.is_gone) {
            return QueueWish::Leave;
        }
        let pairs = board.session.as_ref().map_or(0, |session| session.pairs.len());
        let seats = || board.seats.iter().take(pairs).enumerate().filter(|(_, seat)| !seat.is_gone);
        let shut = seats().filter_map(|(index, seat)| Some((index, seat.shut.clone()?)));
        let shut: Shut = shut.collect();
        // A source that has gone comes from the end of the run: the others follow, and need no session.
        let is_ending = board.seats.iter().any(|seat| seat.is_gone);
        if !is_ending && !shut.is_empty() && shut.len() == pairs.min(board.seats.len()) {
            return QueueWish::Renew(shut);
        }
        let sated = seats().filter(|(_, seat)| seat.receiving == Receiving::Ending);
        QueueWish::GoOn { shut, sated: sated.map(|(index, _)| index).collect() }
    }

    /// Notes that the device has stopped receiving on a queue.
    pub(super) fn stopped_receiving(&self, index: usize) {
        let mut board = self.board();
        board.seats[index].receiving = Receiving::Off;
        let wake = board.seats[index].wake.clone();
        drop(board);
        wake.iter().for_each(|wake| wake());
    }

    fn signal(&self, event: &PeerEvent) -> std::io::Result<()> {
        #[cfg(test)]
        if self.fails_kick.swap(false, Ordering::Relaxed) {
            return Err(std::io::ErrorKind::OutOfMemory.into());
        }
        event.signal(&self.signaller)
    }

    fn board(&self) -> MutexGuard<'_, Board> {
        // The board is consistent after every operation, so a poisoned lock is usable.
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for QueueState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { is_held, is_gone, shut, .. } = self;
        write!(f, "QueueState(held: {is_held}, gone: {is_gone}, shut: {shut:?})")
    }
}

/// Handle of the session for one queue pair, owned by its source.
///
/// The source reads the [session](Self::session) in every turn. Once there is none any more, the
/// source stops using the rings and calls [`released`](Self::released): the next session waits for
/// that, and zeroes the rings.
#[derive(Debug)]
pub(super) struct Port {
    index: usize,
    shared: Arc<Switchboard>,
    /// Number of changes as of the last look; `session` is from then.
    seen: u64,
    session: Option<Arc<PortSession>>,
    changed: Arc<Event>,
}

impl Port {
    /// Returns the session, if there is one that has this queue: its rings may be used. Costs one
    /// load of a rarely written word.
    #[inline]
    pub(super) fn session(&mut self) -> Option<&Arc<PortSession>> {
        if self.shared.changes.load(Ordering::Acquire) != self.seen {
            self.look();
        }
        self.session.as_ref()
    }

    /// True if a session has begun or ended since the last call of [`session`](Self::session).
    pub(super) fn has_changed(&self) -> bool {
        self.shared.changes.load(Ordering::Acquire) != self.seen
    }

    #[cold]
    fn look(&mut self) {
        let mut board = self.shared.board();
        self.changed.clear(); // under the lock: clears only changes that are read below
        self.seen = self.shared.changes.load(Ordering::Relaxed); // written under the lock
        self.session = board.session.clone().filter(|session| self.index < session.pairs.len());
        if self.session.is_some() {
            board.seats[self.index].is_held = true;
        }
    }

    /// Notes that the source does not use the rings any more. To be called only after
    /// [`session`](Self::session) returned `None`: until then the device uses the rings.
    pub(super) fn released(&mut self) {
        debug_assert!(self.session.is_none(), "a device still has the rings");
        self.shared.board().seats[self.index].is_held = false;
        self.shared.board_changed.signal();
    }

    /// Shuts this queue for the rest of the session: the device is told to disable both rings, and the source
    /// must not post anything there until the session ends. Once all queues are shut, the session ends, and another
    /// one begins.
    pub(super) fn shut(&self, why: Reason) {
        self.shared.board().seats[self.index].shut.get_or_insert(why);
        self.shared.usable.remove(self.index);
        self.shared.board_changed.signal();
    }

    /// Requests that the device stop receiving, for the rest of the run. Buffers used until then
    /// must still be taken; sending continues.
    pub(super) fn stop_receiving(&mut self) {
        self.shared.board().seats[self.index].receiving = Receiving::Ending;
        self.shared.board_changed.signal();
    }

    /// True if the device has stopped receiving, or is not connected.
    #[must_use]
    pub(super) fn has_stopped_receiving(&self) -> bool {
        let board = self.shared.board();
        let has_this = |session: &Arc<PortSession>| self.index < session.pairs.len();
        !board.session.as_ref().is_some_and(has_this)
            || board.seats[self.index].receiving == Receiving::Off
    }

    /// Kicks the receive ring: buffers were posted. No-op without a session. Returns false if that
    /// failed, and the queue is shut.
    #[must_use]
    pub(super) fn kick_rx(&self) -> bool {
        self.kick(|events| &events.rx_kick)
    }

    /// Kicks the transmit ring: packets were posted. No-op without a session. Returns false if that
    /// failed, and the queue is shut.
    #[must_use]
    pub(super) fn kick_tx(&self) -> bool {
        self.kick(|events| &events.tx_kick)
    }

    /// Kicks a ring. A failed kick shuts the queue, because a device that is not kicked may sleep
    /// forever.
    fn kick(&self, which: impl FnOnce(&PairEvents) -> &PeerEvent) -> bool {
        let Some(events) = self.events() else { return true };
        let kicked = self.shared.signal(which(events));
        if let Err(error) = &kicked {
            self.shut(EndKind::Kick.reason(format!("it cannot be kicked: {error}")));
        }
        kicked.is_ok()
    }

    /// Returns a descriptor that becomes readable when a session begins or ends.
    #[must_use]
    pub(super) fn change(&self) -> BorrowedFd<'_> {
        self.changed.descriptor()
    }

    /// Returns a descriptor that becomes readable when the device calls, for either ring, or,
    /// without a session, when one begins. Each session has a new descriptor; a change of session
    /// wakes the CPU by [`wake_by`](Self::wake_by).
    #[must_use]
    pub(super) fn call(&self) -> BorrowedFd<'_> {
        match self.events() {
            Some(events) => events.call.descriptor(),
            None => self.change(),
        }
    }

    /// Clears pending calls. Returns true if there were any.
    pub(super) fn acknowledge_call(&self) -> bool {
        self.events().is_some_and(|events| events.call.clear())
    }

    /// Sets the waker of the CPU that drives the queue, for the start and end of sessions.
    pub(super) fn wake_by(&self, wake: Waker) {
        self.shared.board().seats[self.index].wake = Some(wake);
    }

    fn events(&self) -> Option<&PairEvents> {
        self.session.as_ref()?.pairs.get(self.index)
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        let mut board = self.shared.board();
        let seat = &mut board.seats[self.index];
        (seat.is_held, seat.is_gone, seat.wake) = (false, true, None);
        self.shared.board_changed.signal();
    }
}

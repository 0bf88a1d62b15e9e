//! A queue's end of the link: whether there is a device just now, and what was agreed with it.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_rx::arrive::Waker;
use forebay_sys::{Event, PeerEvent, Signaller};

use super::ends::{EndKind, Reason};
use super::features::Features;

/// One time that a back end was there: from its queues being enabled to its connection's end.
#[derive(Debug)]
pub(super) struct PortSession {
    /// From 1 on; no two share one.
    pub(super) number: u64,
    /// Features that were agreed on.
    pub(super) features: Features,
    /// The device's MTU, if it says one: packets are no longer than that and an Ethernet header.
    pub(super) mtu: Option<u16>,
    /// One for each queue pair that the device has; it may have fewer than were asked of it.
    pub(super) pairs: Vec<PairEvents>,
}

/// Eventfds of one queue pair (kicks and calls of its two rings). Made anew for each session, so that
/// nothing a back end does after its end reaches the next one.
#[derive(Debug)]
pub(super) struct PairEvents {
    pub(super) rx_kick: PeerEvent,
    pub(super) tx_kick: PeerEvent,
    /// Of both rings: one CPU drives them.
    pub(super) call: PeerEvent,
}

impl PairEvents {
    pub(super) fn new() -> std::io::Result<Self> {
        Ok(Self { rx_kick: PeerEvent::new()?, tx_kick: PeerEvent::new()?, call: PeerEvent::new()? })
    }
}

/// State that the thread of the link and the ports share.
#[derive(Debug)]
pub(super) struct Switchboard {
    /// Changes when a session begins or ends. Written by the link's thread, under the lock.
    changes: AtomicU64,
    board: Mutex<Board>,
    /// Has the link's thread look at the board.
    pub(super) tell: Event,
    /// Happens once, for good: the link is to end.
    pub(super) stop: Event,
    /// Context that devices are kicked by.
    signaller: Signaller,
}

#[derive(Debug)]
struct Board {
    session: Option<Arc<PortSession>>,
    seats: Box<[QueueState]>,
}

/// State of one port.
struct QueueState {
    /// The source has seen the session, so it uses the rings until it says that it does not.
    is_held: bool,
    /// The port was dropped.
    is_gone: bool,
    /// The queue is of no more use in this session.
    shut: Option<Reason>,
    /// RX state of this queue.
    receiving: Receiving,
    wake: Option<Waker>,
    /// Descriptor that a source without a session sleeps on.
    changed: Arc<Event>,
}

/// RX state of a queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Receiving {
    /// Receiving, if there is a session.
    On,
    /// The source wants an end of it.
    Ending,
    /// The device has said that it gives no more, or is not there.
    Off,
}

/// News for the link's thread.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum QueueWish {
    /// The session goes on; some queues are shut, and some are to receive no more.
    GoOn { shut: Shut, sated: Vec<usize> },
    /// All queues are shut: it is to end, and another one to begin.
    Renew(Shut),
    /// Nobody uses the device any more.
    Leave,
}

/// Queues that are shut, and why.
pub(super) type Shut = Vec<(usize, Reason)>;

impl Switchboard {
    /// A board for so many queue pairs, and their ports.
    ///
    /// # Errors
    /// When the process has no descriptors left.
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
            tell: Event::new()?,
            stop: Event::new()?,
            signaller,
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

    /// Tells all ports that a session began, or that it ended.
    pub(super) fn publish(&self, session: Option<Arc<PortSession>>) {
        let mut board = self.board();
        if session.is_some() {
            board.seats.iter_mut().for_each(|seat| seat.shut = None);
        }
        board.session = session;
        // Release: whoever sees the number takes the lock, and only then looks.
        self.changes.fetch_add(1, Ordering::Release);
        let woken: Vec<_> = board
            .seats
            .iter()
            .inspect(|seat| seat.changed.signal())
            .filter_map(|seat| seat.wake.clone())
            .collect();
        drop(board);
        woken.iter().for_each(|wake| wake());
    }

    /// The queues whose sources still use the rings of the last session.
    pub(super) fn held(&self) -> Vec<usize> {
        let board = self.board();
        let held = board.seats.iter().enumerate().filter(|(_, seat)| seat.is_held);
        held.map(|(index, _)| index).collect()
    }

    /// Fate of the session.
    pub(super) fn wish(&self) -> QueueWish {
        let board = self.board();
        if board.seats.iter().all(|seat| seat.is_gone) {
            return QueueWish::Leave;
        }
        let pairs = board.session.as_ref().map_or(0, |session| session.pairs.len());
        let seats = || board.seats.iter().take(pairs).enumerate().filter(|(_, seat)| !seat.is_gone);
        let shut = seats().filter_map(|(index, seat)| Some((index, seat.shut.clone()?)));
        let shut: Shut = shut.collect();
        if !shut.is_empty() && shut.len() == seats().count() {
            return QueueWish::Renew(shut);
        }
        let sated = seats().filter(|(_, seat)| seat.receiving == Receiving::Ending);
        QueueWish::GoOn { shut, sated: sated.map(|(index, _)| index).collect() }
    }

    /// The device has said that it gives this queue no more.
    pub(super) fn stopped_receiving(&self, index: usize) {
        let mut board = self.board();
        board.seats[index].receiving = Receiving::Off;
        let wake = board.seats[index].wake.clone();
        drop(board);
        wake.iter().for_each(|wake| wake());
    }

    fn board(&self) -> MutexGuard<'_, Board> {
        // It is kept whole at every step.
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for QueueState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { is_held, is_gone, shut, .. } = self;
        write!(f, "Seat(held: {is_held}, gone: {is_gone}, shut: {shut:?})")
    }
}

/// One queue pair's end of the link; its source has it.
///
/// The source asks for the [session](Self::session) in every turn. When there is none any more, it lets
/// go of the rings, makes them as new and says so ([`released`](Self::released)): the next session
/// waits for that.
#[derive(Debug)]
pub(super) struct Port {
    index: usize,
    shared: Arc<Switchboard>,
    /// The changes that `session` goes by.
    seen: u64,
    session: Option<Arc<PortSession>>,
    changed: Arc<Event>,
}

impl Port {
    /// The session, if there is one that has this queue: its rings may be used. As cheap as a look at
    /// one word that is rarely written.
    #[inline]
    pub(super) fn session(&mut self) -> Option<&Arc<PortSession>> {
        if self.shared.changes.load(Ordering::Acquire) != self.seen {
            self.look();
        }
        self.session.as_ref()
    }

    /// True if there is another session, or none any more, since [`session`](Self::session) was asked
    /// for.
    pub(super) fn has_changed(&self) -> bool {
        self.shared.changes.load(Ordering::Acquire) != self.seen
    }

    #[cold]
    fn look(&mut self) {
        let mut board = self.shared.board();
        self.changed.clear(); // under the lock: it stands for no change but those that are seen now
        self.seen = self.shared.changes.load(Ordering::Relaxed); // written under the lock
        self.session = board.session.clone().filter(|session| self.index < session.pairs.len());
        if self.session.is_some() {
            board.seats[self.index].is_held = true;
        }
    }

    /// The source does not touch the rings any more, and has made them as new. Only when
    /// [`session`](Self::session) has said that there is none: until then the device uses them.
    pub(super) fn released(&mut self) {
        debug_assert!(self.session.is_none(), "a device still has the rings");
        self.shared.board().seats[self.index].is_held = false;
        self.shared.tell.signal();
    }

    /// Says that this queue is of no more use in this session, and `why`. The source leaves the rings
    /// alone until the session is over. When all queues are shut, it ends, and another one begins.
    pub(super) fn shut(&self, why: Reason) {
        self.shared.board().seats[self.index].shut.get_or_insert(why);
        self.shared.tell.signal();
    }

    /// Has the device give no more, for the rest of the run. What it has given until then is still to be
    /// taken; sending goes on.
    pub(super) fn stop_receiving(&mut self) {
        self.shared.board().seats[self.index].receiving = Receiving::Ending;
        self.shared.tell.signal();
    }

    /// True if the device has said so, or is not there.
    #[must_use]
    pub(super) fn has_stopped_receiving(&self) -> bool {
        let board = self.shared.board();
        let has_this = |session: &Arc<PortSession>| self.index < session.pairs.len();
        !board.session.as_ref().is_some_and(has_this)
            || board.seats[self.index].receiving == Receiving::Off
    }

    /// Tells the device that there are buffers to receive into. Nothing without a session.
    pub(super) fn kick_rx(&self) {
        self.kick(|events| &events.rx_kick);
    }

    /// Tells the device that there is something to send. Nothing without a session.
    pub(super) fn kick_tx(&self) {
        self.kick(|events| &events.tx_kick);
    }

    /// A device that is not kicked may sleep for ever, so a kick that cannot be given ends the queue.
    fn kick(&self, which: impl FnOnce(&PairEvents) -> &PeerEvent) {
        if let Some(events) = self.events()
            && let Err(error) = which(events).signal(&self.shared.signaller)
        {
            self.shut(EndKind::Kick.steer_reason(format!("it cannot be kicked: {error}")));
        }
    }

    /// Descriptor that becomes readable when a session begins or ends.
    #[must_use]
    pub(super) fn change(&self) -> BorrowedFd<'_> {
        self.changed.descriptor()
    }

    /// Descriptors that become readable when the device calls, for either ring; without a session, when one
    /// begins. It is another one after each change, and a change wakes by [`wake_by`](Self::wake_by).
    #[must_use]
    pub(super) fn call(&self) -> BorrowedFd<'_> {
        match self.events() {
            Some(events) => events.call.descriptor(),
            None => self.change(),
        }
    }

    /// Takes the calls that there were. Returns whether there were any.
    pub(super) fn acknowledge_call(&self) -> bool {
        self.events().is_some_and(|events| events.call.clear())
    }

    /// Wake-up of the CPU that drives the queue when a session begins or ends.
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
        self.shared.tell.signal();
    }
}

//! Sessions with back ends: a thread that connects to a back end, sets it up, notices its end and
//! begins again.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use forebay_sys::error::{Error, Result};
use forebay_sys::{Event, Signaller};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::commands::Remarks;
use super::connect::{Endpoint, is_absence};
use super::control::ControlPlace;
use super::ends::{EndKind, Reason, SessionEnds};
use super::features::RequestedFeatures;
use super::frontend::{BackendChannel, FrontendFailure, MemoryTable, QueueRings, SessionPlan};
use super::memory::RingPlace;
use super::port::{Port, PortSession, QueueWish, Shut, Switchboard};
use crate::config::virtio::Role;
use crate::tx_queue::UsableQueues;
use crate::{BackEndLink, Facts};

/// Time limit for a back end to be set up, or to stop.
const CONTROL_TIMEOUT: Duration = Duration::from_secs(2);

/// Interval of attempts to connect to a back end, also of one that closes as soon as it is set up.
const RECONNECT_PAUSE: Duration = Duration::from_millis(50);

/// Interval of looks for the socket's file while back ends are waited for at it.
const FILE_LOOK: Duration = Duration::from_secs(1);

/// Longest pause after a back end that could not be set up; the pause doubles each time.
const REFUSED_PAUSE_MAX: Duration = Duration::from_millis(400);

/// Time limit for the session thread to end: longer than it takes to cut off a back end that does
/// not stop. Beyond that only the kernel can hold the thread, as when it closes a descriptor of
/// another file system that a back end has sent.
const END_TIMEOUT: Duration = Duration::from_secs(4);

/// Maximum number of queue pairs: a message names a ring by eight bits (`SET_VRING_KICK`).
pub const QUEUE_PAIRS_MAX: usize = 128;

/// Settings of a session thread.
#[derive(Debug)]
pub(super) struct VhostSessionConfig<'a> {
    /// Path of the socket.
    pub(super) path: &'a Path,
    /// Side that listens.
    pub(super) role: Role,
    /// Requested features.
    pub(super) requested: RequestedFeatures,
    /// Memory shared with the device.
    pub(super) memory: MemoryTable,
    /// Rings in that memory, for each queue pair.
    pub(super) queues: Vec<QueueRings>,
    /// Memory of these rings, to be zeroed for each session.
    pub(super) places: Vec<RingPlace>,
    /// Place of the control queue in that memory.
    pub(super) control: ControlPlace,
    /// Facts to update: `link`, `features`, `queues`, `sessions`, `device_hash`, and those of
    /// [`SessionEnds`].
    pub(super) facts: Facts,
}

/// Handle of the session thread; its drop stops the back end and the thread.
#[derive(Debug)]
pub(super) struct VhostSession {
    shared: Arc<Switchboard>,
    thread: Option<JoinHandle<()>>,
    /// Signalled when the thread is about to end.
    ended: Arc<Event>,
    back_end: Arc<BackEndLink>,
    facts: Facts,
}

impl VhostSession {
    /// Starts the thread that looks for back ends and sets them up. Returns a port for each queue
    /// pair.
    ///
    /// # Errors
    /// If there can never be a back end at that path, or the system refuses a resource. A missing
    /// back end is not an error.
    pub(super) fn start(config: VhostSessionConfig<'_>) -> Result<(Self, Vec<Port>)> {
        let VhostSessionConfig { path, role, requested, memory, queues, places, control, facts } =
            config;
        if !(1..=QUEUE_PAIRS_MAX).contains(&queues.len()) {
            return Err(Error::Setting {
                what: "the queue pairs of a vhost-user device",
                value: queues.len().to_string(),
                why: format!("there are 1 to {QUEUE_PAIRS_MAX}"),
            });
        }
        let refused = |source| Error::Device {
            name: path.display().to_string(),
            what: "start its link".to_owned(),
            source,
            help: "check the limits on descriptors and threads (ulimit -n, ulimit -u)".to_owned(),
        };
        let (meeting, first) = Endpoint::open(path, role)?;
        let signaller = Signaller::new().map_err(|source| no_signals(path, source))?;
        let (shared, ports) = Switchboard::new(queues.len(), signaller).map_err(refused)?;
        let ended = Arc::new(Event::new().map_err(refused)?);
        let plan = SessionPlan { memory, queues, control, requested };
        let (of_thread, told) = (Arc::clone(&shared), facts.clone());
        let ends = SessionEnds::new(told.clone());
        let back_end = Arc::<BackEndLink>::default();
        let keeper = SessionThread {
            shared: of_thread,
            meeting,
            plan,
            places,
            back_end: Arc::clone(&back_end),
            facts: told,
            ends,
            path: path.to_owned(),
            number: 0,
        };
        facts.set("sessions", "0".to_owned());
        let thread = thread::Builder::new().name("forebay-virtio".to_owned());
        let about_to_end = Arc::clone(&ended);
        let run = move || {
            keeper.run(first);
            about_to_end.signal();
        };
        let thread = thread.spawn(run).map_err(refused)?;
        Ok((Self { shared, thread: Some(thread), ended, back_end, facts }, ports))
    }

    /// Handle without a thread: the test itself publishes sessions.
    #[cfg(test)]
    pub(super) fn without_thread(shared: &Arc<Switchboard>) -> Self {
        let ended = Arc::new(Event::new().unwrap_or_else(|error| panic!("{error}")));
        let (back_end, facts) = (Arc::default(), Facts::default());
        Self { shared: Arc::clone(shared), thread: None, ended, back_end, facts }
    }

    /// Queue pairs that can send.
    pub(super) fn usable(&self) -> Arc<UsableQueues> {
        Arc::clone(&self.shared.usable)
    }

    /// Connection to the back end.
    pub(super) fn back_end(&self) -> Arc<BackEndLink> {
        Arc::clone(&self.back_end)
    }

    /// Stops the device and disconnects from it. Takes as long as the device takes to answer, at
    /// most [`CONTROL_TIMEOUT`], and in any case at most [`END_TIMEOUT`].
    pub(super) fn stop(&mut self) {
        self.shared.stop.signal();
        let Some(thread) = self.thread.take() else { return };
        let ended = self.ended.descriptor();
        wait(&mut [PollFd::from_borrowed_fd(ended, PollFlags::IN)], END_TIMEOUT);
        if is_readable(ended) {
            // The thread returns no value, and nothing in it panics.
            let _ = thread.join();
        } else {
            // The thread owns all that it uses, the memory of the rings included, so it may be left
            // alone.
            self.facts.set("link", "left alone: its thread does not end".to_owned());
        }
    }
}

/// Error for an AIO context that the kernel refuses.
fn no_signals(path: &Path, source: io::Error) -> Error {
    let help = match source.raw_os_error() {
        Some(libc::EAGAIN) => "raise fs.aio-max-nr with sysctl: fs.aio-nr has come up to it",
        _ => "this needs a kernel with CONFIG_AIO, and permission to call io_setup (seccomp)",
    };
    Error::Device {
        name: path.display().to_string(),
        what: "make a context to kick it by (io_setup)".to_owned(),
        source,
        help: help.to_owned(),
    }
}

impl Drop for VhostSession {
    fn drop(&mut self) {
        self.stop();
    }
}

/// State of the thread.
struct SessionThread {
    shared: Arc<Switchboard>,
    meeting: Endpoint,
    plan: SessionPlan,
    places: Vec<RingPlace>,
    back_end: Arc<BackEndLink>,
    facts: Facts,
    ends: SessionEnds,
    /// Path of the socket.
    path: PathBuf,
    /// Number of the last session.
    number: u64,
}

/// Reason why a session ended.
enum SessionEnd {
    /// The back end is gone.
    Gone(Reason),
    /// Another session is to begin.
    Renew(Reason),
    /// The thread is to end.
    Stop,
}

impl SessionThread {
    /// Runs one session after the other.
    fn run(mut self, mut met: Option<UnixStream>) {
        let mut refused_pause = RECONNECT_PAUSE;
        while self.wait_for_release() {
            let Some(stream) = met.take().or_else(|| self.meet()) else { break };
            self.report_link("setting up".to_owned());
            // Nobody has the rings now. Later, a device may have written its wish for no kicks.
            self.places.iter().for_each(RingPlace::clear);
            match self.set_up(&stream) {
                Ok((front, session)) => {
                    let begun = Instant::now();
                    refused_pause = RECONNECT_PAUSE;
                    match self.session(front, session, &stream) {
                        SessionEnd::Gone(why) => {
                            self.ends.ended(&why);
                            self.rest(RECONNECT_PAUSE.saturating_sub(begun.elapsed()));
                        }
                        SessionEnd::Renew(why) => {
                            self.ends.ended(&why);
                            self.rest(RECONNECT_PAUSE);
                        }
                        SessionEnd::Stop => break,
                    }
                }
                Err(why) => {
                    drop(stream);
                    if self.is_stopped() {
                        break; // the end of the run has cut the setup short
                    }
                    self.back_end.refuse(&why);
                    self.report_link(format!("refused: {why}"));
                    self.rest(refused_pause);
                    refused_pause = (refused_pause * 2).min(REFUSED_PAUSE_MAX);
                }
            }
        }
    }

    /// Waits until no source uses the rings any more. Returns false if the thread is to end.
    fn wait_for_release(&self) -> bool {
        loop {
            if self.is_stopped() || self.shared.wish() == QueueWish::Leave {
                return false;
            }
            let held = self.shared.held();
            if held.is_empty() {
                return true;
            }
            self.report_link(format!("waiting for queues to let go of their rings: {held:?}"));
            self.shared.board_changed.wait(&[self.shared.stop.descriptor()], None);
        }
    }

    /// Waits for a back end; `None` if the thread is to end.
    fn meet(&mut self) -> Option<UnixStream> {
        loop {
            let error = match self.meeting.try_meet() {
                Ok(stream) => return Some(stream),
                Err(error) => error,
            };
            let restored = self.meeting.restore(&self.path);
            let blocked = restored.err().map(|error| error.to_string());
            // After another error the listener may stay readable: polling it would loop without a
            // pause.
            let is_quiet = blocked.is_none() && is_absence(&error);
            let door = self.meeting.descriptor().filter(|_| is_quiet);
            let why = blocked.clone().unwrap_or_else(|| error.to_string());
            let why = door.map_or_else(|| format!(": {why}"), |_| String::new());
            let how = format!("waiting for a back end at {}{why}", self.path.display());
            self.back_end.wait(how.clone(), blocked);
            self.facts.set("link", how);
            let at_most = if door.is_some() { FILE_LOOK } else { RECONNECT_PAUSE };
            let stop = self.shared.stop.descriptor();
            let watched: Vec<_> = door.into_iter().chain([stop]).collect();
            self.shared.board_changed.wait(&watched, Some(at_most));
            if self.is_stopped() || self.shared.wish() == QueueWish::Leave {
                return None;
            }
        }
    }

    /// Sets a back end up, or returns why that failed.
    fn set_up(&mut self, stream: &UnixStream) -> Result<(BackendChannel, PortSession), String> {
        let number = self.number + 1;
        let asked = self.plan.queues.len();
        let set_up = || BackendChannel::set_up(stream, &mut self.plan, number);
        let (front, session) = within(stream, Some(&self.shared.stop), set_up)?;
        self.number = number;
        let Remarks { queues, device_hash } = front.remarks().clone();
        let has = session.pairs.len();
        let count = if has < asked { format!("{has} of {asked}") } else { has.to_string() };
        let fewer = (has < asked).then(|| "the back end has no more".to_owned());
        let why = queues.or(fewer).map_or_else(String::new, |why| format!(": {why}"));
        let facts = [
            ("sessions", Some(number.to_string())),
            ("features", Some(session.features.to_string())),
            ("queues", Some(count + &why)),
            ("device_hash", device_hash),
        ];
        let known = facts.into_iter().filter_map(|(name, value)| Some((name, value?)));
        self.facts.set_together(known);
        self.report_link("up".to_owned());
        Ok((front, session))
    }

    /// Runs one session, from publishing it to its end.
    fn session(
        &mut self,
        front: BackendChannel,
        session: PortSession,
        stream: &UnixStream,
    ) -> SessionEnd {
        self.shared.publish(Some(Arc::new(session)));
        self.back_end.begin();
        let mut front = front;
        let end = self.watch(&mut front, stream);
        match &end {
            SessionEnd::Gone(why) | SessionEnd::Renew(why) => self.back_end.end(&why.why),
            SessionEnd::Stop => {} // the run ends, and has not lost it
        }
        if !matches!(end, SessionEnd::Gone(_)) {
            // A back end that does not answer is cut off, which is all that can be done.
            let _ = within(stream, None, || front.stop());
        }
        drop(front);
        // Cut before the sources release the rings, so that a live device notices the end.
        let _ = stream.shutdown(std::net::Shutdown::Both);
        self.shared.publish(None);
        end
    }

    /// Watches a session until it ends.
    fn watch(&mut self, front: &mut BackendChannel, stream: &UnixStream) -> SessionEnd {
        let mut recorded = Vec::new();
        loop {
            if self.is_stopped() {
                return SessionEnd::Stop;
            }
            let done = match self.shared.wish() {
                QueueWish::Leave => return SessionEnd::Stop,
                QueueWish::Renew(shut) => {
                    self.record_shut(&shut, &mut recorded);
                    let why = shut.into_iter().next().map(|(_, why)| why);
                    return SessionEnd::Renew(why.unwrap_or_else(|| unreachable!("some are shut")));
                }
                QueueWish::GoOn { shut, sated } => {
                    let news = self.record_shut(&shut, &mut recorded);
                    self.stop_queues(front, stream, &sated, &news)
                }
            };
            let gone = match done {
                Err(why) => Some(EndKind::Message.reason(why)),
                Ok(()) if self.is_cut(stream) => {
                    Some(EndKind::Closed.reason("the back end closed the connection"))
                }
                Ok(()) => None,
            };
            // The end of the run cuts a conversation short, which is no loss.
            if let Some(why) = gone.filter(|_| !self.is_stopped()) {
                return SessionEnd::Gone(why);
            }
        }
    }

    /// Records queues that were newly shut. Returns them.
    fn record_shut(&mut self, shut: &Shut, recorded: &mut Vec<usize>) -> Vec<usize> {
        let news = shut.iter().filter(|(pair, _)| !recorded.contains(pair));
        let news = news.map(|(pair, why)| {
            self.back_end.shut(self.ends.shut(self.number, *pair, why));
            *pair
        });
        let news: Vec<_> = news.collect();
        recorded.extend(&news);
        news
    }

    /// Stops some receive queues, and disables the shut queue pairs.
    fn stop_queues(
        &self,
        front: &mut BackendChannel,
        stream: &UnixStream,
        sated: &[usize],
        shut: &[usize],
    ) -> Result<(), String> {
        for &pair in sated {
            within(stream, Some(&self.shared.stop), || front.stop_receiving(pair))?;
            self.shared.stopped_receiving(pair);
        }
        shut.iter()
            .try_for_each(|&pair| within(stream, Some(&self.shared.stop), || front.disable(pair)))
    }

    /// Waits for an event; returns whether the connection has ended.
    fn is_cut(&self, stream: &UnixStream) -> bool {
        // Unsolicited messages are ignored: only the end of the connection counts.
        let mut watched = [
            PollFd::new(stream, PollFlags::RDHUP),
            PollFd::from_borrowed_fd(self.shared.stop.descriptor(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.shared.board_changed.descriptor(), PollFlags::IN),
        ];
        // After an interrupt, the caller polls again.
        let _ = poll(&mut watched, None);
        let has_changed = watched[2].revents().contains(PollFlags::IN);
        let ends = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
        let is_cut = watched[0].revents().intersects(ends);
        if has_changed {
            self.shared.board_changed.clear();
        }
        is_cut
    }

    /// Pauses, unless the thread is to end.
    fn rest(&self, pause: Duration) {
        let stop = self.shared.stop.descriptor();
        wait(&mut [PollFd::from_borrowed_fd(stop, PollFlags::IN)], pause);
    }

    fn is_stopped(&self) -> bool {
        is_readable(self.shared.stop.descriptor())
    }

    fn report_link(&self, how: String) {
        self.back_end.set_state(how.clone());
        self.facts.set("link", how);
    }
}

/// Runs a conversation with the back end. The connection is shut down if that takes too long, or
/// when `stop` is signalled.
fn within<T>(
    stream: &UnixStream,
    stop: Option<&Event>,
    conversation: impl FnOnce() -> Result<T, FrontendFailure>,
) -> Result<T, String> {
    let done = Event::new().map_err(|error| format!("eventfd: {error}"))?;
    let guard = || {
        let mut watched = vec![PollFd::from_borrowed_fd(done.descriptor(), PollFlags::IN)];
        watched.extend(stop.map(|stop| PollFd::from_borrowed_fd(stop.descriptor(), PollFlags::IN)));
        wait(&mut watched, CONTROL_TIMEOUT);
        let is_late = !is_readable(done.descriptor());
        if is_late {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
        is_late
    };
    thread::scope(|scope| {
        let guard = thread::Builder::new().spawn_scoped(scope, guard);
        let guard = guard.map_err(|error| format!("cannot start a thread: {error}"))?;
        let said = conversation();
        done.signal();
        let is_late = guard.join().unwrap_or(true);
        match said {
            Err(failure) if is_late && stop.is_none_or(|stop| !is_readable(stop.descriptor())) => {
                Err(format!("{failure} (no answer in {} s)", CONTROL_TIMEOUT.as_secs()))
            }
            said => said.map_err(|failure| failure.to_string()),
        }
    })
}

/// Waits for one of the descriptors, at most that long; signals do not shorten the wait.
fn wait(watched: &mut [PollFd<'_>], at_most: Duration) {
    let until = Instant::now() + at_most;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let Ok(left) = Timespec::try_from(left) else { return };
        match poll(watched, Some(&left)) {
            Err(rustix::io::Errno::INTR) => {}
            _ => return,
        }
    }
}

/// True if an event was signalled, or a descriptor has data.
fn is_readable(descriptor: BorrowedFd<'_>) -> bool {
    let mut watched = [PollFd::from_borrowed_fd(descriptor.as_fd(), PollFlags::IN)];
    poll(&mut watched, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests;

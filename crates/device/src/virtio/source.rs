//! One queue pair of a virtio device, as an engine polls it: across sessions.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use forebay_buf::Pool;
use forebay_rx::Source;
use forebay_rx::arrive::{Attachment, Burst, FrameNeeds, PollRequest, Polled, SourceError};
use forebay_sys::clock::now_since_1970_ns;
use forebay_sys::virtio::InvalidRing;

use super::ends::EndKind;
use super::port::{Port, PortSession};
use super::receive::{LARGEST_BYTES, PollState, VirtioReceiver};
use super::session::VhostSession;
use super::transmit::VirtioTransmit;
use crate::tx_queue::TX_QUEUE_PACKETS;

/// Time limit for the device to stop receiving when a run ends.
const STOPPING_NS: u64 = 500_000_000;

/// Longest sleep of a source that waits for memory, the rest of a packet, or sent packets.
const SHORT_SLEEP_NS: u64 = 1_000_000;

/// One queue pair of a device.
pub struct VirtioSource {
    port: Port,
    /// Session in which the rings are used.
    session: Option<Arc<PortSession>>,
    receiver: VirtioReceiver,
    transmit: VirtioTransmit,
    /// True if the device has violated the ring's protocol: the receive ring is not used until the
    /// next session. After another reason to shut the pair, packets that arrived before are still taken.
    is_shut: bool,
    /// True if the device is to call, for either ring.
    is_armed: bool,
    /// Deadline for the device to stop, set when the run ends.
    stopping: Option<u64>,
    /// Session thread. Dropped after the port, so that the last source's drop has no port to wait
    /// for.
    _link: Arc<VhostSession>,
}

impl VirtioSource {
    pub(super) fn new(
        link: Arc<VhostSession>,
        port: Port,
        receiver: VirtioReceiver,
        transmit: VirtioTransmit,
    ) -> Self {
        let (session, stopping) = (None, None);
        let (is_shut, is_armed) = (false, false);
        Self { port, session, receiver, transmit, is_shut, is_armed, stopping, _link: link }
    }

    /// Follows the start and end of sessions. Buffers used before the end are taken first; returns
    /// false while some are left.
    fn follow(&mut self, ask: PollRequest, pool: &mut Pool, burst: &mut Burst) -> bool {
        let now = self.port.session();
        if now.map(|session| session.number) == self.session.as_ref().map(|session| session.number)
        {
            return true;
        }
        let now = now.cloned();
        if self.session.is_some() {
            // A device that was cut off may go on writing.
            self.receiver.post_no_more();
            if self.take(ask, pool, burst) == Ok(PollState::More) {
                return false;
            }
            self.receiver.end(pool, burst);
            self.transmit.set_session(None);
            self.session = None;
            (self.is_shut, self.is_armed) = (false, false);
            self.port.released();
        } else if let Some(session) = now {
            self.transmit.set_session(Some(&session));
            if self.receiver.begin(&session) && !self.port.kick_rx() {
                self.transmit.shut();
            }
            self.session = Some(session);
        }
        true
    }

    /// Disables calls after a sleep.
    fn disarm(&mut self) {
        if std::mem::take(&mut self.is_armed) {
            self.port.acknowledge_call();
            if !self.is_shut {
                self.receiver.ask_for_call(false);
            }
        }
    }

    /// Takes received packets.
    fn take(
        &mut self,
        ask: PollRequest,
        pool: &mut Pool,
        burst: &mut Burst,
    ) -> Result<PollState, InvalidRing> {
        let first = burst.packets.len();
        let rest = self.receiver.turn(ask.max, ask.now_ns, pool, burst);
        if burst.packets.len() > first {
            let timestamp_ns = now_since_1970_ns();
            burst.packets[first..].iter_mut().for_each(|packet| packet.timestamp_ns = timestamp_ns);
        }
        rest
    }

    /// Takes received packets, and posts buffers in their place.
    fn receive(&mut self, ask: PollRequest, pool: &mut Pool, burst: &mut Burst) -> PollState {
        match self.take(ask, pool, burst) {
            Ok(rest) => {
                // When the run ends nothing is posted any more, so that even a device that does not
                // stop runs out of buffers, after at most a ring's worth.
                let posts = self.stopping.is_none() && !self.transmit.is_shut();
                if posts && self.receiver.refill() && !self.port.kick_rx() {
                    self.transmit.shut();
                }
                rest
            }
            Err(lie) => {
                self.is_shut = true;
                self.transmit.shut();
                self.port.shut(EndKind::UsedIndex.reason(format!("receive ring: {lie}")));
                PollState::Nothing
            }
        }
    }

    /// Ends receiving when a run ends: the device is stopped, and its used buffers are taken.
    /// Returns true when done.
    fn is_over(
        &mut self,
        ask: PollRequest,
        rest: PollState,
        pool: &mut Pool,
        burst: &mut Burst,
    ) -> bool {
        let until_ns = *self.stopping.get_or_insert_with(|| {
            self.port.stop_receiving();
            self.receiver.post_no_more();
            ask.now_ns.saturating_add(STOPPING_NS)
        });
        if rest == PollState::More || (!self.port.has_stopped_receiving() && ask.now_ns < until_ns)
        {
            return false;
        }
        self.receiver.end(pool, burst);
        true
    }
}

impl Source for VirtioSource {
    fn needs(&self) -> FrameNeeds {
        FrameNeeds {
            device_frames: TX_QUEUE_PACKETS,
            largest_bytes: LARGEST_BYTES,
            head_frames: 1,
            ..FrameNeeds::default()
        }
    }

    fn attach(&mut self, at: Attachment<'_>) -> Result<(), SourceError> {
        self.receiver.number_by(at.numbering);
        self.transmit.consumer().wake_by(at.wake_to_send);
        self.port.wake_by(at.wake);
        Ok(())
    }

    fn poll(
        &mut self,
        ask: PollRequest,
        pool: &mut Pool,
        burst: &mut Burst,
    ) -> Result<Polled, SourceError> {
        self.disarm();
        if !self.follow(ask, pool, burst) {
            return Ok(Polled::Ready); // the rest follows in the next turn
        }
        if self.session.is_none() {
            if ask.is_last {
                self.stopping = Some(ask.now_ns);
                return Ok(Polled::Exhausted);
            }
            return Ok(Polled::Idle);
        }
        let rest = if self.is_shut { PollState::Nothing } else { self.receive(ask, pool, burst) };
        if ask.is_last {
            let is_over = self.is_over(ask, rest, pool, burst);
            return Ok(if is_over { Polled::Exhausted } else { Polled::Ready });
        }
        let soon_ns = ask.now_ns.saturating_add(SHORT_SLEEP_NS);
        let due_ns = match rest {
            PollState::Part { until_ns } => until_ns.min(soon_ns),
            PollState::More | PollState::Nothing => soon_ns,
        };
        Ok(match rest {
            PollState::More => Polled::Ready,
            // No event announces memory that returns.
            _ if self.is_starved() => Polled::BehindUntil { now_ns: due_ns },
            PollState::Part { .. } => Polled::IdleUntil { now_ns: due_ns },
            // No event announces sent packets, which are counted when they complete.
            PollState::Nothing if self.transmit.is_sending() => {
                Polled::IdleUntil { now_ns: due_ns }
            }
            PollState::Nothing => Polled::Idle,
        })
    }

    fn transmit(&mut self, pool: &mut Pool) -> usize {
        let is_over = self.session.is_none() && self.stopping.is_some();
        self.transmit.turn(&mut self.port, is_over, pool)
    }

    /// Returns the descriptor to sleep on. While calls are off, this is not the call descriptor,
    /// because pending calls of a shut queue would keep its CPU awake until the next session.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        let is_deaf = self.session.is_some() && !self.is_armed;
        Some(if is_deaf { self.port.change() } else { self.port.call() })
    }

    /// Enables calls, since the caller is about to sleep, and checks for work. A session that began
    /// or ended since the last poll has woken an awake CPU, and would not wake it again.
    fn has_work(&mut self) -> bool {
        let is_ending = self.stopping.is_some();
        let is_receiving = self.session.is_some() && !self.is_shut && !is_ending;
        let has_work = !is_ending && self.port.has_changed()
            || self.transmit.has_work()
            || is_ending && self.transmit.is_sending()
            || is_receiving && self.arm();
        self.is_armed |= self.transmit.is_armed();
        has_work
    }

    /// Leaves the calls of the receive ring as they are: each would cost the device a system call.
    fn has_unsent(&mut self) -> bool {
        let has_unsent = self.transmit.has_work();
        self.is_armed |= self.transmit.is_armed();
        has_unsent
    }

    fn is_sending(&self) -> bool {
        self.transmit.is_sending()
    }
}

impl VirtioSource {
    /// True if the device may have too few buffers for what arrives. A shut queue has none, and nothing arrives there.
    fn is_starved(&self) -> bool {
        !self.transmit.is_shut() && self.receiver.is_starved()
    }

    fn arm(&mut self) -> bool {
        self.is_armed = true;
        self.receiver.ask_for_call(true)
    }
}

#[cfg(test)]
mod tests;

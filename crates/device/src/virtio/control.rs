//! The control queue: commands to a device (virtio 1.2, section 5.1.6.5).
//!
//! All commands of a session are posted before the device sees the ring, so one kick is enough. The
//! eventfd of that kick is passed to the device already signalled, because a back end that holds an
//! eventfd can make writes to it block. Answers are polled for; no calls are requested.

use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use forebay_buf::{PageFrag, PageFragCache};
use forebay_sys::virtio::{BufferId, RingAddresses, RingDescriptor, Virtqueue};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use virtio_bindings::virtio_net::VIRTIO_NET_OK;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;

use super::commands::{COMMANDS_MAX, CommandAnswer, ControlCommand, HashKey};
use super::features::Features;
use super::memory::RingPlace;
use super::receive::layout;

/// Number of ring entries: room for all commands, of three descriptors each.
pub(super) const CONTROL_QUEUE_SIZE: u16 = 16;

/// Time that a device may take to answer all commands. A device that never answers may still be
/// usable (see [`Commands`](super::commands::Commands)), and its packets flow within a second.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);

/// Interval of polling for answers.
const ANSWER_LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };

/// Number of consecutive sessions that may fail because of the control queue. It is more than one
/// because a back end may have been killed just then.
const TRIES: u32 = 2;

/// Length of `class` and `command` (struct virtio_net_ctrl).
const HEADER_BYTES: u32 = 2;

/// Room for a command, or for its answer, in a cache line of its own.
const ROOM_BYTES: u32 = 64;

/// Initial value of an answer: neither `VIRTIO_NET_OK` nor `VIRTIO_NET_ERR`.
const UNANSWERED: u8 = 0xff;

/// Control ring and commands in the shared memory.
#[derive(Debug)]
pub(super) struct ControlPlace {
    ring: RingPlace,
    slots: [CommandSlot; COMMANDS_MAX],
    pub(super) hash_key: HashKey,
    /// Number of sessions in a row that failed because of the queue, and the last failure.
    failures: u32,
    last_failure: String,
}

/// Memory of one command, and of its answer.
#[derive(Debug)]
struct CommandSlot {
    request: PageFrag,
    answer: PageFrag,
}

impl ControlPlace {
    /// Creates the place, with commands in a block of their own.
    pub(super) fn new(ring: RingPlace, mut block: PageFragCache) -> Self {
        let mut room = || {
            let cut = block.cut(ROOM_BYTES);
            cut.unwrap_or_else(|| unreachable!("a block has room for all commands"))
        };
        let slots = [(); COMMANDS_MAX].map(|()| CommandSlot { request: room(), answer: room() });
        let (failures, last_failure) = (0, String::new());
        Self { ring, slots, hash_key: HashKey::drawn(), failures, last_failure }
    }

    /// Notes that a session failed because of the queue.
    pub(super) fn failed(&mut self, why: String) {
        (self.failures, self.last_failure) = (self.failures + 1, why);
    }

    /// Notes that a session's commands were answered or timed out, without a failure.
    pub(super) fn worked(&mut self) {
        self.failures = 0;
    }

    /// Returns the reason why this session does not use the queue, if it has failed too often: a
    /// back end that refuses such a ring, or violates its protocol, may still serve packets. The
    /// next session tries again, since its back end may be another one.
    pub(super) fn given_up(&mut self) -> Option<String> {
        if self.failures < TRIES {
            return None;
        }
        self.failures = 0;
        Some(format!("it is done without commands: {}", self.last_failure))
    }

    /// Creates a ring with these commands. No device uses the previous ring any more.
    pub(super) fn post(
        &mut self,
        features: Features,
        commands: &[ControlCommand],
    ) -> PostedCommand<'_> {
        let event_idx = features.has(VIRTIO_RING_F_EVENT_IDX);
        self.ring.clear();
        let mut ring = self.ring.ring(layout(features), event_idx);
        let slots = commands.iter().zip(&mut self.slots);
        let waiting = slots.map(|(command, slot)| Waiting {
            id: slot.post(&command.bytes(), &mut ring),
            slot,
            answer: CommandAnswer::Silence,
        });
        let waiting = waiting.collect();
        let _ = ring.ask_for_call(false);
        // The kick is passed with the ring, already signalled.
        let _ = ring.publish();
        PostedCommand { ring, waiting }
    }
}

impl CommandSlot {
    /// Posts a command, in descriptors as the kernel does: header, body, answer.
    fn post(&mut self, command: &[u8], ring: &mut Virtqueue) -> BufferId {
        self.request.copy_out(0, command);
        self.answer.copy_out(0, &[UNANSWERED]);
        let address = self.request.address();
        let len_bytes = u32::try_from(command.len()).unwrap_or(ROOM_BYTES);
        let header = RingDescriptor { address, len_bytes: HEADER_BYTES };
        let body = RingDescriptor {
            address: address + u64::from(HEADER_BYTES),
            len_bytes: len_bytes - HEADER_BYTES,
        };
        let answer = RingDescriptor { address: self.answer.address(), len_bytes: 1 };
        let posted = ring.post_request(&[header, body], &[answer]);
        posted.unwrap_or_else(|_| unreachable!("a new ring has room for all commands"))
    }

    /// Returns the device's answer: a copy, since the device may change its memory.
    fn answer(&self) -> CommandAnswer {
        let mut answer = [0];
        self.answer.copy_in(0, &mut answer);
        if u32::from(answer[0]) == VIRTIO_NET_OK {
            CommandAnswer::Done
        } else {
            CommandAnswer::Refused
        }
    }
}

/// Commands posted in their ring.
#[derive(Debug)]
pub(super) struct PostedCommand<'a> {
    ring: Virtqueue,
    waiting: Vec<Waiting<'a>>,
}

/// Command that waits for its answer.
#[derive(Debug)]
struct Waiting<'a> {
    id: BufferId,
    slot: &'a CommandSlot,
    answer: CommandAnswer,
}

impl PostedCommand<'_> {
    /// Returns the ring's addresses for the device.
    pub(super) fn addresses(&self) -> RingAddresses {
        self.ring.addresses()
    }

    /// Waits for the answers, one for each command, at most [`ANSWER_TIMEOUT`].
    ///
    /// # Errors
    /// A ring violation of the device, or the end of its connection.
    pub(super) fn answers(mut self, stream: &UnixStream) -> Result<Vec<CommandAnswer>, String> {
        let until = Instant::now() + ANSWER_TIMEOUT;
        let mut left = self.waiting.len();
        loop {
            left -= self.take_answers()?;
            if left == 0 || Instant::now() >= until {
                return Ok(self.waiting.iter().map(|waiting| waiting.answer).collect());
            }
            if is_cut(stream) {
                return Err("the back end closed the connection".to_owned());
            }
        }
    }

    /// Takes the answers that have arrived, and returns their number. Their total is at most the
    /// number of commands, since each is taken once.
    fn take_answers(&mut self) -> Result<usize, String> {
        let mut taken = 0;
        while let Some(used) = self.ring.next_used().map_err(|lie| lie.to_string())? {
            let id = self.ring.take(used.id);
            let waiting = self.waiting.iter_mut().find(|waiting| Some(waiting.id) == id);
            let Some(waiting) = waiting else {
                return Err(format!("it answered {}, which is not a command that it has", used.id));
            };
            // The device writes `ack`, one byte (struct virtio_net_ctrl).
            if used.len_bytes != 1 {
                return Err(format!("it answered with {} bytes, not with one", used.len_bytes));
            }
            waiting.answer = waiting.slot.answer();
            taken += 1;
        }
        Ok(taken)
    }
}

/// Waits a moment; returns whether the connection has ended meanwhile.
fn is_cut(stream: &UnixStream) -> bool {
    let mut watched = [PollFd::new(stream, PollFlags::RDHUP)];
    // After an interrupt, the caller polls again.
    poll(&mut watched, Some(&ANSWER_LOOK)).is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests {
    use forebay_sys::virtio::SharedMemory;
    use forebay_sys::virtio::reference::ReferenceDevice;
    use proptest::collection::vec;
    use proptest::prelude::*;
    use virtio_bindings::virtio_config::{VIRTIO_F_RING_PACKED, VIRTIO_F_VERSION_1};

    use super::*;
    use crate::config::virtio::VirtioOptions;
    use crate::virtio::features::RequestedFeatures;
    use crate::virtio::memory::MemoryPlan;

    const COMMANDS: [ControlCommand; 2] =
        [ControlCommand::QueuePairs(2), ControlCommand::QueuePairs(3)];

    fn place() -> ControlPlace {
        let plan = MemoryPlan::of(&VirtioOptions::default());
        let memory = SharedMemory::new(plan.len_bytes(0)).unwrap();
        plan.control(&memory, 0)
    }

    fn features(is_packed: bool) -> Features {
        let offered = 1 << VIRTIO_F_VERSION_1 | u64::from(is_packed) << VIRTIO_F_RING_PACKED;
        Features::negotiate(
            offered,
            RequestedFeatures { packed: true, ..RequestedFeatures::default() },
        )
        .unwrap()
    }

    proptest! {
        /// Ids and lengths are arbitrary, many of them close to valid ones.
        #[test]
        fn promise_5_commands_answered_at_most_once(
            is_packed: bool,
            said in vec((prop_oneof![0..4_u16, any::<u16>()], 0..3_u32, 1..4_usize), 1..8),
        ) {
            let mut place = place();
            let mut posted = place.post(features(is_packed), &COMMANDS);
            let mut device = ReferenceDevice::of(&posted.ring);
            let has: Vec<_> = std::iter::from_fn(|| device.take()).map(|got| got.id).collect();
            prop_assert_eq!(has.len(), COMMANDS.len());
            let mut taken = 0;
            let mut in_batch = 0;
            for (id, len_bytes, batch) in said {
                if has.contains(&id) {
                    device.give(id, len_bytes);
                } else {
                    device.give_bad(id);
                }
                in_batch += 1;
                if in_batch < batch {
                    continue;
                }
                in_batch = 0;
                match posted.take_answers() {
                    Ok(more) => taken += more,
                    Err(why) => {
                        prop_assert!(!why.is_empty());
                        break;
                    }
                }
            }
            prop_assert!(taken <= COMMANDS.len());
            // No answer was written, so no command is done.
            prop_assert!(posted.waiting.iter().all(|waiting| waiting.answer != CommandAnswer::Done));
        }
    }

    #[test]
    fn failing_ring_retried_twice_then_skipped() {
        let mut place = place();
        assert_eq!(place.given_up(), None);
        place.failed("one".to_owned());
        assert_eq!(place.given_up(), None);
        place.worked();
        place.failed("another".to_owned());
        assert_eq!(place.given_up(), None);
        place.failed("one more".to_owned());
        assert!(place.given_up().is_some_and(|why| why.contains("one more")));
        assert_eq!(place.given_up(), None);
    }
}

//! Tests of a queue pair whose device violates the protocol or cannot be kicked, and of the descriptors that its
//! CPU sleeps on.

use std::sync::atomic::Ordering;

use forebay_buf::pool::{ChunkClass, carve, region_bytes};
use forebay_buf::{PageFragCache, Region};
use forebay_rx::sink::{SendDrop, Sink};
use forebay_sys::Signaller;
use forebay_sys::virtio::SharedMemory;
use forebay_sys::virtio::reference::ReferenceDevice;
use proptest::collection::vec;
use proptest::prelude::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use virtio_bindings::virtio_config::{VIRTIO_F_RING_PACKED, VIRTIO_F_VERSION_1};
use virtio_bindings::virtio_net::VIRTIO_NET_F_MRG_RXBUF;
use vmm_sys_util::eventfd::EventFd;

use super::*;
use crate::config::virtio::VirtioOptions;
use crate::tx_queue::{TxQueue, TxQueueSink};
use crate::virtio::buffers::{Buffers, Sizing};
use crate::virtio::features::{Features, RequestedFeatures};
use crate::virtio::memory::MemoryPlan;
use crate::virtio::port::{PairEvents, QueueWish, Switchboard};
use crate::virtio::receive::COUNTS;
use crate::{KernelCounts, RxBuffers};

const QUEUE_SIZE: u16 = 64;

/// Source in a session, with both rings from the device's side. The device has another pair, too.
struct Rig {
    source: VirtioSource,
    pool: Pool,
    burst: Burst,
    shown: Arc<RxBuffers>,
    board: Arc<Switchboard>,
    call: EventFd,
    rx: ReferenceDevice,
    tx: ReferenceDevice,
    sink: TxQueueSink,
    _other: Port,
    _memory: SharedMemory,
}

impl Rig {
    fn new(is_packed: bool) -> Self {
        let (rig, polled) = Self::polled_first(is_packed, None);
        assert_eq!(polled, Polled::Idle);
        rig
    }

    /// Creates a rig whose receive buffers are in this memory, and returns the state after the first poll.
    fn polled_first(is_packed: bool, cache: Option<PageFragCache>) -> (Self, Polled) {
        let options = VirtioOptions { queue_size: QUEUE_SIZE, ..VirtioOptions::default() };
        let plan = MemoryPlan::of(&options);
        let memory = SharedMemory::new(plan.len_bytes(1)).unwrap();
        let [rx, tx] = plan.rings(&memory, 0);
        let shown = Arc::<RxBuffers>::default();
        let cache = cache.unwrap_or_else(|| plan.cache(&memory, 0));
        let of_buffers = Arc::clone(&shown);
        let buffers = Buffers::new(Sizing::of(&options), cache, QUEUE_SIZE, of_buffers);
        let receiver = VirtioReceiver::new(rx, buffers, false, KernelCounts::new(&COUNTS));
        let (tx_queue, consumer) = TxQueue::new();
        let sink = TxQueueSink::new("twin".to_owned(), &[tx_queue]);
        let transmit = VirtioTransmit::new(consumer, tx, plan.slots(&memory, 0));
        let (board, mut ports) = Switchboard::new(2, Signaller::new().unwrap()).unwrap();
        let (port, other) = (ports.remove(0), ports.remove(0));
        let link = Arc::new(VhostSession::without_thread(&board));
        let mut source = VirtioSource::new(link, port, receiver, transmit);
        let session = session(1, is_packed);
        let call = session.pairs[0].call.handle().unwrap();
        board.publish(Some(Arc::new(session)));
        let shares = [vec![ChunkClass { chunk_bytes: 2048, chunks: 1000 }]];
        let pool = carve(Region::allocate(region_bytes(&shares)), &shares).unwrap().remove(0);
        let (mut pool, mut burst) = (pool, Burst::default());
        let ask = PollRequest { now_ns: 0, max: 64, may_wait: false, is_last: false };
        let polled = source.poll(ask, &mut pool, &mut burst).unwrap();
        let rx = ReferenceDevice::of(source.receiver.ring());
        let tx = ReferenceDevice::of(source.transmit.ring().unwrap());
        let (_other, _memory) = (other, memory);
        (Self { source, pool, burst, shown, board, call, rx, tx, sink, _other, _memory }, polled)
    }

    /// Polls once, and frees what was received. Returns the number of used entries processed.
    fn poll(&mut self, max: usize, is_last: bool) -> (Polled, u64) {
        let before = self.shown.used();
        let ask = PollRequest { now_ns: 0, max, may_wait: false, is_last };
        let polled = self.source.poll(ask, &mut self.pool, &mut self.burst).unwrap();
        assert!(self.burst.len() <= max);
        self.burst.packets.drain(..).for_each(|packet| self.pool.put(packet.frame));
        self.burst.refused.clear();
        (polled, self.shown.used() - before)
    }

    /// True if a CPU with only this source would sleep now, without a wake-up pending.
    fn sleeps(&mut self) -> bool {
        self.source.transmit(&mut self.pool);
        self.poll(64, false);
        self.source.transmit(&mut self.pool);
        if self.source.has_work() {
            return false;
        }
        let descriptor = self.source.descriptor().unwrap();
        let mut watched = [PollFd::from_borrowed_fd(descriptor, PollFlags::IN)];
        poll(&mut watched, Some(&Timespec::default())).unwrap() == 0
    }

    /// Reports more used buffers than were posted, so that the queue is shut.
    fn shut(&mut self) {
        for _ in 0..=QUEUE_SIZE {
            self.rx.give_bad(0);
        }
        self.poll(64, false);
        assert!(self.source.is_shut);
    }

    fn hand(&mut self, packets: usize) {
        let packets = (0..packets).map(|number| {
            let mut frame = self.pool.allocate(60).unwrap();
            frame.copy_from(&[0; 60]);
            let arrival = forebay_rx::packet::Arrival(u32::try_from(number).unwrap());
            forebay_rx::Packet::received(frame, arrival, 60, forebay_rx::parse::Link::Ethernet)
        });
        self.sink.send(&mut packets.collect()).unwrap();
    }
}

/// Session of a device with two queue pairs.
fn session(number: u64, is_packed: bool) -> PortSession {
    let offered = 1 << VIRTIO_F_VERSION_1
        | 1 << VIRTIO_NET_F_MRG_RXBUF
        | u64::from(is_packed) << VIRTIO_F_RING_PACKED;
    let requested = RequestedFeatures { packed: is_packed, ..RequestedFeatures::default() };
    let features = Features::negotiate(offered, requested).unwrap();
    let pairs = [(); 2].map(|()| PairEvents::new().unwrap()).into();
    PortSession { number, features, mtu: None, pairs }
}

/// Used entry that a device writes.
#[derive(Clone, Copy, Debug)]
enum Said {
    /// The oldest buffer of the device, with that length.
    Used(u32),
    /// A buffer that the device does not have.
    Bad(u16),
}

fn said() -> impl Strategy<Value = Said> {
    prop_oneof![
        prop_oneof![Just(0), Just(11), Just(72), Just(1512), any::<u32>()].prop_map(Said::Used),
        any::<u16>().prop_map(Said::Bad),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// For any used entries: a turn processes at most its budget, and after the end of the
    /// session or run, entries beyond the posted buffers are ignored.
    #[test]
    fn promise_3_turn_checks_bounded_entries(
        is_packed: bool,
        turns in vec((vec(said(), 0..48), 1..40_usize), 1..24),
        is_cut: bool,
    ) {
        let mut rig = Rig::new(is_packed);
        let mut has = std::collections::VecDeque::new();
        let mut say = |rig: &mut Rig, said| {
            has.extend(std::iter::from_fn(|| rig.rx.take()));
            match said {
                Said::Used(len_bytes) => {
                    if let Some(got) = has.pop_front() {
                        rig.rx.give(got.id, len_bytes);
                    }
                }
                Said::Bad(id) => {
                    if !is_packed || !has.is_empty() {
                        rig.rx.give_bad(id);
                    }
                }
            }
        };
        for (all, max) in turns {
            all.into_iter().for_each(|said| say(&mut rig, said));
            let (_, looked) = rig.poll(max, false);
            prop_assert!(looked <= max as u64, "{looked} of {max}");
        }
        if is_cut {
            rig.board.publish(None);
        }
        let mut looked_at_last = 0;
        for turn in 0..3 * QUEUE_SIZE {
            (0..8).for_each(|_| if !is_packed { rig.rx.give_bad(turn) });
            let (polled, looked) = rig.poll(4, !is_cut);
            prop_assert!(looked <= 4);
            looked_at_last += looked;
            if polled != Polled::Ready {
                break;
            }
        }
        // One turn may pass before the end is noticed.
        prop_assert!(looked_at_last <= u64::from(QUEUE_SIZE) + 4, "{looked_at_last}");
    }
}

/// Invalid ids are written as fast as they are processed.
#[test]
fn promise_3_bad_ids_end_in_time() {
    let mut rig = Rig::new(false);
    for _ in 0..100 {
        (0..QUEUE_SIZE).for_each(|_| rig.rx.give_bad(u16::MAX));
        assert_eq!(rig.poll(16, false), (Polled::Ready, 16));
        (0..3).for_each(|_| assert_eq!(rig.poll(16, false), (Polled::Ready, 16)));
    }
    assert_eq!(rig.source.receiver.ring().free(), 0, "the device has all buffers still");
}

/// A queue without memory for its buffers loses packets although the ring is empty: its polls do not keep up.
#[test]
fn rps_b1_starved_queue_is_behind() {
    for is_packed in [false, true] {
        let options = VirtioOptions { queue_size: QUEUE_SIZE, ..VirtioOptions::default() };
        let plan = MemoryPlan::of(&options);
        let few = SharedMemory::new(plan.len_bytes(1)).unwrap();
        let (mut rig, polled) = Rig::polled_first(is_packed, Some(plan.slots(&few, 0)));
        assert_eq!(polled, Polled::BehindUntil { now_ns: SHORT_SLEEP_NS });
        assert!((1..QUEUE_SIZE).contains(&(QUEUE_SIZE - rig.source.receiver.ring().free())));
        assert_eq!(rig.poll(64, false).0, Polled::BehindUntil { now_ns: SHORT_SLEEP_NS });
        if !is_packed {
            rig.shut(); // nothing arrives any more
            assert_eq!(rig.poll(64, false).0, Polled::Idle);
        }
    }
}

#[test]
fn promise_10_shut_queue_wakes_nobody() {
    for is_packed in [false, true] {
        let mut rig = Rig::new(is_packed);
        assert!(rig.sleeps());
        rig.call.write(1).unwrap();
        assert!(!rig.sleeps() || is_woken_once(&mut rig), "a call wakes");
        assert!(rig.sleeps(), "once");
        if is_packed {
            continue; // no violation shuts a packed ring
        }
        rig.shut();
        rig.call.write(1).unwrap();
        assert!(rig.sleeps() && rig.sleeps(), "nobody waits for that");
        rig.hand(8);
        assert_eq!(rig.source.transmit(&mut rig.pool), 8);
        assert!(rig.sleeps() && rig.tx.take().is_none(), "both rings are shut");
        assert_eq!(rig.sink.counters().dropped(SendDrop::Down), 8);
    }
}

/// A full transmit ring waits for the device.
#[test]
fn promise_10_full_transmit_ring_is_woken() {
    let mut rig = Rig::new(false);
    rig.hand(QUEUE_SIZE.into());
    assert!(rig.source.transmit(&mut rig.pool) > 0);
    rig.hand(8);
    rig.source.transmit(&mut rig.pool);
    rig.poll(64, false);
    assert!(!rig.source.has_work() && rig.source.is_armed);
    rig.call.write(1).unwrap();
    assert!(rig.sleeps(), "it was heard, once");
    let got = rig.tx.take().unwrap();
    rig.tx.give(got.id, 0);
    assert!(rig.tx.calls(), "the device is to say so");
}

/// A thread that transmits for a sleeping CPU asks for its own packets alone, and lets the device call for no others.
#[test]
fn exe_9_sender_asks_for_no_calls() {
    for is_packed in [false, true] {
        let mut rig = Rig::new(is_packed);
        let got = rig.rx.take().unwrap();
        rig.rx.give(got.id, 72);
        rig.hand(1);
        assert!(rig.source.has_unsent());
        assert_eq!(rig.source.transmit(&mut rig.pool), 1);
        assert!(!rig.source.has_unsent() && !rig.source.is_armed, "a packet was received");
        assert!(!rig.rx.calls());
        assert!(rig.source.has_work() && rig.source.is_armed, "before a sleep");
    }
}

/// A device that was not kicked may sleep for ever, so it is told to disable both rings, and would discard what it finds there.
#[test]
fn promise_2_failed_kick_shuts_both_rings() {
    for (is_packed, is_tx) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut rig = Rig::new(is_packed);
        let receive = |rig: &mut Rig| {
            let got = rig.rx.take().unwrap();
            rig.rx.give(got.id, 72);
            rig.poll(64, false).1
        };
        rig.board.fails_kick.store(true, Ordering::Relaxed);
        if is_tx {
            rig.hand(1);
            assert_eq!(rig.source.transmit(&mut rig.pool), 1);
            assert!(rig.tx.take().is_some(), "posted before the kick failed");
        } else {
            assert_eq!(receive(&mut rig), 1);
        }
        assert!(!rig.board.fails_kick.load(Ordering::Relaxed));
        let QueueWish::GoOn { shut, .. } = rig.board.wish() else { panic!("the other pair") };
        assert_eq!(shut.len(), 1);
        rig.hand(3);
        assert_eq!(rig.source.transmit(&mut rig.pool), 3);
        assert!(rig.tx.take().is_none());
        assert_eq!(rig.sink.counters().dropped(SendDrop::Down), 3);
        assert_eq!(receive(&mut rig), 1, "what arrived before the device heard of it");
        rig.board.publish(None);
        rig.poll(64, false);
        assert_eq!(rig.sink.counters().dropped(SendDrop::Down), 3 + u64::from(is_tx));
    }
}

/// Another pair's CPU may see a new session first, and send by this pair before it is polled.
#[test]
fn promise_2_new_session_sends_waiting_packets() {
    for is_packed in [false, true] {
        let mut rig = Rig::new(is_packed);
        let dropped = |rig: &Rig| rig.sink.counters().dropped(SendDrop::Down);
        rig.board.publish(None);
        rig.poll(64, false);
        rig.hand(3);
        assert_eq!((rig.source.transmit(&mut rig.pool), dropped(&rig)), (3, 3), "no session");
        rig.board.publish(Some(Arc::new(session(2, is_packed))));
        rig.hand(5);
        assert_eq!((rig.source.transmit(&mut rig.pool), dropped(&rig)), (0, 3), "they wait");
        assert!(rig.source.has_work());
        rig.poll(64, false);
        let mut device = ReferenceDevice::of(rig.source.transmit.ring().unwrap());
        assert_eq!((rig.source.transmit(&mut rig.pool), dropped(&rig)), (5, 3));
        assert_eq!(std::iter::from_fn(|| device.take()).count(), 5);
        // A source that is not polled any more waits for no session.
        rig.board.publish(None);
        rig.poll(64, false);
        assert_eq!(rig.poll(64, true).0, Polled::Exhausted);
        rig.board.publish(Some(Arc::new(session(3, is_packed))));
        rig.hand(2);
        assert_eq!(rig.source.transmit(&mut rig.pool), 2);
        assert_eq!(dropped(&rig), 3 + 5 + 2);
    }
}

/// The call may have been taken by the poll before the sleep.
fn is_woken_once(rig: &mut Rig) -> bool {
    rig.sleeps()
}

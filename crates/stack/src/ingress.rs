//! Stack: the third spine. Runs on the CPU that packets are delivered on, and carries the batch's
//! packets addressed to this host to the sockets of their readers.

mod expiry; // expiry of fragments and neighbours

use std::mem::take;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use expiry::Expiry;
use forebay_buf::Pool;
use forebay_rx::coalesce::{SegmentCutter, cut, resegment};
use forebay_rx::cpu::CpuId;
use forebay_rx::delivery::{Batch, Handler};
use forebay_rx::packet::Packet;
use forebay_rx::parse::Network;

use crate::division::Division;
use crate::host::Host;
use crate::network::neighbours::NeighbourObservation;
use crate::network::{
    DatagramTooBig, ErrorRefusal, Identity, NetworkCounters, NetworkDrop, NetworkLayer,
    NetworkVerdict,
};
use crate::socket::SocketId;
use crate::socket::connection_id;
use crate::socket::queue::{Enqueue, SocketQueueProducer};
use crate::socket::reclaim::{BufferReclaimer, ReclaimPolicy};
use crate::socket::table::{FoundSocket, LookupKey, SocketTable};
use crate::tcp::Flow;

/// Upper bound on producers checked per turn after sockets were closed.
const SWEPT_A_TURN: usize = 64;

/// Maximum number of datagrams that wait for their socket while a GSO packet is cut.
const CUT_RUN_MAX: usize = 64;

/// The stack of one CPU.
#[derive(Debug)]
pub struct Stack {
    cpu: CpuId,
    /// Index of the CPU among all producers of socket queues.
    producer_index: usize,
    network: NetworkLayer,
    table: Arc<SocketTable>,
    /// Place among other processes that have sockets at the same ports.
    division: Option<Arc<dyn Division>>,
    host: Box<dyn Host>,
    /// Producers to the queues of the sockets that this CPU has delivered packets to, by [`SocketId::index`].
    producers: Vec<Option<SocketQueueProducer>>,
    /// Value of [`Host::sockets_closed`] at this CPU's last check.
    closed: u64,
    /// Number of leading `producers` still to be checked for closed sockets.
    unswept: usize,
    reclaimer: BufferReclaimer,
    /// Consecutive datagrams for one socket; empty between turns.
    run: Vec<Packet>,
    /// The socket that `run` is for.
    run_for: SocketId,
    /// Segments of a merged tunnel; empty between packets.
    tunnelled: Vec<Packet>,
    /// Datagrams that the socket had no room for; empty between turns.
    refused: Vec<Packet>,
    /// Segments of a batch; empty between batches.
    segments: Vec<Packet>,
    /// Datagrams of several connections, one by one; empty between packets.
    apart: Vec<Packet>,
    /// Sockets matching one datagram; empty between packets.
    found: Vec<SocketId>,
    /// Sockets whose readers are woken at the end of the turn.
    sleepers: Vec<SocketId>,
    readers: Readers,
    /// Checks for expired fragments and neighbours.
    expiry: Expiry,
    /// Packets to be sent out of the device that a batch arrived on; empty between batches.
    answers: Vec<Packet>,
    /// Neighbour observations of a batch; empty between batches.
    observations: Vec<NeighbourObservation>,
}

/// Readers of the packets since the last [`Handler::are_readers_behind`].
#[derive(Clone, Copy, Default, Debug)]
struct Readers {
    /// True if a reader's buffer is at least half full.
    is_one_behind: bool,
    /// True if a reader or a peer may be waiting for something that was delivered.
    is_one_waiting: bool,
}

impl Readers {
    fn note(&mut self, put: Enqueue, is_half_full: bool) {
        match put {
            Enqueue::Done if is_half_full => self.is_one_behind = true,
            Enqueue::Done | Enqueue::WakeReader => self.is_one_waiting = true,
            Enqueue::Closed => {}
        }
    }
}

/// Per-batch context for [`Stack::turn`].
#[derive(Debug)]
struct RxContext<'a> {
    /// Identity of this host on the device that the packets arrived on.
    identity: &'a Identity,
    /// Index of that device, as in `Headers::device`.
    device: u8,
    /// Current time, in ns.
    now_ns: u64,
    /// Packet memory of this CPU.
    pool: &'a mut Pool,
    /// Buffer policy for slow readers.
    policy: ReclaimPolicy,
    /// Answers to be sent out of the same device; in fragments if longer than its MTU (out).
    answers: &'a mut Vec<Packet>,
    /// Neighbour observations made while processing this batch (out).
    observations: &'a mut Vec<NeighbourObservation>,
}

impl Stack {
    /// Creates the stack of a CPU with the given producer index.
    #[must_use]
    pub fn new(
        cpu: CpuId,
        producer_index: usize,
        network: NetworkLayer,
        reclaimer: BufferReclaimer,
        mut host: Box<dyn Host>,
    ) -> Self {
        Self {
            cpu,
            producer_index,
            network,
            table: Arc::clone(host.table()),
            division: None,
            expiry: Expiry::default(),
            host,
            producers: Vec::new(),
            closed: 0,
            unswept: 0,
            reclaimer,
            run: Vec::new(),
            run_for: SocketId(0),
            tunnelled: Vec::new(),
            refused: Vec::new(),
            segments: Vec::new(),
            apart: Vec::new(),
            found: Vec::new(),
            sleepers: Vec::new(),
            readers: Readers::default(),
            answers: Vec::new(),
            observations: Vec::new(),
        }
    }

    /// Sets the place among other processes that have sockets at the same ports.
    #[must_use]
    pub fn divided(self, place: Arc<dyn Division>) -> Self {
        Self { division: Some(place), ..self }
    }

    /// Number of this CPU's copy-cache buffers and small frames in use. Drops the producers of closed
    /// sockets first.
    pub fn frames_away(&mut self) -> usize {
        self.unswept = self.producers.len();
        self.sweep(usize::MAX);
        self.reclaimer.frames_away()
    }

    /// Drops incomplete reassemblies, as no more packets will arrive.
    pub fn end(&mut self) {
        self.network.end();
    }

    /// Sets the pool of small frames that datagrams for slow readers are copied to.
    pub fn set_small(&mut self, small: Pool) {
        self.reclaimer.set_small(small);
    }

    /// Switches to the current socket table.
    fn follow_table(&mut self) {
        let table = self.host.table();
        if !Arc::ptr_eq(table, &self.table) {
            self.table = Arc::clone(table);
        }
    }

    /// Drops producers of sockets closed since the last check, at most [`SWEPT_A_TURN`] per turn.
    fn drop_closed(&mut self) {
        let closed = self.host.sockets_closed();
        if closed != self.closed {
            (self.closed, self.unswept) = (closed, self.producers.len());
        }
        if self.unswept > 0 {
            self.sweep(SWEPT_A_TURN);
        }
    }

    /// Checks up to `count` producers, from the last one down.
    fn sweep(&mut self, count: usize) {
        for _ in 0..count.min(self.unswept) {
            self.unswept -= 1;
            self.producers[self.unswept].take_if(|producer| producer.queue().is_closed());
            if self.unswept + 1 == self.producers.len() && self.producers[self.unswept].is_none() {
                self.producers.pop();
            }
        }
    }

    /// The spine: delivers all packets of a batch to their sockets. Frames go to a socket, or back
    /// to their pool.
    ///
    /// From here on payloads are read more than once, also by the application, and a device can
    /// rewrite shared memory between two reads. A nonlinear packet is therefore copied first, or
    /// dropped as [`NetworkDrop::Nomem`] if no memory is left for the copy.
    ///
    /// Segments that were merged inside a tunnel are processed one by one: the host does not look inside,
    /// so each is a packet, or a datagram, of its own.
    fn turn(&mut self, packets: &mut Vec<Packet>, context: &mut RxContext<'_>) {
        self.drop_closed();
        for mut packet in packets.drain(..) {
            // The device can rewrite the pieces at any time: copy before the first read.
            if packet.is_nonlinear() {
                packet = match packet.linearized(context.pool) {
                    Ok(packet) => packet,
                    Err(frames) => {
                        let drops = &self.network.counters().drops;
                        drops.add(NetworkDrop::Nomem, frames.into());
                        continue;
                    }
                };
            }
            if packet.is_merged_tunnel() {
                self.receive_tunnel(packet, context);
            } else {
                self.receive(packet, context);
            }
        }
        self.end_run(context);
        if !self.segments.is_empty() {
            self.readers.is_one_waiting = true;
            self.host.receive_segments(context.identity, &mut self.segments);
        }
        for socket in self.sleepers.drain(..) {
            if let Some(Some(producer)) = self.producers.get(socket.index()) {
                producer.queue().wake_reader();
            }
        }
    }

    fn receive(&mut self, mut packet: Packet, context: &mut RxContext<'_>) {
        packet.headers.device = context.device;
        let received = self.network.receive(packet, context.identity, context.now_ns, context.pool);
        self.dispose(received, context);
    }

    fn receive_tunnel(&mut self, packet: Packet, context: &mut RxContext<'_>) {
        if packet.is_gso() {
            return self.receive_gso_tunnel(packet, context);
        }
        let mut segments = take(&mut self.tunnelled);
        resegment(packet, &mut segments);
        segments.drain(..).for_each(|segment| self.receive(segment, context));
        self.tunnelled = segments;
    }

    /// Cuts a GSO packet one segment at a time: it may have thousands of segments, and few of them occupy a frame at once.
    fn receive_gso_tunnel(&mut self, packet: Packet, context: &mut RxContext<'_>) {
        let mut cutter = SegmentCutter::new(&packet);
        while let Some(segment) = cutter.as_mut().and_then(|it| it.cut_next(context.pool)) {
            self.receive(segment, context);
            if self.run.len() >= CUT_RUN_MAX {
                self.end_run(context);
            }
        }
        let left = cutter.map_or(packet.wire_count(), |cutter| cutter.left());
        self.network.counters().drops.add(NetworkDrop::Nomem, left.into());
        context.pool.put(packet.frame);
    }

    /// Records the batch's neighbour observations. Packets queued for a neighbour now resolved join
    /// the answers.
    fn learn(&mut self, device: usize, context: &mut RxContext<'_>) {
        if context.observations.is_empty() {
            return;
        }
        self.readers.is_one_waiting = true;
        let mut neighbours = self.host.neighbours(device);
        for sighting in context.observations.drain(..) {
            neighbours.hear(&sighting, context.now_ns, context.answers);
        }
    }

    fn dispose(&mut self, received: NetworkVerdict, context: &mut RxContext<'_>) {
        match received {
            NetworkVerdict::Datagram(packet) => self.deliver(packet, context),
            NetworkVerdict::Answer(packet) => context.answers.push(packet),
            NetworkVerdict::Segment(packet) => self.segments.push(packet),
            NetworkVerdict::PathError(packet, about) => {
                context.pool.put(packet.frame);
                self.readers.is_one_waiting = true;
                self.host.receive_path_error(&about);
            }
            NetworkVerdict::Taken(packet) | NetworkVerdict::Dropped(packet, _) => {
                context.pool.put(packet.frame);
            }
            NetworkVerdict::Heard(packet, heard) => {
                context.observations.extend(heard.sighting);
                if heard.is_answer {
                    context.answers.push(packet);
                } else {
                    context.pool.put(packet.frame);
                }
            }
            NetworkVerdict::Refused(packet, ErrorRefusal { ours, theirs }) => {
                if let FoundSocket::One(socket) = self.table.find_connected(ours, theirs)
                    && let Some(queue) = self.host.socket(socket)
                    && queue.refuse() == Enqueue::WakeReader
                {
                    self.readers.is_one_waiting = true;
                    queue.wake_reader();
                }
                context.pool.put(packet.frame);
            }
            NetworkVerdict::TooBig(packet, about) => {
                self.receive_too_big(&packet, &about, context);
                context.pool.put(packet.frame);
            }
            NetworkVerdict::Kept => {}
        }
    }

    /// Believes a router that a datagram was too big if a socket may have sent it.
    fn receive_too_big(&self, packet: &Packet, about: &DatagramTooBig, context: &RxContext<'_>) {
        let &DatagramTooBig { flow: ErrorRefusal { ours, theirs }, mtu_bytes } = about;
        let wanted = LookupKey {
            source: theirs.into(),
            destination: ours.into(),
            hash: packet.hash,
            cpu: self.cpu,
            device: context.device,
        };
        let is_ours = context.identity.is_own(ours.0);
        if is_ours && self.table.find(&wanted) != FoundSocket::None {
            self.host.learn_path_mtu(theirs.0, mtu_bytes);
        }
    }

    /// Delivers a datagram to its socket, or to all of its group; without one, answers or drops it.
    fn deliver(&mut self, mut packet: Packet, context: &mut RxContext<'_>) {
        packet.headers.device = context.device; // of one that was joined or cut since it was received, too
        let Some(wanted) = LookupKey::of(&packet, self.cpu) else {
            // Without addresses and ports there is no key to look a socket up by.
            return self.drop_datagram(packet, NetworkDrop::PktTooSmall, context.pool);
        };
        // Other ports' datagrams stay merged: their payloads have no IDs.
        if packet.gso_size() > 0 {
            let id_bytes = self.table.id_bytes_at(wanted.destination.port());
            if id_bytes > 0 && connection_id::has_several(&packet, id_bytes) {
                return self.deliver_apart(packet, context);
            }
        }
        if !context.identity.is_own(wanted.destination.ip()) {
            return self.deliver_to_all(packet, &wanted, context);
        }
        let found = self.table.find_holding(&wanted, || packet.view().payload());
        let is_others = self.division.as_ref().is_some_and(|division| {
            let flow = Flow { ours: wanted.destination, theirs: wanted.source };
            match found {
                FoundSocket::One(_) => !division.takes_datagrams(&flow),
                FoundSocket::None => !division.refuses_datagrams(&flow),
            }
        });
        match found {
            _ if is_others => {
                self.drop_datagram(packet, NetworkDrop::OtherProcess, context.pool);
            }
            FoundSocket::One(socket) => self.put(socket, packet, context),
            // Its fragments came without their port: the kernel, which has them too, answers.
            FoundSocket::None if packet.view().is_fragment() && !context.identity.is_whole_host => {
                self.drop_datagram(packet, NetworkDrop::OtherProcess, context.pool);
            }
            FoundSocket::None => self.answer_unreachable(packet, context),
        }
    }

    /// Delivers merged datagrams of several QUIC connections one by one: each may belong to another
    /// endpoint.
    fn deliver_apart(&mut self, packet: Packet, context: &mut RxContext<'_>) {
        let mut apart = take(&mut self.apart);
        match cut(packet, context.pool, &mut apart) {
            Ok(()) => apart.drain(..).for_each(|packet| self.deliver(packet, context)),
            Err(packet) => self.drop_datagram(packet, NetworkDrop::Nomem, context.pool),
        }
        self.apart = apart;
    }

    fn answer_unreachable(&mut self, packet: Packet, context: &mut RxContext<'_>) {
        let answer =
            self.network.unreachable(packet, context.identity, context.now_ns, context.pool);
        // The verdict is an ICMP error or a drop, never another datagram: no recursion.
        self.dispose(answer, context);
    }

    /// Delivers a multicast or broadcast datagram to every matching socket: a copy to each, the
    /// datagram itself to the last one.
    fn deliver_to_all(&mut self, packet: Packet, wanted: &LookupKey, context: &mut RxContext<'_>) {
        let mut found = take(&mut self.found);
        self.table.find_all(wanted, &mut found);
        match found.split_last() {
            None => self.drop_datagram(packet, NetworkDrop::NoSocket, context.pool),
            Some((&last, others)) => {
                for &socket in others {
                    match packet.copied(context.pool) {
                        Some(copy) => self.put(socket, copy, context),
                        None => {
                            let drops = &self.network.counters().drops;
                            drops.add(NetworkDrop::Nomem, packet.wire_count().into());
                        }
                    }
                }
                self.put(last, packet, context);
            }
        }
        found.clear();
        self.found = found;
    }

    /// Appends a datagram to the run of its socket. A GSO packet is segmented first if the socket's
    /// reader takes one datagram at a time (`udp_queue_rcv_skb`).
    fn put(&mut self, socket: SocketId, packet: Packet, context: &mut RxContext<'_>) {
        if socket != self.run_for {
            self.end_run(context);
            self.run_for = socket;
        }
        if packet.is_gso() && !self.takes_merged(socket) {
            if let Err(packet) = cut(packet, context.pool, &mut self.run) {
                self.drop_datagram(packet, NetworkDrop::Nomem, context.pool);
            }
            return;
        }
        self.run.push(packet);
    }

    /// True if the socket's reader accepts GSO packets of several datagrams, or if the socket is
    /// closed.
    fn takes_merged(&mut self, socket: SocketId) -> bool {
        let producer = producer_of(&mut self.producers, &*self.host, socket, self.producer_index);
        producer.is_none_or(|producer| producer.takes_merged())
    }

    /// Puts the run into the queue of its socket.
    fn end_run(&mut self, context: &mut RxContext<'_>) {
        if self.run.is_empty() {
            return;
        }
        let before = Families::of(&self.run);
        let Self { producers, host, reclaimer, run, refused, .. } = self;
        let producer = producer_of(producers, &**host, self.run_for, self.producer_index);
        let (put, is_half_full) = producer.map_or((Enqueue::Closed, false), |producer| {
            reclaimer.reclaim(context.policy, producer.account(), run, context.pool);
            (producer.put(run, refused), producer.account().is_half_full())
        });
        self.readers.note(put, is_half_full);
        if put == Enqueue::WakeReader {
            self.sleepers.push(self.run_for);
        }
        // The run has packets left only if the socket was closed meanwhile.
        let (refused, left) = (Families::of(&self.refused), Families::of(&self.run));
        self.network.delivered(Network::Ipv4, before.v4 - refused.v4 - left.v4);
        self.network.delivered(Network::Ipv6, before.v6 - refused.v6 - left.v6);
        for packet in self.refused.drain(..) {
            self.network.count_drop(&packet, NetworkDrop::SocketRcvbuff);
            context.pool.put(packet.frame);
        }
        for packet in self.run.drain(..) {
            self.network.count_drop(&packet, NetworkDrop::SocketClose);
            context.pool.put(packet.frame);
        }
    }

    fn drop_datagram(&mut self, packet: Packet, reason: NetworkDrop, pool: &mut Pool) {
        self.network.count_drop(&packet, reason);
        pool.put(packet.frame);
    }

    /// The network layer.
    #[must_use]
    pub fn network(&self) -> &NetworkLayer {
        &self.network
    }

    /// Counters of this CPU's network layer.
    #[must_use]
    pub fn counters(&self) -> &Arc<NetworkCounters> {
        self.network.counters()
    }
}

impl Handler for Stack {
    fn handle(&mut self, batch: &mut Batch<'_>) {
        self.follow_table();
        let device = self.host.device_of(batch.rx_queue);
        let identity = self.host.identity(device);
        let (mut answers, mut observations) =
            (take(&mut self.answers), take(&mut self.observations));
        let mut context = RxContext {
            identity: &identity,
            device: u8::try_from(device).unwrap_or(u8::MAX),
            now_ns: self.host.now_ns(),
            pool: batch.pool,
            policy: self.host.policy(),
            answers: &mut answers,
            observations: &mut observations,
        };
        self.turn(batch.packets, &mut context);
        self.learn(device, &mut context);
        if !answers.is_empty() {
            self.readers.is_one_waiting = true;
            self.host.send(device, &mut answers);
        }
        (self.answers, self.observations) = (answers, observations);
    }

    fn tick(&mut self, now_ns: u64) {
        self.host.tick(now_ns);
        self.expire_if_due(now_ns);
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.host.descriptor()
    }

    fn are_readers_behind(&mut self) -> bool {
        let readers = take(&mut self.readers);
        readers.is_one_behind && !readers.is_one_waiting
    }

    fn sleep_max_ns(&mut self) -> Option<u64> {
        self.host.sleep_max_ns().into_iter().chain(self.expiry_ns()).min()
    }
}

/// A CPU's producer to a socket, opened on first use; `None` if the socket is closed.
fn producer_of<'a>(
    producers: &'a mut Vec<Option<SocketQueueProducer>>,
    host: &dyn Host,
    socket: SocketId,
    producer_index: usize,
) -> Option<&'a mut SocketQueueProducer> {
    let index = socket.index();
    let is_there = |producer: &Option<SocketQueueProducer>| {
        producer.as_ref().is_some_and(|of| of.id() == socket)
    };
    if !producers.get(index).is_some_and(is_there) {
        let producer = host.socket(socket)?.producer(producer_index)?;
        if producers.len() <= index {
            producers.resize_with(index + 1, || None);
        }
        producers[index] = Some(producer);
    }
    producers[index].as_mut()
}

/// Number of datagrams per IP version.
struct Families {
    v4: u64,
    v6: u64,
}

impl Families {
    fn of(packets: &[Packet]) -> Self {
        let is_v6 = |packet: &&Packet| packet.headers.network == Network::Ipv6;
        let v6 = packets.iter().filter(is_v6).count() as u64;
        Self { v4: packets.len() as u64 - v6, v6 }
    }
}

//! Stack: the third spine. It runs where packets are delivered, and brings those that are for this
//! host from a delivery's batch to the sockets of their readers.

use std::fmt;
use std::sync::Arc;

use mem::Pool;
use path::coalesce::cut;
use path::cpu::CpuId;
use path::packet::Packet;
use path::parse::Network;

use crate::network::neighbours::Sighting;
use crate::network::{Identity, Network as NetworkLayer, NetworkDrop, Received, Refusal};
use crate::socket::SocketId;
use crate::socket::policy::{BufferPolicy, Relief};
use crate::socket::queue::{Hub, Inlet, Put};
use crate::socket::table::{Flow4Tuple, Found, SocketTable};

/// Source from which a CPU learns of sockets.
pub trait Sockets: fmt::Debug + Send + Sync {
    /// Hub that a CPU makes its inlet to a socket of. None once the socket is closed. Asked when a CPU has
    /// its first packet for it.
    fn hub(&self, socket: SocketId) -> Option<Arc<Hub>>;

    /// Number of sockets that have been closed, ever.
    fn closed(&self) -> u64;
}

/// Per-batch context of [`Stack::turn`].
#[derive(Debug)]
pub struct Around<'a> {
    /// Addresses of this host on the device that the packets came from.
    pub identity: &'a Identity,
    /// The time.
    pub now_ns: u64,
    /// Packet memory of this CPU.
    pub pool: &'a mut Pool,
    /// Policy for the buffers of slow readers.
    pub policy: BufferPolicy,
    /// Gets packets that are to be sent out by the same device, as they are.
    pub answers: &'a mut Vec<Packet>,
    /// Gets what was said of neighbours.
    pub sightings: &'a mut Vec<Sighting>,
}

/// Inlets that are looked at in a turn, after sockets were closed.
const SWEPT_A_TURN: usize = 64;

/// The stack of one CPU.
#[derive(Debug)]
pub struct Stack {
    cpu: CpuId,
    /// The CPU's place among all that put packets into sockets' queues.
    place: usize,
    network: NetworkLayer,
    table: Arc<SocketTable>,
    sockets: Arc<dyn Sockets>,
    /// Inlets of this CPU to the sockets that it has had packets for, by [`SocketId::index`].
    inlets: Vec<Option<Inlet>>,
    /// Number of sockets that had been closed when this CPU last looked.
    closed: u64,
    /// Inlets that are yet to be looked at, from the first on: their sockets may be closed.
    unswept: usize,
    relief: Relief,
    /// Datagrams for one socket, one behind the other; empty between turns.
    run: Vec<Packet>,
    /// The socket that they are for.
    run_for: SocketId,
    /// Datagrams that a socket had no room for; empty between turns.
    refused: Vec<Packet>,
    /// The sockets that one datagram is for; empty between packets.
    found: Vec<SocketId>,
    /// Sockets whose readers are to be woken at the end of the turn.
    sleepers: Vec<SocketId>,
    /// Packets that reassembly gave up; empty between turns.
    expired: Vec<(Packet, NetworkDrop)>,
}

impl Stack {
    /// The stack of a CPU, which has a place among all of them.
    #[must_use]
    pub fn new(
        (cpu, place): (CpuId, usize),
        network: NetworkLayer,
        relief: Relief,
        sockets: Arc<dyn Sockets>,
    ) -> Self {
        Self {
            cpu,
            place,
            network,
            table: Arc::new(SocketTable::new(Vec::new(), 0)),
            sockets,
            inlets: Vec::new(),
            closed: 0,
            unswept: 0,
            relief,
            run: Vec::new(),
            run_for: SocketId(0),
            refused: Vec::new(),
            found: Vec::new(),
            sleepers: Vec::new(),
            expired: Vec::new(),
        }
    }

    /// Frames of this CPU's own, cached and small ones, that have not come home. First it lets go of
    /// sockets that were closed.
    pub fn frames_away(&mut self) -> usize {
        self.unswept = self.inlets.len();
        self.sweep(usize::MAX);
        self.relief.frames_away()
    }

    /// Gives up what waits for packets, of which no more will come.
    pub fn end(&mut self) {
        self.network.end();
    }

    /// Gives this CPU small frames, that datagrams of slow readers are moved to.
    pub fn set_small(&mut self, small: Pool) {
        self.relief.set_small(small);
    }

    /// Goes by this table from now on.
    pub fn set_table(&mut self, table: Arc<SocketTable>) {
        self.table = table;
    }

    /// Lets go of sockets that were closed since it last looked: some of them in each turn.
    fn drop_closed(&mut self) {
        let closed = self.sockets.closed();
        if closed != self.closed {
            (self.closed, self.unswept) = (closed, self.inlets.len());
        }
        if self.unswept > 0 {
            self.sweep(SWEPT_A_TURN);
        }
    }

    /// Looks at so many inlets, the last ones first.
    fn sweep(&mut self, count: usize) {
        for _ in 0..count.min(self.unswept) {
            self.unswept -= 1;
            self.inlets[self.unswept].take_if(|inlet| inlet.hub().is_closed());
            if self.unswept + 1 == self.inlets.len() && self.inlets[self.unswept].is_none() {
                self.inlets.pop();
            }
        }
    }

    /// The spine: takes all packets of a batch to their sockets. Their frames go there, or home.
    ///
    /// From here on payloads are interpreted, more than once, and by the application: so a packet in
    /// pieces is copied together first, for the device that shares those can rewrite them at any time.
    /// One that there is no memory for is dropped as [`NetworkDrop::Nomem`].
    pub fn turn(&mut self, packets: &mut Vec<Packet>, around: &mut Around<'_>) {
        self.drop_closed();
        for mut packet in packets.drain(..) {
            if packet.is_in_pieces() {
                packet = match packet.copied_together(around.pool) {
                    Ok(packet) => packet,
                    Err(frames) => {
                        let drops = &self.network.counters().drops;
                        drops.add(NetworkDrop::Nomem, frames.into());
                        continue;
                    }
                };
            }
            let received =
                self.network.receive(packet, around.identity, around.now_ns, around.pool);
            self.dispose(received, around);
        }
        self.end_run(around);
        for socket in self.sleepers.drain(..) {
            if let Some(Some(inlet)) = self.inlets.get(socket.index()) {
                inlet.hub().wake_reader();
            }
        }
    }

    /// Gives up what has waited too long. Call it now and then.
    pub fn expire(&mut self, now_ns: u64, pool: &mut Pool) {
        self.network.expire(now_ns, &mut self.expired);
        self.expired.drain(..).for_each(|(packet, _)| pool.put(packet.frame));
    }

    fn dispose(&mut self, received: Received, around: &mut Around<'_>) {
        match received {
            Received::Datagram(packet) => self.deliver(packet, around),
            Received::Answer(packet) => around.answers.push(packet),
            Received::Taken(packet) | Received::Dropped(packet, _) => {
                around.pool.put(packet.frame);
            }
            Received::Heard(packet, heard) => {
                around.sightings.extend(heard.sighting);
                if heard.is_answer {
                    around.answers.push(packet);
                } else {
                    around.pool.put(packet.frame);
                }
            }
            Received::Refused(packet, Refusal { ours, theirs }) => {
                if let Found::One(socket) = self.table.find_connected(ours, theirs)
                    && let Some(hub) = self.sockets.hub(socket)
                    && hub.refuse() == Put::WakeReader
                {
                    hub.wake_reader();
                }
                around.pool.put(packet.frame);
            }
            Received::Kept => {}
        }
    }

    /// Finds the socket of a datagram.
    fn deliver(&mut self, packet: Packet, around: &mut Around<'_>) {
        let Some(wanted) = Flow4Tuple::of(&packet, self.cpu) else {
            return self.drop_datagram(packet, NetworkDrop::PktTooSmall, around.pool);
        };
        if !around.identity.is_own(wanted.destination.ip()) {
            return self.deliver_to_all(packet, &wanted, around);
        }
        match self.table.find(&wanted) {
            Found::One(socket) => self.put(socket, packet, around),
            Found::None => self.answer_unreachable(packet, around),
        }
    }

    fn answer_unreachable(&mut self, packet: Packet, around: &mut Around<'_>) {
        let answer = self.network.unreachable(packet, around.identity, around.now_ns, around.pool);
        // There is no datagram in it any more.
        self.dispose(answer, around);
    }

    /// A datagram to a group, or to everybody, is for every socket that it suits: each gets a copy,
    /// the last one the datagram itself.
    fn deliver_to_all(&mut self, packet: Packet, wanted: &Flow4Tuple, around: &mut Around<'_>) {
        let mut found = std::mem::take(&mut self.found);
        self.table.find_all(wanted, &mut found);
        match found.split_last() {
            None => self.drop_datagram(packet, NetworkDrop::NoSocket, around.pool),
            Some((&last, others)) => {
                for &socket in others {
                    match packet.copied(around.pool) {
                        Some(copy) => self.put(socket, copy, around),
                        None => self.network.counters().drops.add(NetworkDrop::Nomem, 1),
                    }
                }
                self.put(last, packet, around);
            }
        }
        found.clear();
        self.found = found;
    }

    /// Adds a datagram to the run of its socket; or several, which are cut if the socket's reader
    /// takes one at a time (`udp_queue_rcv_skb`).
    fn put(&mut self, socket: SocketId, packet: Packet, around: &mut Around<'_>) {
        if socket != self.run_for {
            self.end_run(around);
            self.run_for = socket;
        }
        if packet.is_whole_gso() && !self.takes_merged(socket) {
            if let Err(packet) = cut(packet, around.pool, &mut self.run) {
                self.drop_datagram(packet, NetworkDrop::Nomem, around.pool);
            }
            return;
        }
        self.run.push(packet);
    }

    /// True if a socket's reader takes several datagrams in one packet. One that is closed takes none.
    fn takes_merged(&mut self, socket: SocketId) -> bool {
        let inlet = inlet_of(&mut self.inlets, &*self.sockets, socket, self.place);
        inlet.is_none_or(|inlet| inlet.takes_merged())
    }

    /// Hands a run over.
    fn end_run(&mut self, around: &mut Around<'_>) {
        if self.run.is_empty() {
            return;
        }
        let before = Families::of(&self.run);
        let Self { inlets, sockets, relief, run, refused, .. } = self;
        let inlet = inlet_of(inlets, &**sockets, self.run_for, self.place);
        let put = inlet.map_or(Put::Closed, |inlet| {
            relief.relieve(around.policy, inlet.account(), run, around.pool);
            inlet.put(run, refused)
        });
        if put == Put::WakeReader {
            self.sleepers.push(self.run_for);
        }
        // Some are left in the run only if the socket was closed meanwhile.
        let (refused, left) = (Families::of(&self.refused), Families::of(&self.run));
        self.network.delivered(Network::Ipv4, before.v4 - refused.v4 - left.v4);
        self.network.delivered(Network::Ipv6, before.v6 - refused.v6 - left.v6);
        for packet in self.refused.drain(..) {
            self.network.drop_datagram(&packet, NetworkDrop::SocketRcvbuff);
            around.pool.put(packet.frame);
        }
        for packet in self.run.drain(..) {
            self.network.drop_datagram(&packet, NetworkDrop::SocketClose);
            around.pool.put(packet.frame);
        }
    }

    fn drop_datagram(&mut self, packet: Packet, reason: NetworkDrop, pool: &mut Pool) {
        self.network.drop_datagram(&packet, reason);
        pool.put(packet.frame);
    }

    /// The network layer.
    #[must_use]
    pub fn network(&self) -> &NetworkLayer {
        &self.network
    }
}

/// A CPU's inlet to a socket, by the CPU's place. None if the socket is closed.
fn inlet_of<'a>(
    inlets: &'a mut Vec<Option<Inlet>>,
    sockets: &dyn Sockets,
    socket: SocketId,
    place: usize,
) -> Option<&'a mut Inlet> {
    let index = socket.index();
    let is_there = |inlet: &Option<Inlet>| inlet.as_ref().is_some_and(|of| of.id() == socket);
    if !inlets.get(index).is_some_and(is_there) {
        let inlet = sockets.hub(socket)?.inlet(place)?;
        if inlets.len() <= index {
            inlets.resize_with(index + 1, || None);
        }
        inlets[index] = Some(inlet);
    }
    inlets[index].as_mut()
}

/// Datagrams by the IP version that they came over.
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

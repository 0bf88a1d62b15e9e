//! Segments of TCP: next hop and link header. Those whose next hop the kernel is still resolving wait
//! for it here.

use std::net::IpAddr;

use forebay_buf::Pool;
use forebay_rx::Packet;
use forebay_stack::network::Identity;
use forebay_stack::network::compose::{LinkAddresses, emit_link};

use super::super::neighbours::{Hop, WayBack};
use super::super::shared::NetState;
use super::{Between, SendPath, Transmitter};

/// Segments that wait for the kernel to resolve their next hop, at most.
const UNRESOLVED_MAX: usize = 64;
/// First interval of looking for the next hop, in ns; each is twice the one before.
const FIRST_LOOK_NS: u64 = 500_000;
/// Last interval, after which segments are dropped: they have waited for 255.5 ms. TCP sends them again, if they
/// are still wanted.
const LAST_LOOK_NS: u64 = 128_000_000;

/// Segments to one destination whose next hop is not resolved, in order.
pub(super) struct Unresolved {
    device: usize,
    destination: IpAddr,
    packets: Vec<Packet>,
    /// Time of the last look, in ns.
    looked_ns: u64,
    /// Time of the next look, in ns, and the interval before it.
    look_ns: u64,
    interval_ns: u64,
}

impl Unresolved {
    fn is_to(&self, device: usize, destination: IpAddr) -> bool {
        (self.device, self.destination) == (device, destination)
    }
}

impl Transmitter {
    /// Pool of segments to be sent.
    pub(in crate::net) fn pool(&mut self) -> &mut Pool {
        &mut self.pool
    }

    /// Gathers segments, which begin with their IP headers. The next [`flush`](super::TransmitQueue::flush)
    /// sends them. Those that answer a packet may go the way `back` that it came: a flood from everywhere
    /// would ask the kernel for a route each. Returns true if some wait for their next hop.
    pub(in crate::net) fn gather_segments(
        &mut self,
        packets: &mut Vec<Packet>,
        back: Option<WayBack>,
        state: &NetState,
    ) -> bool {
        self.now_ns = self.clock.now_ns();
        let routes = state.routes();
        let mut is_some_waiting = false;
        for packet in packets.drain(..) {
            let (source, destination) = (packet.view().source(), packet.view().destination());
            let Some(destination) = destination else {
                self.put(packet);
                continue;
            };
            match routes.find_between(source, destination) {
                Some(device) => {
                    let on = routes.identity(device);
                    match back.filter(|back| back.leads_to(destination, &on)) {
                        Some(back) => self.gather_back(device, &on, packet, back),
                        None => {
                            is_some_waiting |=
                                self.gather_segment(device, &on, destination, packet, state);
                        }
                    }
                }
                None => {
                    state.unsent.count_no_route(destination);
                    self.put(packet);
                }
            }
        }
        is_some_waiting
    }

    /// Gathers a segment for the way back, behind those of its flow that have waited for their next hop.
    pub(super) fn gather_back(
        &mut self,
        device: usize,
        on: &Identity,
        mut packet: Packet,
        back: WayBack,
    ) {
        let Self { paths, pool, now_ns, .. } = self;
        let SendPath { neighbours, gathered, .. } = &mut paths[device];
        let flow = Between::of(&packet);
        let hop = neighbours.hop_of_answer(flow, on, *now_ns, back, pool, gathered);
        if let Some(flow) = flow {
            self.gather_waiting(device, flow, hop);
        }
        emit_link(&mut packet, hop);
        self.add(device, packet);
    }

    /// Gathers segments of a flow that wait for the kernel to resolve their next hop. Those of others stay: anybody can send from
    /// a spoofed address.
    fn gather_waiting(&mut self, device: usize, flow: Between, hop: Option<LinkAddresses>) {
        let Self { unresolved, paths, .. } = self;
        let destination = flow.destination.ip();
        let Some(at) = unresolved.iter().position(|of| of.is_to(device, destination)) else {
            return;
        };
        let waiting = &mut unresolved[at].packets;
        for mut packet in waiting.extract_if(.., |packet| flow.is_of(packet)) {
            emit_link(&mut packet, hop);
            paths[device].gathered.push(packet);
        }
        if waiting.is_empty() {
            unresolved.remove(at);
        }
    }

    /// Gathers a segment, behind those that have waited for the same next hop. True if it waits, too.
    fn gather_segment(
        &mut self,
        device: usize,
        on: &Identity,
        destination: IpAddr,
        packet: Packet,
        state: &NetState,
    ) -> bool {
        let waiting = self.unresolved.iter().position(|of| of.is_to(device, destination));
        // The kernel is asked once for all segments of a call.
        let is_unknown = waiting.is_some_and(|at| self.unresolved[at].looked_ns == self.now_ns);
        let hop = if is_unknown { Hop::Unknown } else { self.hop_of(device, on, destination) };
        if hop == Hop::Unknown {
            self.await_hop(device, destination, packet, state);
            return true;
        }
        if let Some(at) = waiting {
            let earlier = self.unresolved.remove(at).packets;
            earlier.into_iter().for_each(|earlier| self.gather_by(hop, device, on, earlier));
        }
        self.gather_by(hop, device, on, packet);
        false
    }

    fn hop_of(&mut self, device: usize, on: &Identity, destination: IpAddr) -> Hop {
        let SendPath { neighbours, gathered, .. } = &mut self.paths[device];
        neighbours.hop_to(destination, on, self.now_ns, &mut self.pool, gathered)
    }

    /// Gathers a segment for a next hop, or lets it wait there.
    fn gather_by(&mut self, hop: Hop, device: usize, on: &Identity, mut packet: Packet) {
        match hop {
            Hop::Known(link_addresses) => {
                emit_link(&mut packet, link_addresses);
                self.add(device, packet);
            }
            Hop::Sought(neighbour) => {
                emit_link(&mut packet, on.mac.map(|from| LinkAddresses { to: [0; 6], from }));
                self.composed.push(packet);
                self.hold(device, neighbour);
            }
            Hop::Unknown => self.put(packet),
        }
    }

    /// Lets a segment wait until the kernel has resolved its next hop.
    fn await_hop(&mut self, device: usize, destination: IpAddr, packet: Packet, state: &NetState) {
        let count: usize = self.unresolved.iter().map(|waiting| waiting.packets.len()).sum();
        if count >= UNRESOLVED_MAX {
            self.drop_oldest(state);
        }
        match self.unresolved.iter_mut().find(|of| of.is_to(device, destination)) {
            Some(waiting) => {
                waiting.packets.push(packet);
                waiting.looked_ns = self.now_ns;
            }
            None => self.unresolved.push(Unresolved {
                device,
                destination,
                packets: vec![packet],
                looked_ns: self.now_ns,
                look_ns: self.now_ns + FIRST_LOOK_NS,
                interval_ns: FIRST_LOOK_NS,
            }),
        }
    }

    /// Drops the first segment of the destination that has waited longest.
    fn drop_oldest(&mut self, state: &NetState) {
        let Some(oldest) = self.unresolved.first_mut() else { return };
        let (destination, packet) = (oldest.destination, oldest.packets.remove(0));
        if oldest.packets.is_empty() {
            self.unresolved.remove(0);
        }
        state.unsent.count_discard(destination);
        self.put(packet);
    }

    /// True if segments wait for their next hop.
    pub(in crate::net) fn has_unresolved(&self) -> bool {
        !self.unresolved.is_empty()
    }

    /// Drops segments that wait for their next hop, as the run has ended.
    pub(in crate::net) fn drop_unresolved(&mut self, state: &NetState) {
        for waiting in std::mem::take(&mut self.unresolved) {
            self.drop_waiting(waiting, state);
        }
    }

    fn drop_waiting(&mut self, waiting: Unresolved, state: &NetState) {
        for packet in waiting.packets {
            state.unsent.count_discard(waiting.destination);
            self.put(packet);
        }
    }

    /// Looks for the next hops of segments that wait, and gathers those that are resolved.
    pub(in crate::net) fn retry_unresolved(&mut self, state: &NetState) {
        if self.unresolved.is_empty() {
            return;
        }
        self.now_ns = self.clock.now_ns();
        let mut at = 0;
        while let Some(&Unresolved { device, destination, look_ns, interval_ns, .. }) =
            self.unresolved.get(at)
        {
            if look_ns > self.now_ns {
                at += 1;
                continue;
            }
            let on = state.routes().identity(device);
            match self.hop_of(device, &on, destination) {
                Hop::Unknown if interval_ns < LAST_LOOK_NS => {
                    let waiting = &mut self.unresolved[at];
                    waiting.interval_ns *= 2;
                    waiting.look_ns = self.now_ns + waiting.interval_ns;
                    at += 1;
                }
                Hop::Unknown => {
                    let waiting = self.unresolved.remove(at);
                    self.drop_waiting(waiting, state);
                }
                hop => {
                    let waiting = self.unresolved.remove(at).packets;
                    waiting.into_iter().for_each(|it| self.gather_by(hop, device, &on, it));
                }
            }
        }
    }
}

//! Segments of TCP: next hop and link header. Those whose next hop the kernel is still resolving wait
//! for it here.

use std::net::IpAddr;

use forebay_buf::Pool;
use forebay_rx::Packet;
use forebay_stack::network::Identity;
use forebay_stack::network::compose::{LinkAddresses, emit_link};

use super::super::neighbours::{Hop, WayBack};
use super::super::shared::NetState;
use super::Transmitter;

/// Segments that wait for the kernel to resolve their next hop, at most.
const UNRESOLVED_MAX: usize = 64;
/// First interval of looking for the next hop, in ns; each is twice the one before.
const FIRST_LOOK_NS: u64 = 500_000;
/// Interval after which a segment is dropped: TCP sends it again, if it is still wanted.
const LAST_LOOK_NS: u64 = 256_000_000;

/// Segment whose next hop is not resolved.
pub(super) struct Unresolved {
    device: usize,
    destination: IpAddr,
    packet: Packet,
    /// Time of the next look, in ns, and the interval before it.
    look_ns: u64,
    interval_ns: u64,
}

impl Transmitter {
    /// Pool of segments to be sent.
    pub(in crate::net) fn pool(&mut self) -> &mut Pool {
        &mut self.pool
    }

    /// Gathers segments, which begin with their IP headers. The next [`flush`](super::TransmitQueue::flush)
    /// sends them. Those that answer a packet may go the way `back` that it came: a flood from everywhere
    /// would ask the kernel for a route each.
    pub(in crate::net) fn gather_segments(
        &mut self,
        packets: &mut Vec<Packet>,
        back: Option<WayBack>,
        state: &NetState,
    ) {
        self.now_ns = self.clock.now_ns();
        let routes = state.routes();
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
                        Some(back) => self.gather_back((device, &on), packet, back),
                        None => {
                            let way = ((device, on.as_ref()), destination);
                            self.gather_segment(way, packet, FIRST_LOOK_NS, state);
                        }
                    }
                }
                None => {
                    state.unsent.count_no_route(destination);
                    self.put(packet);
                }
            }
        }
    }

    pub(super) fn gather_back(
        &mut self,
        (device, on): (usize, &Identity),
        mut packet: Packet,
        back: WayBack,
    ) {
        let way = &mut self.ways[device];
        let out = (&mut self.pool, &mut way.gathered);
        emit_link(&mut packet, way.neighbours.hop_of_answer(on, self.now_ns, back, out));
        self.add(device, packet);
    }

    fn gather_segment(
        &mut self,
        ((device, on), destination): ((usize, &Identity), IpAddr),
        mut packet: Packet,
        interval_ns: u64,
        state: &NetState,
    ) {
        let way = &mut self.ways[device];
        let out = (&mut self.pool, &mut way.gathered);
        match way.neighbours.hop_to(destination, on, self.now_ns, out) {
            Hop::Known(link_addresses) => {
                emit_link(&mut packet, link_addresses);
                self.add(device, packet);
            }
            Hop::Sought(neighbour) => {
                emit_link(&mut packet, on.mac.map(|from| LinkAddresses { to: [0; 6], from }));
                self.composed.push(packet);
                self.hold(device, neighbour);
            }
            Hop::Unknown if interval_ns >= LAST_LOOK_NS => {
                state.unsent.count_discard(destination);
                self.put(packet);
            }
            Hop::Unknown => {
                if self.unresolved.len() >= UNRESOLVED_MAX {
                    let oldest = self.unresolved.remove(0);
                    state.unsent.count_discard(oldest.destination);
                    self.put(oldest.packet);
                }
                let look_ns = self.now_ns + interval_ns;
                self.unresolved.push(Unresolved {
                    device,
                    destination,
                    packet,
                    look_ns,
                    interval_ns,
                });
            }
        }
    }

    /// True if segments wait for their next hop.
    pub(in crate::net) fn has_unresolved(&self) -> bool {
        !self.unresolved.is_empty()
    }

    /// Drops segments that wait for their next hop, as the run has ended.
    pub(in crate::net) fn drop_unresolved(&mut self, state: &NetState) {
        for unresolved in std::mem::take(&mut self.unresolved) {
            state.unsent.count_discard(unresolved.destination);
            self.put(unresolved.packet);
        }
    }

    /// Looks for the next hops of segments that wait, and gathers those that are resolved.
    pub(in crate::net) fn retry_unresolved(&mut self, state: &NetState) {
        if self.unresolved.is_empty() {
            return;
        }
        self.now_ns = self.clock.now_ns();
        let now_ns = self.now_ns;
        let is_due = |unresolved: &mut Unresolved| unresolved.look_ns <= now_ns;
        let due: Vec<_> = self.unresolved.extract_if(.., is_due).collect();
        for Unresolved { device, destination, packet, interval_ns, .. } in due {
            let on = state.routes().identity(device);
            self.gather_segment(((device, &on), destination), packet, interval_ns * 2, state);
        }
    }
}

//! Entry of the table: one neighbour, and its class.

use std::net::IpAddr;

use forebay_buf::Pool;
use forebay_rx::packet::Packet;

use super::super::{Identity, arp, ndisc};
use super::SECOND_NS;

/// `retrans_time`.
pub(super) const RETRANS_NS: u64 = SECOND_NS;
/// `gc_staletime`: lifetime of an unused entry.
const STALE_NS: u64 = 60 * SECOND_NS;

/// A neighbour.
#[derive(Debug)]
pub(super) struct Neighbour {
    pub(super) address: IpAddr,
    pub(super) mac: Option<[u8; 6]>,
    pub(super) is_used: bool,
    /// True if the neighbour has answered since it was last unknown.
    pub(super) has_answered: bool,
    pub(super) class: NeighbourClass,
    /// End of the reachable state.
    pub(super) reachable_until_ns: u64,
    /// Time of the last change of `mac`.
    pub(super) updated_ns: u64,
    /// Time of the last use or observation.
    pub(super) touched_ns: u64,
    /// Solicitations since the last confirmation; `ask_at_ns` is the earliest time of the next one.
    pub(super) asked: u8,
    pub(super) ask_at_ns: u64,
    /// Packets waiting for the neighbour; `waiting_since_ns` is the time when the first one was
    /// queued.
    pub(super) waiting: Vec<Packet>,
    /// Number of packets of each waiting send, oldest first.
    pub(super) counts: Vec<usize>,
    pub(super) waiting_since_ns: u64,
}

/// Class of an entry, by the knowledge about it: entries are evicted within their class.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum NeighbourClass {
    /// Without a MAC address.
    Sought,
    /// Observed only, never used.
    Heard,
    /// Used, but never answered us.
    Tried,
    /// Used, and answered a solicitation.
    Proven,
}

impl Neighbour {
    pub(super) fn class_now(&self) -> NeighbourClass {
        match (self.mac, self.is_used, self.has_answered) {
            (None, ..) => NeighbourClass::Sought,
            (Some(_), false, _) => NeighbourClass::Heard,
            (Some(_), true, false) => NeighbourClass::Tried,
            (Some(_), true, true) => NeighbourClass::Proven,
        }
    }

    /// Number of packets of its waiting sends beyond the first of each.
    pub(super) fn more(&self) -> usize {
        self.waiting.len() - self.counts.len()
    }

    /// True if the entry was neither used nor observed for `gc_staletime`.
    pub(super) fn is_old(&self, now_ns: u64) -> bool {
        now_ns.saturating_sub(self.touched_ns) >= STALE_NS
    }

    /// Makes the entry stale: the neighbour is probed after the next use.
    pub(super) fn doubt(&mut self, now_ns: u64) {
        self.reachable_until_ns = now_ns;
        (self.asked, self.ask_at_ns) = (0, 0);
    }

    /// Builds a solicitation, or a unicast probe if `lladdr` is given. `None` within `retrans_time`
    /// of the last one, or if none can be built.
    pub(super) fn ask(
        &mut self,
        lladdr: Option<[u8; 6]>,
        on: &Identity,
        now_ns: u64,
        pool: &mut Pool,
    ) -> Option<Packet> {
        if now_ns < self.ask_at_ns {
            return None;
        }
        let packet = match self.address {
            IpAddr::V4(address) => arp::request(address, lladdr, on, pool),
            IpAddr::V6(address) => ndisc::solicitation(address, lladdr, on, pool),
        }?;
        self.asked = self.asked.saturating_add(1);
        self.ask_at_ns = now_ns.saturating_add(RETRANS_NS);
        Some(packet)
    }
}

//! Coalesce: segments of one flow become one packet, and the rest of the path walks once for all.
//!
//! A packet whose headers say that it may go on is *held* in a descriptor; the next segments of its
//! flow are added to it, and it is let go (*flushed*) when it can grow no more, when a packet of its
//! flow comes that cannot be added, when the queue runs empty, or after a time. What is held of a
//! hash goes before anything else of that hash, so nothing overtakes: no later segment, no pure
//! acknowledgement, no FIN.
//!
//! In [`Gro`](CoalesceMode::Gro) mode, two segments are merged only if [`resegment()`] can give both
//! back byte for byte: the rules are the kernel's (`net/ipv4/tcp_offload.c`, `net/ipv4/udp_offload.c`,
//! `include/net/gro.h` in Linux 6.18), and a few that it lacks (the urgent pointer, a checksum of
//! 0xffff). In [`Lro`](CoalesceMode::Lro) mode acknowledgement, window and timestamps may advance,
//! and the packet carries the newest (LRO-8).
//!
//! The stage's place is the engine's choice: before steering, where it saves the hand-over of every
//! segment but the first; or behind it, where every CPU merges what is its own.

mod between;
mod candidate;
mod compare;
mod cut;
pub mod gso;
mod header;
mod held;
mod links;
mod lro;
pub(crate) mod refusal;
mod resegment;
mod segments;
mod sums;
mod table;
mod tunnel;
mod wire;

use std::sync::Arc;

use candidate::{Candidate, examine};
pub use cut::cut;
use held::{HeldPacket, MergeRules};
pub use held::{TCP_SEGMENTS_MAX, UDP_SEGMENTS_MAX};
pub use refusal::{FlushReason, MergeRefusal};
pub use resegment::resegment;
pub use segments::{Segment, SegmentFragments, Segments};
use table::{DescriptorPlace, Room, Table};
pub use table::{LRO_DESCRIPTORS, LRO_DESCRIPTORS_MAX};
pub use tunnel::innermost;
use tunnel::{Opened, Tunnel, may_be_tunnel};

use crate::arrive::PollStatus;
use crate::counters::CoalesceCounters;
use crate::packet::Packet;

/// Time for which a packet may be held while the queue never runs empty: the kernel's tick of 1 ms, after
/// which it flushes what is old even if a poll used up its budget.
pub const HELD_NS_MAX: u64 = 1_000_000;

/// The MTU of an ordinary Ethernet.
pub const MTU: u32 = 1500;

/// Packets that may be merged.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum CoalesceMode {
    /// Packets that can be taken apart again exactly.
    #[default]
    Gro,
    /// TCP whose acknowledgement, window and timestamps advance, too.
    Lro,
}

/// Configuration of a [`Coalescer`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CoalesceConfig {
    /// Packets that may be merged.
    pub mode: CoalesceMode,
    /// Flows of which something can be held at once; rounded up to a power of two, at most
    /// [`LRO_DESCRIPTORS_MAX`].
    pub descriptors: u32,
    /// The longest IP packet that the device receives.
    pub mtu: u32,
    /// Time for which a packet is held after the queue ran empty, in nanoseconds; 0 flushes all then.
    pub gro_flush_timeout_ns: u64,
    /// A secret under which what is held is found by its addresses, so that nobody can have it found
    /// slowly. Nothing else depends on it.
    pub seed: u64,
}

impl Default for CoalesceConfig {
    fn default() -> Self {
        Self {
            mode: CoalesceMode::default(),
            descriptors: LRO_DESCRIPTORS,
            mtu: MTU,
            gro_flush_timeout_ns: 0,
            seed: 0,
        }
    }
}

/// The coalescing of one rx queue, or of one CPU. Nobody shares it (LRO-10).
#[derive(Debug)]
pub struct Coalescer {
    config: CoalesceConfig,
    table: Table,
    /// Packets first held so far, modulo 2^32.
    born: u32,
    /// Packets that a flush lets go of, in that order; empty between flushes.
    order: Vec<(u32, DescriptorPlace)>,
    counters: Arc<CoalesceCounters>,
}

impl Coalescer {
    /// Holds nothing yet.
    #[must_use]
    pub fn new(config: CoalesceConfig, counters: Arc<CoalesceCounters>) -> Self {
        let table = Table::new(config.descriptors, config.seed);
        Self { config, table, born: 0, order: Vec::new(), counters }
    }

    /// Configuration.
    #[must_use]
    pub fn config(&self) -> &CoalesceConfig {
        &self.config
    }

    /// Packets that are held, merged ones counted once.
    #[must_use]
    pub fn held(&self) -> usize {
        self.table.len()
    }

    /// Takes in parsed and hashed packets, in the order of arrival, and puts those that go on into
    /// `out`.
    pub fn coalesce(&mut self, packets: &mut Vec<Packet>, now_ns: u64, out: &mut Vec<Packet>) {
        let before = out.len();
        self.counters.segments_in.add(packets.len() as u64);
        // One loop for each mode, in which the compiler knows it.
        match self.config.mode {
            mode @ CoalesceMode::Gro => self.take_all(packets, mode, now_ns, out),
            mode @ CoalesceMode::Lro => self.take_all(packets, mode, now_ns, out),
        }
        self.count(out, before);
    }

    /// Lets go of everything, oldest first.
    pub fn flush(&mut self, reason: FlushReason, out: &mut Vec<Packet>) {
        let before = out.len();
        self.flush_those(reason, out, |_| true);
        self.count(out, before);
    }

    /// Lets go of what must not be held on after a poll: everything if the queue ran empty, but
    /// for a `gro_flush_timeout`; else what has been held for long.
    pub fn end_poll(&mut self, behind: PollStatus, now_ns: u64, out: &mut Vec<Packet>) {
        let limit_ns = match (behind, self.config.gro_flush_timeout_ns) {
            (PollStatus::Last, _) | (PollStatus::Drained, 0) => {
                return self.flush(FlushReason::PollEnd, out);
            }
            (PollStatus::MorePending, 0) => HELD_NS_MAX,
            (_, timeout_ns) => timeout_ns,
        };
        let before = out.len();
        self.flush_those(FlushReason::Timeout, out, |held| {
            now_ns.saturating_sub(held.since_ns()) >= limit_ns
        });
        self.count(out, before);
    }

    /// Time at which the next packet has been held for a `gro_flush_timeout`, if anything is held.
    #[must_use]
    pub fn next_timeout_ns(&self) -> Option<u64> {
        let timeout_ns = self.config.gro_flush_timeout_ns;
        self.table.iter().map(|(_, held)| held.since_ns().saturating_add(timeout_ns)).min()
    }

    /// Follows new settings, and lets go of what was held under the old ones.
    pub fn set_config(&mut self, config: CoalesceConfig, out: &mut Vec<Packet>) {
        self.flush(FlushReason::Switch, out);
        if (config.descriptors, config.seed) != (self.config.descriptors, self.config.seed) {
            self.table = Table::new(config.descriptors, config.seed);
        }
        self.config = config;
    }

    /// Taking a segment in is one piece of code, down to the chain of frames, or it takes a third
    /// longer: hence the `inline(always)` here and below.
    #[inline(always)]
    fn take_all(
        &mut self,
        packets: &mut Vec<Packet>,
        mode: CoalesceMode,
        now_ns: u64,
        out: &mut Vec<Packet>,
    ) {
        let rules = MergeRules { mode, mtu: self.config.mtu };
        // Asked beforehand, of all: a look at a packet on its way out of the list costs ten times as much.
        if mode == CoalesceMode::Gro && packets.iter().any(may_be_tunnel) {
            return packets.drain(..).for_each(|packet| self.open(packet, rules, now_ns, out));
        }
        for packet in packets.drain(..) {
            self.take_in(packet, None, rules, now_ns, out);
        }
    }

    /// Takes in what may be a tunnel, or not.
    #[inline(never)]
    fn open(&mut self, mut packet: Packet, rules: MergeRules, now_ns: u64, out: &mut Vec<Packet>) {
        if !may_be_tunnel(&packet) {
            return self.take_in(packet, None, rules, now_ns, out);
        }
        match tunnel::open(&mut packet) {
            Opened::Plain => self.take_in(packet, None, rules, now_ns, out),
            Opened::Tunnel(tunnel) => self.take_in(packet, Some(tunnel), rules, now_ns, out),
            Opened::Refused(refusal) => {
                self.table.tick();
                let found = self.table.find(packet.hash);
                self.pass(packet, found, refusal, out);
            }
        }
    }

    #[inline(always)]
    fn take_in(
        &mut self,
        packet: Packet,
        tunnel: Option<Tunnel>,
        rules: MergeRules,
        now_ns: u64,
        out: &mut Vec<Packet>,
    ) {
        self.table.tick();
        let found = self.table.find(packet.hash);
        if let Some(place) = found
            && let Some((held, mask)) = self.table.get_mut(place)
            && let Some(next) = held.next(&packet, mask, rules)
            && held.goes_on_outside(&packet, tunnel.as_ref())
        {
            if let Some(reason) = held.add(packet, next, rules) {
                self.let_go(place, reason, out);
            }
            return;
        }
        match (examine(&packet, tunnel.is_some(), rules.mode), found) {
            (Ok(candidate), None) => self.begin(packet, tunnel, &candidate, now_ns, out),
            (Ok(candidate), Some(place)) => {
                self.replace(place, packet, tunnel, &candidate, now_ns, out);
            }
            (Err(refusal), found) => self.pass(outside(packet, tunnel), found, refusal, out),
        }
    }

    /// Lets go of what is held of a flow, and begins anew with a packet that cannot be added to it.
    fn replace(
        &mut self,
        place: DescriptorPlace,
        packet: Packet,
        tunnel: Option<Tunnel>,
        candidate: &Candidate,
        now_ns: u64,
        out: &mut Vec<Packet>,
    ) {
        let rules = MergeRules { mode: self.config.mode, mtu: self.config.mtu };
        let refusal = self.table.get_mut(place);
        let refusal = refusal
            .map(|(held, mask)| held.refusal(&packet, tunnel.as_ref(), candidate, mask, rules));
        if let Some(refusal) = refusal {
            self.refuse(refusal);
        }
        let is_full = refusal == Some(MergeRefusal::Size);
        let reason = if is_full { FlushReason::Size } else { FlushReason::Mismatch };
        self.let_go(place, reason, out);
        if candidate.ends() {
            // Nor may anything follow it, but it has been refused once.
            return out.push(outside(packet, tunnel));
        }
        self.begin(packet, tunnel, candidate, now_ns, out);
    }

    /// Holds what may be the first segment of several, of a hash of which nothing is held.
    fn begin(
        &mut self,
        packet: Packet,
        tunnel: Option<Tunnel>,
        candidate: &Candidate,
        now_ns: u64,
        out: &mut Vec<Packet>,
    ) {
        if candidate.ends() {
            return self.pass(outside(packet, tunnel), None, MergeRefusal::Push, out);
        }
        let place = match self.table.room(packet.hash) {
            Room::Free(place) => place,
            Room::Idle(place) => {
                self.let_go(place, FlushReason::Evicted, out);
                place
            }
            Room::None => {
                return self.pass(outside(packet, tunnel), None, MergeRefusal::TableFull, out);
            }
        };
        self.born = self.born.wrapping_add(1);
        let mode = self.config.mode;
        let held = HeldPacket::begin(packet, tunnel, candidate, mode, now_ns, self.born);
        self.table.put(place, held, mode);
    }

    /// Passes a packet on as it is, behind what is held of its flow.
    fn pass(
        &mut self,
        packet: Packet,
        place: Option<DescriptorPlace>,
        refusal: MergeRefusal,
        out: &mut Vec<Packet>,
    ) {
        self.refuse(refusal);
        // It was counted as one frame when it came.
        self.counters.segments_in.add(u64::from(packet.segment_count() - 1));
        if let Some(place) = place {
            self.let_go(place, FlushReason::Mismatch, out);
        }
        if refusal == MergeRefusal::Fragment
            && let Some(addresses) = tunnel::addresses(&packet)
        {
            // It may be of any flow between these addresses: it has no ports, or is hashed as if.
            self.flush_between(addresses, out);
        }
        out.push(packet);
    }

    /// Lets go of all that is held between two addresses, oldest first.
    fn flush_between(&mut self, addresses: &[u8], out: &mut Vec<Packet>) {
        if self.table.len() == 0 {
            return;
        }
        let mut next = self.table.first_between(addresses);
        while let Some(place) = next {
            next = self.table.next_between(place);
            if self.table.is_between(place, addresses) {
                self.let_go(place, FlushReason::Mismatch, out);
            }
        }
    }

    fn let_go(&mut self, place: DescriptorPlace, reason: FlushReason, out: &mut Vec<Packet>) {
        if let Some(held) = self.table.take(place) {
            self.counters.flushes[reason.index()].add(1);
            out.push(held.finish(self.config.mode));
        }
    }

    fn flush_those(
        &mut self,
        reason: FlushReason,
        out: &mut Vec<Packet>,
        is_one: impl Fn(&HeldPacket) -> bool,
    ) {
        if self.table.len() == 0 {
            return;
        }
        let mut order = std::mem::take(&mut self.order);
        let those = self.table.iter().filter(|(_, held)| is_one(held));
        order.extend(those.map(|(place, held)| (self.born.wrapping_sub(held.born()), place)));
        order.sort_unstable_by_key(|&(age, _)| std::cmp::Reverse(age));
        for (_, place) in order.drain(..) {
            self.let_go(place, reason, out);
        }
        self.order = order;
    }

    /// Counts what has gone into `out` since it had `before` packets.
    fn count(&self, out: &[Packet], before: usize) {
        let those = &out[before..];
        self.counters.packets_out.add(those.len() as u64);
        self.counters.bytes_out.add(those.iter().map(|packet| u64::from(packet.wire_len)).sum());
    }

    fn refuse(&self, refusal: MergeRefusal) {
        self.counters.refused[refusal.index()].add(1);
    }
}

/// Restores the outermost headers of a packet that goes on as it came.
fn outside(mut packet: Packet, tunnel: Option<Tunnel>) -> Packet {
    if let Some(tunnel) = tunnel {
        packet.headers = tunnel.outer;
    }
    packet
}

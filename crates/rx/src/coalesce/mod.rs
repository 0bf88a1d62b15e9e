//! Coalesce: segments of one flow become one packet, and later stages run once for all of them.
//!
//! A packet that more segments may follow is *held* in a descriptor, and the next segments of its
//! flow are added to it. The packet is *flushed* when it can grow no more, when a packet of its
//! flow arrives that cannot be added, when the queue runs empty, or after a time. A held packet
//! goes on before anything else of its hash, so nothing overtakes it: no later segment, no pure
//! acknowledgement, no FIN.
//!
//! In [`Gro`](CoalesceMode::Gro) mode, two segments are merged only if [`resegment()`] can restore
//! both byte for byte. The rules are the kernel's (`net/ipv4/tcp_offload.c`,
//! `net/ipv4/udp_offload.c`, `include/net/gro.h` in Linux 6.18), and a few that the kernel lacks
//! (the urgent pointer, a checksum of 0xffff). In [`Lro`](CoalesceMode::Lro) mode acknowledgement,
//! window and timestamps may advance, and the packet carries the newest (LRO-8).
//!
//! The engine chooses the place of the stage: before steering, where only merged packets cross to
//! other CPUs, or behind it, where every CPU merges its own packets.

mod candidate; // can a packet be merged at all?
mod table; //     held packets by flow hash
mod held; //      held packets, and conditions for a further segment
mod compare; //   headers of two segments
mod lro; //       fields that may advance in `lro` mode
mod between; //   held packets by addresses, for fragments
mod links; //     doubly linked lists of slots
mod tunnel; //    segments inside tunnels
mod sums; //      checksum of a merged packet
mod wire; //      header sizes and TCP flags
pub(crate) mod refusal; // reasons not to merge, and to flush
mod segments; //  segments of a merged packet
mod resegment; // the frames that a packet was merged from
mod header; //    headers of a segment, rewritten in place
mod cut; //       segmentation of GSO packets in software
pub mod gso; //   segmentation by a device, or by the kernel behind a TUN

use std::sync::Arc;

use candidate::{Candidate, examine};
pub use cut::{SegmentCutter, cut};
use held::{HeldPacket, MergeRules};
pub use held::{TCP_SEGMENTS_MAX, UDP_SEGMENTS_MAX};
pub use refusal::{FlushReason, MergeRefusal};
pub use resegment::resegment;
pub use segments::{Segment, SegmentFragments, Segments};
use table::{DescriptorPlace, Room, Table};
pub use table::{LRO_DESCRIPTORS, LRO_DESCRIPTORS_MAX};
pub(crate) use tunnel::find_inner;
use tunnel::{Opened, Tunnel, may_be_tunnel};
pub use tunnel::{inner_headers, innermost};

use crate::arrive::PollStatus;
use crate::counters::CoalesceCounters;
use crate::hash::FlowHash;
use crate::packet::Packet;

/// Time for which a packet may be held while the queue never runs empty: the kernel's tick of 1 ms,
/// after which it flushes what is old even if a poll used up its budget.
pub const HELD_NS_MAX: u64 = 1_000_000;

/// MTU of standard Ethernet, in bytes.
pub const MTU: u32 = 1500;

/// Conditions for merging.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum CoalesceMode {
    /// Packets that can be resegmented exactly.
    #[default]
    Gro,
    /// TCP segments; acknowledgement, window and timestamps may advance.
    Lro,
}

/// Configuration of a [`Coalescer`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CoalesceConfig {
    /// Conditions for merging.
    pub mode: CoalesceMode,
    /// Maximum number of flows with a held packet; rounded up to a power of two, at most
    /// [`LRO_DESCRIPTORS_MAX`].
    pub descriptors: u32,
    /// Longest IP packet that the device receives, in bytes.
    pub mtu: u32,
    /// Time for which a packet is held after the queue ran empty, in ns; 0 flushes at once.
    pub gro_flush_timeout_ns: u64,
    /// Secret key of the hash of address pairs, so that nobody can make searches for held packets
    /// slow. Nothing else depends on it.
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

/// Coalescing of one rx queue or of one CPU; never shared (LRO-10).
#[derive(Debug)]
pub struct Coalescer {
    config: CoalesceConfig,
    table: Table,
    /// Number of held packets begun so far, modulo 2^32.
    born: u32,
    /// Age and place of the packets of a flush, in order; empty between flushes.
    order: Vec<(u32, DescriptorPlace)>,
    counters: Arc<CoalesceCounters>,
}

impl Coalescer {
    /// Creates a coalescer without held packets.
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

    /// Number of held packets; a merged packet counts once.
    #[must_use]
    pub fn held(&self) -> usize {
        self.table.len()
    }

    /// Takes parsed and hashed packets in the order of arrival, and adds those that go on to `out`.
    pub fn coalesce(&mut self, packets: &mut Vec<Packet>, now_ns: u64, out: &mut Vec<Packet>) {
        let before = out.len();
        self.counters.segments_in.add(packets.len() as u64);
        // A loop for each mode, so that the mode is a constant in it.
        match self.config.mode {
            mode @ CoalesceMode::Gro => self.take_all(packets, mode, now_ns, out),
            mode @ CoalesceMode::Lro => self.take_all(packets, mode, now_ns, out),
        }
        self.count(out, before);
    }

    /// Flushes all held packets, oldest first.
    pub fn flush(&mut self, reason: FlushReason, out: &mut Vec<Packet>) {
        let before = out.len();
        self.flush_those(reason, out, |_| true);
        self.count(out, before);
    }

    /// Flushes the held packets with these hashes, oldest first.
    pub fn flush_flows(
        &mut self,
        reason: FlushReason,
        out: &mut Vec<Packet>,
        is_one: impl Fn(FlowHash) -> bool,
    ) {
        let before = out.len();
        self.flush_those(reason, out, |held| is_one(held.hash()));
        self.count(out, before);
    }

    /// Flushes the packets that must not stay held after a poll: all of them if the queue ran empty
    /// and there is no `gro_flush_timeout`, else those held for too long.
    pub fn end_poll(&mut self, status: PollStatus, now_ns: u64, out: &mut Vec<Packet>) {
        let limit_ns = match (status, self.config.gro_flush_timeout_ns) {
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

    /// Replaces the configuration, and flushes the packets held under the old one.
    pub fn set_config(&mut self, config: CoalesceConfig, out: &mut Vec<Packet>) {
        self.flush(FlushReason::Switch, out);
        if (config.descriptors, config.seed) != (self.config.descriptors, self.config.seed) {
            self.table = Table::new(config.descriptors, config.seed);
        }
        self.config = config;
    }

    /// Adding a segment takes a third longer unless it is inlined as a whole, down to the chain of
    /// frames: hence the `inline(always)` here and below.
    #[inline(always)]
    fn take_all(
        &mut self,
        packets: &mut Vec<Packet>,
        mode: CoalesceMode,
        now_ns: u64,
        out: &mut Vec<Packet>,
    ) {
        let rules = MergeRules { mode, mtu: self.config.mtu };
        // All packets are checked first: a check of each one as it is drained costs ten times as much.
        if mode == CoalesceMode::Gro && packets.iter().any(may_be_tunnel) {
            return packets.drain(..).for_each(|packet| self.open(packet, rules, now_ns, out));
        }
        for packet in packets.drain(..) {
            self.take_in(packet, None, rules, now_ns, out);
        }
    }

    /// Takes in a packet of a burst in which some may be tunnelled.
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

    /// Flushes the held packet of a flow, and begins anew with a packet that cannot be added to it.
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
            // Nothing may follow it either; its refusal is counted above.
            return out.push(outside(packet, tunnel));
        }
        self.begin(packet, tunnel, candidate, now_ns, out);
    }

    /// Holds a possible first segment, of a hash without a held packet.
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

    /// Flushes the flow's held packet, for a fragment all those between its addresses, then emits
    /// this one unmerged.
    fn pass(
        &mut self,
        packet: Packet,
        place: Option<DescriptorPlace>,
        refusal: MergeRefusal,
        out: &mut Vec<Packet>,
    ) {
        self.refuse(refusal);
        // The packet has been counted as one frame so far.
        self.counters.segments_in.add(u64::from(packet.segment_count() - 1));
        if let Some(place) = place {
            self.let_go(place, FlushReason::Mismatch, out);
        }
        if refusal == MergeRefusal::Fragment
            && let Some(addresses) = tunnel::addresses(&packet)
        {
            // A fragment may belong to any flow between its addresses: its hash does not include
            // ports.
            self.flush_between(addresses, out);
        }
        out.push(packet);
    }

    /// Flushes all packets held between two addresses, oldest first.
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

    /// Counts the packets added to `out` since its length was `before`.
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

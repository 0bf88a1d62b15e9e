//! Held moves: packets that wait on the polling CPU until their predecessors are processed.
//!
//! All holds of a queue share one bounded arena; one hold may take a part of it. A hold is a list
//! in the arena: packets of one slot, in order of arrival. When slots change their meaning (a table
//! of another size, another hash key), all holds are joined into one list, the line before a fence.

use forebay_buf::Position;

use super::ids::{FenceId, HoldId, SlotId};
use crate::cpu::CpuId;
use crate::packet::Packet;

/// Default size of the arena, in packets: sixteen backlogs.
pub const HOLD_MAX: u32 = 16_384;

/// Part of the arena that one slot may take: one in this many, at least [`HOLD_SHARE_LEAST`]
/// packets, so that other slots find room.
pub const HOLD_SHARE_DIVISOR: u32 = 4;

/// Minimum share of a slot, in packets, while the arena has room: a batch.
pub const HOLD_SHARE_LEAST: u32 = 64;

/// Maximum number of holds: ids below the flow table's mark for "none".
const HOLDS_MAX: usize = u16::MAX as usize - 1;

const _: () = assert!(HOLDS_MAX < u16::MAX as usize, "the flow table's mark for none is no id");
const _: () = assert!(HOLD_MAX / HOLD_SHARE_DIVISOR >= HOLD_SHARE_LEAST, "a share is a batch");

/// Move of one slot in progress.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hold {
    /// Moving slot.
    pub(super) slot: SlotId,
    /// Predecessors that its packets wait for.
    pub(super) waits_for: Predecessors,
    /// Time at which the move began.
    pub(super) since_ns: u64,
    packets: HoldList,
    len: u32,
    /// Index of this hold in `Holds::active`.
    listed_at: usize,
}

/// Predecessors that a hold waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Predecessors {
    /// Packets in the backlog of a CPU, up to this position.
    Backlog(CpuId, Position),
    /// All packets in front of a fence.
    Fence(FenceId),
}

/// List of packets, oldest first.
#[derive(Clone, Copy, Debug)]
pub(super) struct HoldList {
    first: NodeId,
    last: NodeId,
}

impl HoldList {
    pub(super) const EMPTY: Self = Self { first: NodeId::NONE, last: NodeId::NONE };

    pub(super) fn is_empty(self) -> bool {
        self.first == NodeId::NONE
    }
}

/// The holds of one rx queue.
#[derive(Debug)]
pub(super) struct Holds {
    holds: Vec<Option<Hold>>,
    free_holds: Vec<HoldId>,
    /// Holds in use, in arbitrary order.
    active: Vec<HoldId>,
    nodes: Box<[HoldNode]>,
    free_nodes: Vec<NodeId>,
    /// Maximum number of packets of one hold.
    share: u32,
}

#[derive(Debug)]
struct HoldNode {
    packet: Option<Packet>,
    next: NodeId,
    /// True if packets before this one in the line may have other hashes for the same flows.
    after_seam: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct NodeId(u32);

impl NodeId {
    const NONE: Self = Self(u32::MAX);
}

impl Holds {
    /// Creates an arena for `hold_max` packets.
    pub(super) fn new(hold_max: u32) -> Self {
        let node = |_| HoldNode { packet: None, next: NodeId::NONE, after_seam: false };
        Self {
            holds: Vec::new(),
            free_holds: Vec::new(),
            active: Vec::new(),
            nodes: (0..hold_max).map(node).collect(),
            free_nodes: (0..hold_max).rev().map(NodeId).collect(),
            share: (hold_max / HOLD_SHARE_DIVISOR).max(HOLD_SHARE_LEAST),
        }
    }

    /// Begins to hold a slot's packets. `None` at the maximum number of holds.
    pub(super) fn begin(
        &mut self,
        slot: SlotId,
        waits_for: Predecessors,
        now_ns: u64,
    ) -> Option<HoldId> {
        let id = match self.free_holds.pop() {
            Some(id) => id,
            None if self.holds.len() < HOLDS_MAX => {
                self.holds.push(None);
                HoldId(u16::try_from(self.holds.len() - 1).ok()?)
            }
            None => return None,
        };
        let (packets, listed_at) = (HoldList::EMPTY, self.active.len());
        debug_assert!(self.get(id).is_none(), "the id is of another hold");
        self.holds[usize::from(id.0)] =
            Some(Hold { slot, waits_for, since_ns: now_ns, packets, len: 0, listed_at });
        self.active.push(id);
        debug_assert!(self.active.len() <= HOLDS_MAX, "more holds than ids");
        Some(id)
    }

    /// Appends a packet to a hold.
    ///
    /// # Errors
    /// Returns the packet if the arena or the hold is full.
    pub(super) fn push(&mut self, id: HoldId, packet: Packet) -> Result<(), Packet> {
        let Some(hold) = self.holds[usize::from(id.0)].as_mut() else { return Err(packet) };
        // One slot must not fill the arena, or the moves of all others would be given up.
        if hold.len >= self.share {
            return Err(packet);
        }
        let Some(node) = self.free_nodes.pop() else { return Err(packet) };
        let packet = Some(packet);
        self.nodes[node.0 as usize] = HoldNode { packet, next: NodeId::NONE, after_seam: false };
        let added = HoldList { first: node, last: node };
        debug_assert_eq!(hold.len == 0, hold.packets.is_empty(), "the count is not the list's");
        hold.packets = linked(&mut self.nodes, hold.packets, added);
        hold.len += 1;
        debug_assert!(hold.len <= self.share, "one slot has more than its share");
        Ok(())
    }

    /// Oldest packet of a hold.
    pub(super) fn front(&self, id: HoldId) -> Option<&Packet> {
        self.nodes.get(self.get(id)?.packets.first.0 as usize)?.packet.as_ref()
    }

    /// Takes the oldest packet of a hold.
    pub(super) fn pop(&mut self, id: HoldId) -> Option<Packet> {
        let hold = self.holds[usize::from(id.0)].as_mut()?;
        let (packet, rest) = unlinked(&mut self.nodes, hold.packets)?;
        self.free_nodes.push(hold.packets.first);
        hold.packets = rest;
        debug_assert!(hold.len > 0 && packet.is_some(), "a list without a packet");
        hold.len -= 1;
        debug_assert_eq!(hold.len == 0, hold.packets.is_empty(), "the count is not the list's");
        packet
    }

    /// Ends all holds and appends their packets to a line. Packets of a flow are in one hold, or
    /// some of them in the line already. Returns the time at which the oldest hold began.
    pub(super) fn line_up(&mut self, line: &mut HoldList) -> Option<u64> {
        let mut since_ns: Option<u64> = None;
        let mut has_seam = self.line_front(*line).is_some();
        for id in self.active.drain(..) {
            if let Some(hold) = self.holds[usize::from(id.0)].take() {
                since_ns = Some(since_ns.map_or(hold.since_ns, |first| first.min(hold.since_ns)));
                if let Some(first) = self.nodes.get_mut(hold.packets.first.0 as usize) {
                    first.after_seam = std::mem::take(&mut has_seam);
                }
                *line = linked(&mut self.nodes, *line, hold.packets);
                self.free_holds.push(id);
            }
        }
        debug_assert_eq!(self.free_holds.len(), self.holds.len(), "a hold outlives its fence");
        since_ns
    }

    /// First packet of a line.
    pub(super) fn line_front(&self, line: HoldList) -> Option<&Packet> {
        self.nodes.get(line.first.0 as usize)?.packet.as_ref()
    }

    /// True if the first packet of a line is at a seam: packets before it were lined up earlier.
    pub(super) fn is_line_at_seam(&self, line: HoldList) -> bool {
        self.nodes.get(line.first.0 as usize).is_some_and(|node| node.after_seam)
    }

    /// Takes the first packet of a line.
    pub(super) fn line_pop(&mut self, line: &mut HoldList) -> Option<Packet> {
        let (packet, rest) = unlinked(&mut self.nodes, *line)?;
        debug_assert!(packet.is_some(), "a line without a packet");
        self.free_nodes.push(line.first);
        *line = rest;
        packet
    }

    /// Ends an empty hold.
    pub(super) fn end(&mut self, id: HoldId) {
        debug_assert!(self.front(id).is_none(), "packets would be lost");
        let Some(hold) = self.holds[usize::from(id.0)].take() else { return };
        let listed = self.active.swap_remove(hold.listed_at);
        debug_assert_eq!(listed, id, "another hold is no longer looked at");
        if let Some(&moved) = self.active.get(hold.listed_at)
            && let Some(moved) = &mut self.holds[usize::from(moved.0)]
        {
            moved.listed_at = hold.listed_at;
        }
        self.free_holds.push(id);
    }

    pub(super) fn get(&self, id: HoldId) -> Option<&Hold> {
        self.holds[usize::from(id.0)].as_ref()
    }

    /// Records that the slot's last packet is at `tail` in the backlog of `cpu`.
    pub(super) fn set_waits_for(&mut self, id: HoldId, cpu: CpuId, tail: Position) {
        debug_assert!(self.get(id).is_some(), "an ended hold waits for nothing");
        if let Some(hold) = &mut self.holds[usize::from(id.0)] {
            hold.waits_for = Predecessors::Backlog(cpu, tail);
        }
    }

    /// Active holds.
    pub(super) fn active(&self) -> &[HoldId] {
        &self.active
    }

    /// Free room of the arena, in packets.
    pub(super) fn room(&self) -> usize {
        self.free_nodes.len()
    }

    /// Number of further packets that fit for any slot, even the one that holds most.
    pub(super) fn room_for_any(&self) -> usize {
        let lens = self.active.iter().filter_map(|&id| Some(self.get(id)?.len));
        let share_left = self.share - lens.max().unwrap_or(0);
        self.room().min(share_left as usize)
    }

    /// Maximum number of packets of one slot, while the arena has room.
    pub(super) fn share(&self) -> usize {
        self.share as usize
    }

    /// Maximum number of packets of one slot in an otherwise empty arena.
    pub(super) fn most_of_one(&self) -> usize {
        self.share().min(self.nodes.len())
    }

    /// Number of held packets.
    pub(super) fn len(&self) -> usize {
        self.nodes.len() - self.free_nodes.len()
    }

    /// Number of packets of a hold.
    pub(super) fn len_of(&self, id: HoldId) -> usize {
        self.get(id).map_or(0, |hold| hold.len as usize)
    }
}

/// Concatenates two lists.
fn linked(nodes: &mut [HoldNode], first: HoldList, second: HoldList) -> HoldList {
    match nodes.get_mut(first.last.0 as usize) {
        None => second,
        Some(_) if second.first == NodeId::NONE => first,
        Some(last) => {
            last.next = second.first;
            HoldList { first: first.first, last: second.last }
        }
    }
}

/// Splits the first packet off a list; `None` if the list is empty.
fn unlinked(nodes: &mut [HoldNode], list: HoldList) -> Option<(Option<Packet>, HoldList)> {
    let node = nodes.get_mut(list.first.0 as usize)?;
    let rest = HoldList { first: node.next, last: list.last };
    debug_assert_eq!(
        rest.first == NodeId::NONE,
        list.first == list.last,
        "the last node, and no other, ends the list"
    );
    let packet = node.packet.take();
    Some((packet, if rest.first == NodeId::NONE { HoldList::EMPTY } else { rest }))
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use forebay_buf::pool::{ChunkClass, Pool, carve, region_bytes};
    use forebay_buf::{Frame, Region};
    use proptest::prelude::*;

    use super::*;
    use crate::packet::Arrival;
    use crate::parse::Link;

    fn pool(chunks: u32) -> Pool {
        let shares = [vec![ChunkClass { chunk_bytes: 512, chunks }]];
        carve(Region::allocate(region_bytes(&shares)), &shares).unwrap().remove(0)
    }

    fn packet(frame: Frame, number: u32) -> Packet {
        Packet::received(frame, Arrival(number), 0, Link::Ethernet)
    }

    fn begin(holds: &mut Holds, slot: u32) -> Option<HoldId> {
        holds.begin(SlotId(slot), Predecessors::Fence(FenceId::A), 0)
    }

    #[derive(Clone, Copy, Debug)]
    enum Operation {
        Begin,
        Push(usize),
        Pop(usize),
        End(usize),
        LineUp,
        PopLine,
    }

    fn operation() -> impl Strategy<Value = Operation> {
        prop_oneof![
            1 => Just(Operation::Begin),
            6 => any::<usize>().prop_map(Operation::Push),
            5 => any::<usize>().prop_map(Operation::Pop),
            1 => any::<usize>().prop_map(Operation::End),
            1 => Just(Operation::LineUp),
            2 => Just(Operation::PopLine),
        ]
    }

    /// Slow twin: a separate queue per hold.
    #[derive(Default)]
    struct Oracle {
        /// Id, slot and held arrivals of each hold.
        holds: Vec<(HoldId, u32, VecDeque<u32>)>,
        line: VecDeque<u32>,
        begun: u32,
        most: usize,
    }

    impl Oracle {
        fn pick(&mut self, pick: usize) -> Option<&mut (HoldId, u32, VecDeque<u32>)> {
            let count = self.holds.len();
            self.holds.get_mut(pick.checked_rem(count)?)
        }

        fn len(&self) -> usize {
            let held: usize = self.holds.iter().map(|(_, _, waiting)| waiting.len()).sum();
            held + self.line.len()
        }

        fn check(&self, holds: &Holds, hold_max: usize) {
            assert_eq!((holds.len(), holds.room()), (self.len(), hold_max - self.len()));
            let longest = self.holds.iter().map(|(_, _, waiting)| waiting.len()).max();
            let share_left = holds.share() - longest.unwrap_or(0);
            assert_eq!(holds.room_for_any(), share_left.min(hold_max - self.len()));
            assert_eq!(holds.holds.len(), self.most, "ended holds are used again");
            let mut active = holds.active().to_vec();
            let mut expected: Vec<_> = self.holds.iter().map(|&(id, ..)| id).collect();
            active.sort_unstable_by_key(|id| id.0);
            expected.sort_unstable_by_key(|id| id.0);
            assert_eq!(active, expected);
            for (id, slot, waiting) in &self.holds {
                assert_eq!(holds.get(*id).unwrap().slot, SlotId(*slot));
                let front = holds.front(*id).map(|packet| packet.arrival.0);
                assert_eq!(front, waiting.front().copied());
                assert_eq!(holds.len_of(*id), waiting.len());
            }
        }
    }

    fn run(hold_max: u32, operations: &[Operation]) {
        let mut pool = pool(hold_max + 1);
        let (mut holds, mut oracle) = (Holds::new(hold_max), Oracle::default());
        let mut line = HoldList::EMPTY;
        for (number, &operation) in (0..).zip(operations) {
            let is_full = oracle.len() == hold_max as usize;
            match operation {
                Operation::Begin => {
                    let id = begin(&mut holds, oracle.begun).unwrap();
                    oracle.holds.push((id, oracle.begun, VecDeque::new()));
                    oracle.begun += 1;
                    oracle.most = oracle.most.max(oracle.holds.len());
                }
                Operation::Push(pick) => {
                    let Some((id, _, waiting)) = oracle.pick(pick) else { continue };
                    let is_full = is_full || waiting.len() >= holds.share();
                    match holds.push(*id, packet(pool.allocate(0).unwrap(), number)) {
                        Ok(()) => waiting.push_back(number),
                        Err(refused) => {
                            assert_eq!(refused.arrival, Arrival(number));
                            pool.put(refused.frame);
                            assert!(is_full, "promise 3: refused at the bound only");
                        }
                    }
                }
                Operation::Pop(pick) => {
                    let Some((id, _, waiting)) = oracle.pick(pick) else { continue };
                    let popped = holds.pop(*id);
                    assert_eq!(popped.as_ref().map(|it| it.arrival.0), waiting.pop_front());
                    popped.into_iter().for_each(|packet| pool.put(packet.frame));
                }
                Operation::End(pick) => {
                    let count = oracle.holds.len().max(1);
                    let empty = |hold: &mut (_, _, VecDeque<_>)| hold.2.is_empty();
                    if oracle.pick(pick).is_some_and(empty) {
                        let (id, ..) = oracle.holds.swap_remove(pick % count);
                        holds.end(id);
                    }
                }
                Operation::LineUp => {
                    let active: Vec<_> = holds.active().to_vec();
                    for id in active {
                        let at = oracle.holds.iter().position(|hold| hold.0 == id).unwrap();
                        let (_, _, waiting) = oracle.holds.remove(at);
                        oracle.line.extend(waiting);
                    }
                    holds.line_up(&mut line);
                }
                Operation::PopLine => {
                    let popped = holds.line_pop(&mut line);
                    assert_eq!(popped.as_ref().map(|it| it.arrival.0), oracle.line.pop_front());
                    popped.into_iter().for_each(|packet| pool.put(packet.frame));
                }
            }
            oracle.check(&holds, hold_max as usize);
        }
        assert_eq!(pool.in_use(), oracle.len());
    }

    proptest! {
        #[test]
        fn promise_3_holds_are_bounded_queues(
            hold_max in 0u32..12,
            operations in proptest::collection::vec(operation(), 0..150),
        ) {
            run(hold_max, &operations);
        }
    }

    #[test]
    fn promise_3_holds_match_flow_table_names() {
        let mut holds = Holds::new(0);
        let ids: Vec<_> = (0..).map_while(|slot| begin(&mut holds, slot)).collect();
        assert_eq!(ids.len(), HOLDS_MAX);
        holds.end(ids[7]);
        assert_eq!(begin(&mut holds, 0), Some(ids[7]));
        assert_eq!(begin(&mut holds, 0), None);
    }
}

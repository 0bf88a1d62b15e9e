//! Held moves: packets that wait on the polling CPU until their predecessors are processed.
//!
//! All holds of a queue share one bounded arena. A hold is a list in it: the packets of one slot,
//! in the order of arrival.

use mem::Position;

use super::ids::{HoldId, SlotId};
use crate::cpu::CpuId;
use crate::packet::Packet;

/// Packets that may wait at once, when nobody says otherwise: sixteen backlogs' worth.
pub const HOLD_MAX: u32 = 16_384;

/// The most holds at once: ids below the flow table's mark for "none".
const HOLDS_MAX: usize = u16::MAX as usize - 1;

/// One slot's move in progress.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hold {
    /// The slot that moves.
    pub(super) slot: SlotId,
    /// The CPU that still has packets of the slot.
    pub(super) from: CpuId,
    /// Where the last of them lies in that CPU's backlog.
    pub(super) behind: Position,
    /// When the move began.
    pub(super) since_ns: u64,
    first: NodeId,
    last: NodeId,
    /// This hold's place in `Holds::active`.
    listed_at: usize,
}

/// The holds of one rx queue.
#[derive(Debug)]
pub(super) struct Holds {
    holds: Vec<Option<Hold>>,
    free_holds: Vec<HoldId>,
    /// Holds that last, in no order.
    active: Vec<HoldId>,
    nodes: Box<[Node]>,
    free_nodes: Vec<NodeId>,
}

#[derive(Debug)]
struct Node {
    packet: Option<Packet>,
    next: NodeId,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct NodeId(u32);

impl NodeId {
    const NONE: Self = Self(u32::MAX);
}

impl Holds {
    /// Room for `hold_max` packets.
    pub(super) fn new(hold_max: u32) -> Self {
        let node = |_| Node { packet: None, next: NodeId::NONE };
        Self {
            holds: Vec::new(),
            free_holds: Vec::new(),
            active: Vec::new(),
            nodes: (0..hold_max).map(node).collect(),
            free_nodes: (0..hold_max).rev().map(NodeId).collect(),
        }
    }

    /// Begins to hold a slot's packets back. `None` when there are as many holds as may be.
    pub(super) fn begin(
        &mut self,
        slot: SlotId,
        from: CpuId,
        behind: Position,
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
        let none = NodeId::NONE;
        let listed_at = self.active.len();
        self.holds[usize::from(id.0)] =
            Some(Hold { slot, from, behind, since_ns: now_ns, first: none, last: none, listed_at });
        self.active.push(id);
        Some(id)
    }

    /// Adds a packet at the end of a hold.
    ///
    /// # Errors
    /// Gives the packet back when as many wait as may.
    pub(super) fn push(&mut self, id: HoldId, packet: Packet) -> Result<(), Packet> {
        let Some(hold) = self.holds[usize::from(id.0)].as_mut() else { return Err(packet) };
        let Some(node) = self.free_nodes.pop() else { return Err(packet) };
        self.nodes[node.0 as usize] = Node { packet: Some(packet), next: NodeId::NONE };
        let last = std::mem::replace(&mut hold.last, node);
        if last == NodeId::NONE {
            hold.first = node;
        } else {
            self.nodes[last.0 as usize].next = node;
        }
        Ok(())
    }

    /// The oldest packet of a hold.
    pub(super) fn front(&self, id: HoldId) -> Option<&Packet> {
        let hold = self.get(id)?;
        self.nodes.get(hold.first.0 as usize)?.packet.as_ref()
    }

    /// Takes the oldest packet of a hold.
    pub(super) fn pop(&mut self, id: HoldId) -> Option<Packet> {
        let hold = self.holds[usize::from(id.0)].as_mut()?;
        let node = self.nodes.get_mut(hold.first.0 as usize)?;
        let packet = node.packet.take();
        self.free_nodes.push(hold.first);
        hold.first = node.next;
        if hold.first == NodeId::NONE {
            hold.last = NodeId::NONE;
        }
        packet
    }

    /// Ends a hold, which is empty.
    pub(super) fn end(&mut self, id: HoldId) {
        debug_assert!(self.front(id).is_none(), "packets would be lost");
        let Some(hold) = self.holds[usize::from(id.0)].take() else { return };
        self.active.swap_remove(hold.listed_at);
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

    /// Notes that the slot's last packet now lies at `behind` in the backlog of `from`.
    pub(super) fn set_behind(&mut self, id: HoldId, from: CpuId, behind: Position) {
        if let Some(hold) = &mut self.holds[usize::from(id.0)] {
            (hold.from, hold.behind) = (from, behind);
        }
    }

    /// The holds that last.
    pub(super) fn active(&self) -> &[HoldId] {
        &self.active
    }

    /// How many more packets may wait.
    pub(super) fn room(&self) -> usize {
        self.free_nodes.len()
    }

    /// Packets that wait.
    pub(super) fn len(&self) -> usize {
        self.nodes.len() - self.free_nodes.len()
    }
}

//! Packets that wait for their neighbours, and the neighbours by the number of their waiting sends.

use forebay_rx::packet::Packet;

use super::super::slots::{SlotList, SlotPlace};
use super::Neighbours;

/// List index for entries with the same number of waiting packets.
const BY_WAITING: usize = 1;

impl Neighbours {
    /// Takes all packets that wait for a neighbour.
    pub(super) fn take_waiting(&mut self, place: SlotPlace) -> Vec<Packet> {
        self.unlink_waiting(place);
        let neighbour = &mut self.slots[place];
        let waiting = std::mem::take(&mut neighbour.waiting);
        self.waiting -= neighbour.counts.len();
        self.waiting_more -= waiting.len() - neighbour.counts.len();
        neighbour.counts.clear();
        waiting
    }

    /// Takes those sends that wait for a neighbour whose first packets `is_taken` accepts, oldest first.
    pub(super) fn take_sends(
        &mut self,
        place: SlotPlace,
        is_taken: &impl Fn(&Packet) -> bool,
        taken: &mut Vec<Packet>,
    ) {
        let (mut send, mut first) = (0, 0);
        while let Some(&count) = self.slots[place].counts.get(send) {
            if !self.slots[place].waiting.get(first).is_some_and(is_taken) {
                (send, first) = (send + 1, first + count);
                continue;
            }
            self.unlink_waiting(place);
            let neighbour = &mut self.slots[place];
            neighbour.counts.remove(send);
            taken.extend(neighbour.waiting.drain(first..first + count));
            self.waiting -= 1;
            self.waiting_more -= count - 1;
            self.link_waiting(place);
        }
    }

    /// Neighbours that packets wait for.
    pub(super) fn awaited(&self) -> Vec<SlotPlace> {
        let of_list = |list: &SlotList| {
            std::iter::successors(list.first(), |&place| self.slots.behind(BY_WAITING, place))
        };
        self.by_waiting.iter().flat_map(of_list).collect()
    }

    /// Drops the send that has waited longest for a neighbour, if any, to make room.
    pub(super) fn displace_oldest(&mut self, place: SlotPlace, dropped: &mut Vec<Packet>) {
        if self.slots[place].counts.is_empty() {
            return;
        }
        self.unlink_waiting(place);
        let neighbour = &mut self.slots[place];
        let count = neighbour.counts.remove(0);
        for packet in neighbour.waiting.drain(..count) {
            self.drops.neigh_queuefull += u64::from(packet.wire_count());
            dropped.push(packet);
        }
        self.waiting -= 1;
        self.waiting_more -= count - 1;
        self.link_waiting(place);
    }

    /// Unlinks an entry before its number of waiting sends changes. `link_waiting` links it
    /// afterwards.
    pub(super) fn unlink_waiting(&mut self, place: SlotPlace) {
        let more = self.slots[place].counts.len().checked_sub(1);
        if let Some(list) = more.and_then(|more| self.by_waiting.get_mut(more)) {
            self.slots.unlink(BY_WAITING, list, place);
        }
    }

    pub(super) fn link_waiting(&mut self, place: SlotPlace) {
        let more = self.slots[place].counts.len().checked_sub(1);
        if let Some(list) = more.and_then(|more| self.by_waiting.get_mut(more)) {
            self.slots.push_last(BY_WAITING, list, place);
        }
    }
}

//! Records of the CPUs of a world, and the check of packet order.

use std::collections::BTreeMap;

use forebay_buf::Position;
use forebay_rx::backlog::Note;
use forebay_rx::delivery::Batch;
use forebay_rx::hash::FlowHash;
use forebay_rx::packet::Arrival;
use forebay_rx::{CpuId, Handler, Packet, SteerReason};

use crate::steering::world::{CPUS, Flow};

/// Packet that a CPU has handled.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    pub(crate) cpu: CpuId,
    pub(crate) flow: u16,
    pub(crate) hash: FlowHash,
    pub(crate) note: Note,
    pub(crate) handled_ns: u64,
    /// Number of packets that this CPU had lost before this one.
    lost_before: u32,
}

/// Packet in the batch of a thread that died.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lost {
    pub(crate) cpu: CpuId,
    pub(crate) arrival: Arrival,
    pub(crate) hash: FlowHash,
    pub(crate) lost_ns: u64,
}

/// Handler of all CPUs, which records all packets.
pub(crate) struct Journal {
    pub(crate) seen: Vec<Seen>,
    pub(crate) order: Order,
    pub(crate) batches: Vec<usize>,
    pub(crate) lost: Vec<Lost>,
    pub(crate) now_ns: u64,
    start: Position,
}

impl Journal {
    pub(crate) fn new(start: Position) -> Self {
        Self {
            seen: Vec::new(),
            order: Order::default(),
            batches: Vec::new(),
            lost: Vec::new(),
            now_ns: 0,
            start,
        }
    }

    /// CPU of each packet, and the reason.
    pub(crate) fn ways(&self) -> Vec<(u16, SteerReason)> {
        self.seen.iter().map(|seen| (seen.cpu.0, seen.note.steer_reason)).collect()
    }

    /// CPU of each packet of a flow, and the reason.
    pub(crate) fn ways_of(&self, flow: Flow) -> Vec<(u16, SteerReason)> {
        let seen = self.seen.iter().filter(|seen| seen.flow == flow.id);
        seen.map(|seen| (seen.cpu.0, seen.note.steer_reason)).collect()
    }

    /// Checks that backlog positions are the number of packets queued there, lost ones included.
    pub(crate) fn check_positions(&self) {
        let mut tails = [self.start; CPUS as usize];
        for seen in &self.seen {
            let tail = &mut tails[seen.cpu.index()];
            *tail = tail.plus(1);
            assert_eq!(seen.note.position, tail.plus(seen.lost_before), "{seen:?}");
        }
    }
}

impl Handler for Journal {
    fn handle(&mut self, batch: &mut Batch<'_>) {
        assert_eq!(batch.packets.len(), batch.notes.len(), "a note for each packet");
        self.batches.push(batch.packets.len());
        for (packet, &note) in batch.packets.iter().zip(batch.notes) {
            let Packet { frame, hash, arrival, .. } = packet;
            let id = frame.data().first_chunk().copied().unwrap_or_default();
            let flow = u16::from_be_bytes(id);
            self.order.see(flow, *arrival);
            let (cpu, hash, handled_ns) = (batch.cpu, *hash, self.now_ns);
            let lost = self.lost.iter().filter(|lost| lost.cpu == cpu).count();
            let lost_before = u32::try_from(lost).unwrap();
            self.seen.push(Seen { cpu, flow, hash, note, handled_ns, lost_before });
        }
    }
}

/// Check of promise 1: packets of a flow come in the order of arrival.
#[derive(Default)]
pub(crate) struct Order {
    last: BTreeMap<u16, Arrival>,
    /// Flow, packet that came too late, and packet before it.
    pub(crate) breaks: Vec<(u16, Arrival, Arrival)>,
}

impl Order {
    pub(crate) fn see(&mut self, flow: u16, arrival: Arrival) {
        let last = self.last.insert(flow, arrival);
        self.breaks
            .extend(last.filter(|&last| !arrival.is_after(last)).map(|last| (flow, arrival, last)));
    }
}

//! The handler that the path delivers packets to: it inspects everything.

use forebay_buf::Position;
use forebay_device::synthetic::{STAMP_BYTES, STAMP_MAGIC};
use forebay_rx::backlog::Note;
use forebay_rx::coalesce::Segment;
use forebay_rx::delivery::Batch;
use forebay_rx::{CpuId, DropReason, Handler, Packet, RxQueue, SteerReason};

use super::reassembly::SimReassembly;
use crate::laws::{Delivered, Law, Laws};
use crate::machine::Handed;
use crate::recording::Recording;
use crate::traffic::FlowId;

/// The applications of all CPUs.
pub(super) struct SimApplication<'a> {
    pub(super) now_ns: u64,
    pub(super) laws: &'a mut Laws,
    pub(super) handed: &'a mut Vec<Handed>,
    pub(super) seen: &'a mut SeenByReader,
    pub(super) reassembly: &'a mut Option<SimReassembly>,
    pub(super) recording: &'a mut Option<Recording>,
}

/// Observations of packets that reached an application or were dropped.
pub(super) struct SeenByReader {
    cpus: usize,
    /// Expected position of the next packet, by lane; `None` after a loss.
    pub(super) next: Vec<Option<Position>>,
    /// Number of frames that came out of each lane.
    pub(super) passed: Vec<u64>,
    /// Number of drops, by [`DropReason::index`].
    pub(super) drops: [u64; DropReason::ALL.len()],
    /// Number of packets that moved their slot.
    pub(super) moves: u64,
    /// Number of packets that were held.
    pub(super) held: u64,
    /// Number of packets that stayed.
    pub(super) stays: u64,
}

impl SeenByReader {
    pub(super) fn new(queues: usize, cpus: usize, start: Position) -> Self {
        Self {
            cpus,
            next: vec![Some(start.plus(1)); queues * cpus],
            passed: vec![0; queues * cpus],
            drops: Default::default(),
            moves: 0,
            held: 0,
            stays: 0,
        }
    }

    /// Index of a lane.
    pub(super) fn lane(&self, queue: RxQueue, cpu: CpuId) -> usize {
        usize::from(queue.0) * self.cpus + cpu.index()
    }

    /// Checks and counts a steering decision.
    fn note(&mut self, lane: usize, note: &Note, laws: &mut Laws) {
        let expected = self.next[lane].replace(note.position.plus(1));
        if expected.is_some_and(|expected| expected != note.position) {
            laws.broke(Law::Counters, || format!("{note:?} should lie at {expected:?}"));
        }
        self.moves += u64::from(note.head_old.is_some());
        match note.steer_reason {
            SteerReason::Held => self.held += 1,
            SteerReason::Stay => self.stays += 1,
            _ => {}
        }
    }
}

impl Handler for SimApplication<'_> {
    fn handle(&mut self, batch: &mut Batch<'_>) {
        let lane = self.seen.lane(batch.rx_queue, batch.cpu);
        for note in batch.notes {
            self.seen.note(lane, note, self.laws);
        }
        for (index, packet) in batch.packets.iter().enumerate() {
            if let Some(recording) = self.recording {
                recording.delivered(batch, index, self.now_ns);
            }
            if let Some(reassembly) = self.reassembly {
                reassembly.take(batch.cpu, packet, self.now_ns, self.laws);
            }
            for segment in packet.segments() {
                self.seen.passed[lane] += 1;
                let number = segment.arrival.0.into();
                let Some((flow, sequence)) = stamp(packet, &segment) else {
                    self.laws.broke(Law::Conservation, || format!("frame {number} has no stamp"));
                    continue;
                };
                self.handed.push(Handed { flow, hash: packet.hash });
                let (cpu, now_ns) = (batch.cpu, self.now_ns);
                self.laws.delivered(Delivered { number, flow, sequence, cpu, now_ns });
            }
        }
    }
}

/// Flow and position in it, from the packet's bytes.
fn stamp(packet: &Packet, segment: &Segment<'_>) -> Option<(FlowId, u64)> {
    // A packet that is not IP has no payload for the path, and a later fragment begins with
    // something else; in both, the stamp is at the end.
    segment.payload.first_chunk().and_then(read).or_else(|| read(packet.frame.data().last_chunk()?))
}

/// Flow and sequence number in a stamp, if it is valid.
pub(super) fn read(stamp: &[u8; STAMP_BYTES]) -> Option<(FlowId, u64)> {
    let (magic, rest) = stamp.split_first_chunk::<4>()?;
    let (flow, sequence) = rest.split_first_chunk::<4>()?;
    let sequence = u64::from_be_bytes(*sequence.first_chunk()?);
    (*magic == STAMP_MAGIC).then_some((FlowId(u32::from_be_bytes(*flow)), sequence))
}

//! Questions to the queues, answered between their turns.

use std::net::{IpAddr, SocketAddr};
use std::sync::mpsc::Sender;

use forebay_rx::hash::FlowHash;
use forebay_rx::parse::View;
use forebay_rx::steer::{Drops, FlowState};
use forebay_rx::{CpuId, Packet, RxQueue, SteerReason};

/// Number of equal ranges of hash values whose CPUs a queue reports.
pub const HASH_RANGES: u32 = 256;

/// Request that each queue answers between two turns. Sending an answer never blocks.
#[derive(Debug)]
pub enum Question {
    /// Request to explain a flow.
    Flow {
        /// Hash of the flow.
        flow: FlowHash,
        /// Channel for one answer from each queue.
        answers: Sender<Explained>,
    },
    /// Request for the CPUs of all hash values.
    Ranges {
        /// Channel for one answer from each queue.
        answers: Sender<QueueRanges>,
    },
    /// Request for the flows of one burst. Each queue answers with its next packets; until there
    /// are any, it keeps the last [`BURST_REQUESTS_MAX`] requests.
    Burst {
        /// Channel for at most one answer from each queue.
        answers: Sender<SampledBurst>,
    },
}

/// CPUs of all hash values on one queue.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct QueueRanges {
    /// The queue, numbered through all devices.
    pub queue: RxQueue,
    /// Name of the queue: `rx-0`, or `eth1/rx-0` if there are several devices.
    pub name: String,
    /// CPU that polls the queue.
    pub polling_cpu: CpuId,
    /// Time of the answer, in engine time.
    pub at_ns: u64,
    /// Desired CPU, and the reason, of a flow in the middle of each of [`HASH_RANGES`] ranges.
    pub desired: Vec<(CpuId, SteerReason)>,
}

/// Hash in the middle of each of [`HASH_RANGES`] ranges.
pub(super) fn middles() -> impl Iterator<Item = FlowHash> {
    const RANGE: u32 = u32::MAX / HASH_RANGES + 1;
    (0..HASH_RANGES).map(|index| FlowHash(index * RANGE + RANGE / 2))
}

/// Maximum number of requests for bursts that a queue keeps until its next packets.
pub const BURST_REQUESTS_MAX: usize = 16;

/// Flows of a burst of one queue.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SampledBurst {
    /// Name of the queue, as in [`Explained`].
    pub name: String,
    /// Packets of the burst after coalescing, a merged one once.
    pub packets: Vec<SampledPacket>,
}

/// Packet of a sampled burst.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SampledPacket {
    /// Hash of the flow.
    pub flow: FlowHash,
    /// Addresses of the outermost IP header, with the ports behind it; port 0 if there are none.
    pub endpoints: Option<[SocketAddr; 2]>,
    /// Protocol of the outermost IP header.
    pub protocol: Option<u8>,
    /// CPU of the flow's slot once the burst was steered, if one is known.
    pub cpu: Option<CpuId>,
}

impl SampledPacket {
    /// Flow of a parsed packet, without its CPU.
    pub(super) fn of(packet: &Packet) -> Self {
        let view = View::new(packet.frame.data(), &packet.headers);
        let (from, to) = view.ports().unwrap_or_default();
        let at = |address: Option<IpAddr>, port| Some(SocketAddr::new(address?, port));
        let endpoints = at(view.source(), from).zip(at(view.destination(), to));
        Self {
            flow: packet.hash,
            endpoints: endpoints.map(|(from, to)| [from, to]),
            protocol: view.protocol(),
            cpu: None,
        }
    }
}

/// State of a flow on one queue.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Explained {
    /// The queue, numbered through all devices.
    pub queue: RxQueue,
    /// Name of the queue: `rx-0`, or `eth1/rx-0` if there are several devices.
    pub name: String,
    /// CPU that polls the queue.
    pub polling_cpu: CpuId,
    /// Time of the answer, in engine time.
    pub at_ns: u64,
    /// Current CPU of the flow, and the reason.
    pub state: FlowState,
    /// Remembered drops of the flow.
    pub drops: Vec<Drops>,
}

//! Resets of segments that belong to no connection (RFC 9293, section 3.10.7.1).

use super::super::connection::Answer;
use super::super::flow::Flow;
use super::super::seq::Seq;
use super::super::wire::{Flags, Options, Outgoing, Segment, emit};
use super::{Tcp, TcpOut};

impl Tcp {
    /// Answers a segment by a reset (`tcp_v4_send_reset`).
    pub(super) fn reset(&mut self, flow: &Flow, segment: &Segment, out: &mut TcpOut<'_>) {
        if segment.has(Flags::RST) {
            return;
        }
        let (seq, ack, flags) = if segment.has(Flags::ACK) {
            (segment.ack, Seq(0), Flags::RST)
        } else {
            (Seq(0), segment.end(), Flags::RST.with(Flags::ACK))
        };
        self.counters.out_rsts.add(1);
        let outgoing = Outgoing { flags, ack, ..Outgoing::empty(flow, seq) };
        self.send(&outgoing, out);
    }

    /// Tells the peer of a handshake that is given up. Only if other processes listen, too: their silence about
    /// its segments would leave the peer without an answer.
    pub(super) fn reset_request(&mut self, at: u32, out: &mut TcpOut<'_>) {
        let Some(request) = self.requests.at(at).filter(|_| !self.is_alone()) else { return };
        self.counters.out_rsts.add(1);
        // Without ACK: a peer that has seen no SYN-ACK ignores it.
        let flags = Flags::RST;
        let outgoing = Outgoing { flags, ..Outgoing::empty(&request.flow, request.sequence + 1) };
        self.send(&outgoing, out);
    }

    pub(super) fn send(&self, outgoing: &Outgoing<'_>, out: &mut TcpOut<'_>) {
        match emit(outgoing, out.pool) {
            Some(packet) => {
                self.counters.out_segs.add(1);
                out.packets.push(packet);
            }
            None => self.counters.no_frame.add(1),
        }
    }
}

impl<'a> Outgoing<'a> {
    /// A segment without flags, options and payload.
    pub(super) fn empty(flow: &'a Flow, seq: Seq) -> Self {
        Self {
            flow,
            seq,
            ack: Seq(0),
            flags: Flags::default(),
            window: 0,
            urgent: 0,
            options: Options::default(),
            tos: 0,
            payload: [&[], &[]],
            segment_bytes: 0,
        }
    }
}

impl Answer {
    /// A reset if `is_due`.
    pub(in crate::tcp) fn reset_if(is_due: bool) -> Self {
        if is_due { Self::Reset } else { Self::None }
    }
}

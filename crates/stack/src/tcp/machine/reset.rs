//! Resets of segments that belong to no connection (RFC 9293, section 3.10.7.1).

use std::net::SocketAddr;

use super::super::flow::Flow;
use super::super::seq::Seq;
use super::super::wire::{Flags, Outgoing, Segment};
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
        let outgoing = Outgoing { flags, ack, tos: segment.dscp(), ..Outgoing::empty(flow, seq) };
        self.send(&outgoing, out);
    }

    /// Tells the peer of a handshake that is given up with the listener of an address. Only if other processes listen
    /// there, too: their silence about its segments would leave the peer without an answer.
    pub(super) fn reset_request(&mut self, at: u32, local: SocketAddr, out: &mut TcpOut<'_>) {
        let has_others = self.division.as_ref().is_some_and(|division| division.has_others(local));
        let Some(request) = self.requests.at(at).filter(|_| has_others) else { return };
        self.counters.out_rsts.add(1);
        // Without ACK: a peer that has seen no SYN-ACK ignores it.
        let flags = Flags::RST;
        let outgoing = Outgoing { flags, ..Outgoing::empty(&request.flow, request.sequence + 1) };
        self.send(&outgoing, out);
    }
}

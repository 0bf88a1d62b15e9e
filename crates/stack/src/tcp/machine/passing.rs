//! Connections that nobody has accepted, passed on to a listener of another process.

use forebay_rx::packet::Packet;

use super::super::flow::Flow;
use super::super::passed::PassedConnection;
use super::super::wire::{Flags, Options, Outgoing, Segment, Timestamps, emit};
use super::request::{Request, UNKNOWN};
use super::{Kind, SocketEntry, Target, Tcp, TcpError, TcpOut, TcpSocket};

/// Payload of each segment by which the received bytes are received again.
const PIECE_BYTES: usize = 1448;

impl Tcp {
    /// Takes the first connection that waits at a listener, for another process, without a word to the peer.
    /// `None` if the connection cannot be passed on: it is reset. Connections that began with their SYN stay until the
    /// SYN-ACK is acknowledged, or they end.
    ///
    /// # Errors
    /// As [`accept`](Self::accept); [`TcpError::InProgress`] if all that wait stay.
    pub fn pass_on(
        &mut self,
        listener: TcpSocket,
        out: &mut TcpOut<'_>,
    ) -> Result<Option<PassedConnection>, TcpError> {
        let Kind::Listener(waiting) = &self.entry(listener)?.kind else {
            return Err(TcpError::Invalid);
        };
        let place = waiting.accepted.iter().position(|&index| !self.awaits_ack(index));
        if place.is_none() && !waiting.accepted.is_empty() {
            return Err(TcpError::InProgress);
        }
        let (socket, _) = self.accept_at(listener, place.unwrap_or(0))?;
        let passed = match self.sockets.at(socket.index) {
            Some(SocketEntry { kind: Kind::Connection(connection), .. }) => connection.passed(),
            _ => None,
        };
        let Some(passed) = passed else {
            self.close(socket, out)?;
            return Ok(None);
        };
        self.targets.remove(&passed.flow);
        if let Some(division) = &self.division {
            division.pass_on(&passed.flow);
        }
        self.remove(socket.index, out);
        Ok(Some(passed))
    }

    fn awaits_ack(&self, index: u32) -> bool {
        matches!(
            self.sockets.at(index),
            Some(SocketEntry { kind: Kind::Connection(connection), .. }) if connection.awaits_ack()
        )
    }

    /// Adds a connection of another process to those that wait at a listener. False if the listener has no room, there are not
    /// enough frames, or a third process has it. One that does not fit in the receive buffer is reset.
    pub fn adopt(
        &mut self,
        listener: TcpSocket,
        passed: &PassedConnection,
        out: &mut TcpOut<'_>,
    ) -> bool {
        let (listener, flow) = (listener.index, passed.flow);
        let is_known = self.targets.find(&flow).is_some();
        let Some(request) = self.request_of_passed(listener, passed, out) else { return false };
        if is_known || self.refuse_if_full(listener) {
            return false;
        }
        let Some(segments) = passed.segments(out) else { return false };
        let division = self.division.as_ref();
        if division.is_some_and(|division| !division.adopt(&flow, passed.peer_sequence.0)) {
            segments.into_iter().for_each(|(packet, _)| out.pool.put(packet.frame));
            return false;
        }
        self.accept_passed(listener, &request, segments, out);
        self.reset_if_cut(passed, out);
        true
    }

    /// Creates a connection of another process, and hands it what was received.
    fn accept_passed(
        &mut self,
        listener: u32,
        request: &Request,
        segments: Vec<(Packet, Segment)>,
        out: &mut TcpOut<'_>,
    ) {
        let mut is_accepted = false;
        for (packet, segment) in segments {
            if !is_accepted {
                self.accept_connection(listener, request, packet, &segment, out);
                is_accepted = true;
            } else if let Some(Target::Connection(index)) = self.targets.find(&request.flow) {
                self.receive_connected(index, packet, &segment, out);
            } else {
                out.pool.put(packet.frame);
            }
        }
    }

    /// Resets a connection that lacks bytes which its peer will not send again, as they were acknowledged.
    fn reset_if_cut(&mut self, passed: &PassedConnection, out: &mut TcpOut<'_>) {
        let Some(Target::Connection(index)) = self.targets.find(&passed.flow) else { return };
        let Some(SocketEntry { kind: Kind::Connection(connection), .. }) = self.sockets.at(index)
        else {
            return;
        };
        if !connection.has_received(passed) {
            self.with_connection(index, out, |connection, cx| connection.abort(cx));
        }
    }

    fn request_of_passed(
        &self,
        listener: u32,
        passed: &PassedConnection,
        out: &TcpOut<'_>,
    ) -> Option<Request> {
        let entry = self.sockets.at(listener)?;
        let socket = TcpSocket { index: listener, generation: entry.generation };
        let new = Request::new(
            &passed.flow,
            socket,
            passed.agreed,
            &entry.options().inherited(passed.flow.is_ipv6()),
            &self.config,
            passed.mtu_bytes,
            out.now_us,
        );
        // The peer has been told as much, and one more for its FIN.
        let received = u32::try_from(passed.payload.len() + 1).unwrap_or(u32::MAX);
        Some(Request {
            sequence: passed.sequence,
            peer_sequence: passed.peer_sequence,
            peer_mss: passed.peer_mss,
            timestamp: passed.timestamp,
            timestamp_offset: passed.timestamp_offset,
            window: new.window.max(received),
            // The round trip is not known.
            resent: UNKNOWN,
            ..new
        })
    }
}

impl PassedConnection {
    /// Segments as the peer may have sent them, with what was received. `None` without enough frames.
    fn segments(&self, out: &mut TcpOut<'_>) -> Option<Vec<(Packet, Segment)>> {
        let count = self.payload.chunks(PIECE_BYTES).len().max(1);
        let mut segments = Vec::with_capacity(count);
        for piece in 0..count {
            let packet = self.packet(piece, piece + 1 == count, out);
            let segment = packet.as_ref().and_then(Segment::of);
            let Some(segment) = packet.into_iter().zip(segment).next() else {
                segments
                    .into_iter()
                    .for_each(|(packet, _): (Packet, _)| out.pool.put(packet.frame));
                return None;
            };
            segments.push(segment);
        }
        Some(segments)
    }

    fn packet(&self, piece: usize, is_last: bool, out: &mut TcpOut<'_>) -> Option<Packet> {
        let at = piece * PIECE_BYTES;
        let payload = self.payload.get(at..)?;
        let payload = payload.get(..PIECE_BYTES).unwrap_or(payload);
        let mut flags = Flags::ACK;
        if self.has_fin && is_last {
            flags = flags.with(Flags::FIN);
        }
        // No time of ours: nothing was asked that it could be the answer to.
        let stamps = Timestamps { value: self.timestamp, echo: 0 };
        let back = Flow { ours: self.flow.theirs, theirs: self.flow.ours };
        let outgoing = Outgoing {
            ack: self.sequence + 1,
            flags,
            window: self.window,
            options: Options {
                timestamps: self.agreed.timestamps.then_some(stamps),
                ..Options::default()
            },
            payload: [payload, &[]],
            ..Outgoing::empty(&back, self.peer_sequence + 1 + u32::try_from(at).ok()?)
        };
        emit(&outgoing, out.pool)
    }
}

//! Connections that nobody has accepted, passed on to a listener of another process.

use super::super::connection::{ReceiveWindow, stamp_ms};
use super::super::flow::Flow;
use super::super::invalid_limit::InvalidLimit;
use super::super::passed::PassedConnection;
use super::super::wire::{Flags, Options, Outgoing, Segment, Timestamps, emit};
use super::handshake::{Request, announced_mss};
use super::{Kind, SocketEntry, Target, Tcp, TcpError, TcpOut, TcpSocket};

/// Payload of each segment by which the received bytes are received again.
const PIECE_BYTES: usize = 1024;

impl Tcp {
    /// Takes the first connection that waits at a listener, for another process, without a word to the peer.
    /// `None` if the connection cannot be passed on: it is reset.
    ///
    /// # Errors
    /// As [`accept`](Self::accept).
    pub fn pass_on(
        &mut self,
        listener: TcpSocket,
        out: &mut TcpOut<'_>,
    ) -> Result<Option<PassedConnection>, TcpError> {
        let (socket, _) = self.accept(listener)?;
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

    /// Adds a connection of another process to those that wait at a listener. False if the listener has no room, or a
    /// third process has it.
    pub fn adopt(
        &mut self,
        listener: TcpSocket,
        passed: &PassedConnection,
        out: &mut TcpOut<'_>,
    ) -> bool {
        let (listener, flow) = (listener.index, passed.flow);
        let is_known = self.targets.find(&flow).is_some();
        let claim = || {
            let division = self.division.as_ref();
            division.is_none_or(|division| division.adopt(&flow, passed.peer_sequence.0))
        };
        let Some(request) = self.request_of_passed(listener, passed, out) else { return false };
        if is_known || self.refuse_if_full(listener) || !claim() {
            return false;
        }
        let is_accepted = self.accept_passed(listener, passed, &request, out);
        if !is_accepted {
            self.forget_flow(&flow);
        }
        is_accepted
    }

    /// Creates a connection of another process, and hands it what was received. False without a frame.
    fn accept_passed(
        &mut self,
        listener: u32,
        passed: &PassedConnection,
        request: &Request,
        out: &mut TcpOut<'_>,
    ) -> bool {
        let mut is_accepted = false;
        let count = passed.payload.chunks(PIECE_BYTES).len().max(1);
        for piece in 0..count {
            let Some(packet) = passed.segment(piece, count, out) else { return is_accepted };
            let Some(segment) = Segment::of(&packet) else {
                out.pool.put(packet.frame);
                return is_accepted;
            };
            if !is_accepted {
                self.accept_connection(listener, request, packet, &segment, out);
                is_accepted = true;
            } else if let Some(Target::Connection(index)) = self.targets.find(&passed.flow) {
                self.receive_connected(index, packet, &segment, out);
            } else {
                out.pool.put(packet.frame);
            }
        }
        is_accepted
    }

    fn request_of_passed(
        &self,
        listener: u32,
        passed: &PassedConnection,
        out: &TcpOut<'_>,
    ) -> Option<Request> {
        let entry = self.sockets.at(listener)?;
        let options = *entry.options();
        let flow = passed.flow;
        let mss = u32::from(announced_mss(&flow, &options, passed.mtu_bytes));
        Some(Request {
            flow,
            listener: TcpSocket { index: listener, generation: entry.generation },
            sequence: passed.sequence,
            peer_sequence: passed.peer_sequence,
            peer_mss: passed.peer_mss,
            mtu_bytes: passed.mtu_bytes,
            agreed: passed.agreed,
            timestamp: passed.timestamp,
            timestamp_offset: passed.timestamp_offset,
            stamps: (0, 0),
            window: ReceiveWindow::new(&options, &self.config).initial_window(mss),
            sent_us: out.now_us,
            invalid_limit: InvalidLimit::default(),
            timeouts: 0,
            // The round trip is not known.
            resent: 1,
            is_acked: false,
            is_sole: false,
        })
    }
}

impl PassedConnection {
    /// A segment as the peer may have sent it, with a part of what was received.
    fn segment(&self, piece: usize, count: usize, out: &mut TcpOut<'_>) -> Option<super::Packet> {
        let at = piece * PIECE_BYTES;
        let payload = self.payload.get(at..)?;
        let payload = payload.get(..PIECE_BYTES).unwrap_or(payload);
        let mut flags = Flags::ACK;
        if self.has_fin && piece + 1 == count {
            flags = flags.with(Flags::FIN);
        }
        let echo = stamp_ms(out.now_us).wrapping_add(self.timestamp_offset);
        let stamps = Timestamps { value: self.timestamp, echo };
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

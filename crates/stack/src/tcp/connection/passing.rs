//! Connections that nobody has accepted, in a form in which another process can continue them.

use super::super::passed::{PASSED_BYTES_MAX, PassedConnection};
use super::{Connection, State};

impl Connection {
    /// Facts of a connection to which nothing was sent yet; `None` if another process cannot go on with it.
    pub(in crate::tcp) fn passed(&self) -> Option<PassedConnection> {
        let (send, receive) = (&self.send, &self.receive);
        let is_open = matches!(self.state, State::Established | State::CloseWait);
        let is_untouched = send.next == send.initial + 1 && send.una == send.next;
        let len = receive.queue.len_bytes() as usize;
        if !is_open || !is_untouched || receive.urgent.is_some() || len > PASSED_BYTES_MAX {
            return None;
        }
        let mut payload = vec![0; len];
        let copied = receive.queue.peek(0, &mut payload);
        let scale = self.agreed.scales.map_or(0, |scales| scales.send);
        (copied == len).then(|| PassedConnection {
            flow: self.flow(),
            sequence: send.initial,
            peer_sequence: receive.initial,
            peer_mss: u16::try_from(send.peer_mss).unwrap_or(u16::MAX),
            mtu_bytes: send.path_mtu,
            agreed: self.agreed,
            timestamp: receive.timestamp,
            timestamp_offset: self.timestamp_offset,
            window: u16::try_from(send.window >> scale).unwrap_or(u16::MAX),
            has_fin: self.state == State::CloseWait,
            payload,
        })
    }

    /// True if all that was received before has been received again.
    pub(in crate::tcp) fn has_received(&self, passed: &PassedConnection) -> bool {
        let len = u32::try_from(passed.payload.len()).unwrap_or(u32::MAX);
        self.receive.next == passed.peer_sequence + 1 + len + u32::from(passed.has_fin)
    }
}

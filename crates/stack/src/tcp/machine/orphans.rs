//! Connections that the application has closed and that go on (orphans), and their limit.

use super::super::connection::{Connection, Context};
use super::{Kind, Tcp, TcpOut};

/// Memory that a connection keeps whatever the limit (`SOCK_MIN_SNDBUF`), in bytes.
const KEPT_BYTES: u64 = 4608;

impl Tcp {
    /// Closes a connection. It is reset if there are too many without an owner, or if all memory is in
    /// use and it holds some (`tcp_check_oom`).
    pub(super) fn close_connection(&mut self, index: u32, out: &mut TcpOut<'_>) {
        let is_memory_full = self.memory.bytes() > self.config.memory_bytes;
        let is_full = self.orphans >= self.config.max_orphans;
        self.disown(index, out, |connection, cx| {
            connection.close(cx);
            let holds_some = connection.charge().bytes() > KEPT_BYTES;
            if !connection.is_closed() && (is_full || is_memory_full && holds_some) {
                cx.counters.abort_on_memory.add(1);
                connection.abort(cx);
            }
        });
    }

    /// Resets a connection, and closes it.
    pub(super) fn abort_connection(&mut self, index: u32, out: &mut TcpOut<'_>) {
        self.disown(index, out, |connection, cx| {
            connection.abort(cx);
            connection.close(cx);
        });
    }

    fn disown(
        &mut self,
        index: u32,
        out: &mut TcpOut<'_>,
        act: impl FnOnce(&mut Connection, &mut Context<'_>),
    ) {
        if let Some(Kind::Connection(connection)) = self.sockets.at(index).map(|entry| &entry.kind)
        {
            self.orphans += u32::from(!connection.is_orphan());
            self.with_connection(index, out, act);
        }
    }
}

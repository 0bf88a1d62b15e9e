//! Bytes to and from a connection.

use crate::tcp::connection::{Connection, Context, ReadMode, WriteFlags};
use crate::tcp::error::TcpError;
use crate::tcp::machine::{Kind, Tcp, TcpOut, TcpSocket};

/// Bytes that each connection may have to send whatever the memory of others (least of `tcp_wmem`).
const SENT_BYTES_MIN: u32 = 4096;

impl Tcp {
    /// Copies received bytes into `room`. 0 is the end of the stream.
    ///
    /// # Errors
    /// [`TcpError::WouldBlock`] if nothing waits, else the error of the connection.
    pub fn read(
        &mut self,
        socket: TcpSocket,
        room: &mut [u8],
        out: &mut TcpOut<'_>,
    ) -> Result<usize, TcpError> {
        self.call_reading(socket, out, |connection, cx| connection.read(room, ReadMode::Take, cx))
    }

    /// Copies received bytes into `room`, and leaves them in the queue (`MSG_PEEK`).
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn peek(
        &mut self,
        socket: TcpSocket,
        room: &mut [u8],
        out: &mut TcpOut<'_>,
    ) -> Result<usize, TcpError> {
        self.call_reading(socket, out, |connection, cx| connection.read(room, ReadMode::Peek, cx))
    }

    /// Bytes that were received, in the frame that they came in; empty if there are none. To be
    /// followed by [`Self::consume`].
    #[must_use]
    pub fn fill(&self, socket: TcpSocket) -> &[u8] {
        self.connection(socket).map_or(&[], Connection::fill)
    }

    /// Removes received bytes.
    ///
    /// # Errors
    /// [`TcpError::NotConnected`] of a socket without a connection.
    pub fn consume(
        &mut self,
        socket: TcpSocket,
        len_bytes: usize,
        out: &mut TcpOut<'_>,
    ) -> Result<(), TcpError> {
        self.call(socket, out, |connection, cx| connection.consume(len_bytes, cx))
    }

    /// Reads the urgent byte (`MSG_OOB`). `None` if the peer's data ended without it.
    ///
    /// # Errors
    /// [`TcpError::Invalid`] without one, [`TcpError::WouldBlock`] if it has not come yet, [`TcpError::NotConnected`] of a
    /// listener.
    pub fn read_urgent(
        &mut self,
        socket: TcpSocket,
        mode: ReadMode,
        out: &mut TcpOut<'_>,
    ) -> Result<Option<u8>, TcpError> {
        if matches!(self.entry(socket)?.kind, Kind::Idle(_)) {
            return Err(TcpError::Invalid);
        }
        self.call(socket, out, |connection, _| connection.read_urgent(mode))?
    }

    /// Queues bytes to be sent, and returns their number. While all memory is in use, a connection has at
    /// most 4,096 to send (`tcp_wmem`).
    ///
    /// # Errors
    /// [`TcpError::WouldBlock`] without room, else the error of the connection.
    pub fn write(
        &mut self,
        socket: TcpSocket,
        bytes: &[u8],
        flags: WriteFlags,
        out: &mut TcpOut<'_>,
    ) -> Result<usize, TcpError> {
        let is_memory_full = self.memory.bytes() >= self.config.memory_bytes;
        match &self.entry(socket)?.kind {
            Kind::Connection(connection) if connection.waits_for_data() => {
                self.send_syn(socket, bytes, WriteFlags { waits: false, ..flags }, out)
            }
            Kind::Connection(_) => self.call(socket, out, |connection, cx| {
                if is_memory_full {
                    write_scarcely(connection, bytes, flags, cx)
                } else {
                    connection.write(bytes, flags, cx)
                }
            })?,
            Kind::Idle(_) => Err(self.take_error(socket)?.unwrap_or(TcpError::BrokenPipe)),
            Kind::Listener(_) => Err(TcpError::BrokenPipe),
        }
    }
}

/// Queues as many bytes as a connection may have while there is no memory. An error or the end of the
/// connection comes first: no memory would change that.
fn write_scarcely(
    connection: &mut Connection,
    bytes: &[u8],
    flags: WriteFlags,
    cx: &mut Context<'_>,
) -> Result<usize, TcpError> {
    let room = SENT_BYTES_MIN.saturating_sub(connection.unacknowledged_bytes()) as usize;
    let taken = bytes.get(..room).unwrap_or(bytes);
    let is_whole = taken.len() == bytes.len();
    let flags = WriteFlags {
        more_follows: flags.more_follows && is_whole,
        ends_record: flags.ends_record && is_whole,
        ends_packet: flags.ends_packet && is_whole,
        ..flags
    };
    let written = connection.write(taken, flags, cx)?;
    if written == 0 && !bytes.is_empty() { Err(TcpError::WouldBlock) } else { Ok(written) }
}

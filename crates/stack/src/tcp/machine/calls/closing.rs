//! Ends of connections and listeners.

use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::tcp::connection::State;
use crate::tcp::error::TcpError;
use crate::tcp::machine::{Idle, Kind, Listener, Tcp, TcpOut, TcpSocket};
use crate::tcp::seq::len_u32;

impl Tcp {
    /// Closes directions (`shutdown`); without a connection, those of the one to be opened.
    ///
    /// # Errors
    /// [`TcpError::NotConnected`] without a connection.
    pub fn shutdown(
        &mut self,
        socket: TcpSocket,
        how: Shutdown,
        out: &mut TcpOut<'_>,
    ) -> Result<(), TcpError> {
        match &mut self.entry_mut(socket)?.kind {
            Kind::Idle(idle) => {
                idle.shut.receive |= how != Shutdown::Write;
                idle.shut.send |= how != Shutdown::Read;
                self.ready.push(socket);
                return Err(TcpError::NotConnected);
            }
            Kind::Listener(_) if how != Shutdown::Write => return self.disconnect(socket, out),
            Kind::Listener(_) => return Ok(()),
            Kind::Connection(connection) if connection.state == State::SynSent => {
                return self.disconnect(socket, out);
            }
            _ => {}
        }
        self.call(socket, out, |connection, cx| connection.shutdown(how, cx))?
    }

    /// Ends a connection at once, by a reset if it was open, or stops listening: the socket may connect
    /// or listen anew (`connect` to `AF_UNSPEC`). The next call tells that it was reset.
    ///
    /// # Errors
    /// [`TcpError::NoSocket`] if it is closed.
    pub fn disconnect(&mut self, socket: TcpSocket, out: &mut TcpOut<'_>) -> Result<(), TcpError> {
        match &mut self.entry_mut(socket)?.kind {
            Kind::Idle(idle) => idle.reset_connection_options(),
            Kind::Listener(_) => self.stop_listening(socket.index, out),
            Kind::Connection(_) => {
                let error = self.call(socket, out, |connection, cx| connection.disconnect(cx))?;
                self.forget_attempt(socket.index, out);
                if let Kind::Idle(idle) = &mut self.entry_mut(socket)?.kind {
                    idle.error = error;
                }
            }
        }
        Ok(())
    }

    /// Closes a socket. A connection lives on until the peer has everything.
    ///
    /// # Errors
    /// [`TcpError::NoSocket`] if it was closed before.
    pub fn close(&mut self, socket: TcpSocket, out: &mut TcpOut<'_>) -> Result<(), TcpError> {
        match self.entry_mut(socket)?.kind {
            Kind::Idle(_) => self.remove(socket.index, out),
            Kind::Listener(_) => {
                self.stop_listening(socket.index, out);
                self.remove(socket.index, out);
            }
            Kind::Connection(_) => self.close_connection(socket.index, out),
        }
        Ok(())
    }

    /// Resets all connections, and forgets all sockets: the host ends.
    pub fn abort_all(&mut self, out: &mut TcpOut<'_>) {
        let sockets: Vec<u32> = self.sockets.indices().collect();
        for index in sockets {
            self.stop_listening(index, out);
            self.abort_connection(index, out);
            self.remove(index, out);
        }
    }

    /// Resets the connections that nobody accepted, and forgets handshakes.
    fn stop_listening(&mut self, index: u32, out: &mut TcpOut<'_>) {
        let Some(entry) = self.sockets.at_mut(index) else { return };
        let listener = TcpSocket { index, generation: entry.generation };
        let Kind::Listener(listening) = &mut entry.kind else { return };
        let (local, accepted) = (listening.local, std::mem::take(&mut listening.accepted));
        listening.queues.accepted.fetch_sub(len_u32(accepted.len()), Ordering::Relaxed);
        let queues = Arc::clone(&listening.queues);
        let &mut Listener { options, fast_open, reuse_port, .. } = &mut **listening;
        let mut idle =
            Idle { options, fast_open, bound: Some(local), reuse_port, ..Idle::default() };
        idle.reset_connection_options();
        entry.kind = Kind::Idle(Box::new(idle));
        self.listeners.remove(local, index);
        for connection in accepted {
            self.abort_connection(connection, out);
        }
        let requests: Vec<_> = self
            .requests
            .indices()
            .filter(|&at| self.requests.at(at).is_some_and(|request| request.listener == listener))
            .collect();
        queues.requests.fetch_sub(len_u32(requests.len()), Ordering::Relaxed);
        for at in requests {
            self.reset_request(at, local, out);
            self.drop_request(at);
        }
    }
}

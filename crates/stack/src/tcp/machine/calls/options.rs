//! Options of sockets.

use crate::tcp::config::{TcpOptions, Timestamping};
use crate::tcp::error::TcpError;
use crate::tcp::machine::{Kind, Tcp, TcpOut, TcpSocket};

impl Tcp {
    /// Options of a socket.
    ///
    /// # Errors
    /// [`TcpError::NoSocket`] if it is closed.
    pub fn options(&self, socket: TcpSocket) -> Result<TcpOptions, TcpError> {
        self.entry(socket).map(|entry| entry.options())
    }

    /// Replaces the options of a socket. Connections inherit those of their listener.
    ///
    /// # Errors
    /// [`TcpError::NoSocket`] if it is closed.
    pub fn set_options(
        &mut self,
        socket: TcpSocket,
        options: TcpOptions,
        out: &mut TcpOut<'_>,
    ) -> Result<(), TcpError> {
        match &mut self.entry_mut(socket)?.kind {
            Kind::Idle(idle) => idle.options = options,
            Kind::Listener(listener) => listener.options = options,
            Kind::Connection(_) => {
                self.with_connection(socket.index, out, |connection, cx| {
                    connection.set_options(options, cx);
                });
            }
        }
        Ok(())
    }

    /// Sets [`TcpOptions::nodelay`]. As in the kernel, on sends what Nagle's rule, a cork or a flag of a write holds back, also
    /// if it was on.
    ///
    /// # Errors
    /// [`TcpError::NoSocket`] if it is closed.
    pub fn set_nodelay(
        &mut self,
        socket: TcpSocket,
        on: bool,
        out: &mut TcpOut<'_>,
    ) -> Result<(), TcpError> {
        let options = TcpOptions { nodelay: on, ..self.options(socket)? };
        self.set_options(socket, options, out)?;
        if on {
            // Without a connection there is nothing to push.
            let _ = self.call(socket, out, |connection, cx| connection.push(cx));
        }
        Ok(())
    }

    /// Sets [`TcpOptions::cork`]. As in the kernel, off sends what a flag of a write holds back, also if it was off.
    ///
    /// # Errors
    /// [`TcpError::NoSocket`] if it is closed.
    pub fn set_cork(
        &mut self,
        socket: TcpSocket,
        on: bool,
        out: &mut TcpOut<'_>,
    ) -> Result<(), TcpError> {
        let options = TcpOptions { cork: on, ..self.options(socket)? };
        self.set_options(socket, options, out)?;
        if !on {
            // Without a connection there is nothing to send.
            let _ = self.call(socket, out, |connection, cx| connection.send_queued(cx));
        }
        Ok(())
    }

    /// Sets the times that are told of what is sent (`SO_TIMESTAMPING`). Numbers of bytes begin when
    /// [`Timestamping::OPT_ID`] is set first: at the oldest byte that is not acknowledged, or at the next one.
    ///
    /// # Errors
    /// [`TcpError::Invalid`] of flags that the kernel does not take, and of numbers without a connection.
    pub fn set_timestamping(
        &mut self,
        socket: TcpSocket,
        timestamping: Timestamping,
        out: &mut TcpOut<'_>,
    ) -> Result<(), TcpError> {
        let entry = self.entry(socket)?;
        let before = entry.options();
        let is_open =
            matches!(&entry.kind, Kind::Connection(connection) if !connection.is_closed());
        let is_numbered = |flags: Timestamping| flags.has(Timestamping::OPT_ID);
        let begins = is_numbered(timestamping) && !is_numbered(before.timestamping);
        if !timestamping.is_valid() || begins && !is_open {
            return Err(TcpError::Invalid);
        }
        self.set_options(socket, TcpOptions { timestamping, ..before }, out)
    }

    /// Tells a connection that its route has another MTU. A smaller one acts at once, and so does a larger one
    /// unless the path is probed: probes then show what arrives.
    ///
    /// # Errors
    /// [`TcpError::NoSocket`] if the socket is closed, [`TcpError::NotConnected`] if it is not of a connection.
    pub fn set_route_mtu(
        &mut self,
        socket: TcpSocket,
        mtu_bytes: u32,
        out: &mut TcpOut<'_>,
    ) -> Result<(), TcpError> {
        self.call(socket, out, |connection, cx| connection.change_route(mtu_bytes, cx))
    }

    /// Sends ACKs at once from now on, or lets them wait for data (`TCP_QUICKACK`). Without a
    /// connection, it is how a later one begins.
    ///
    /// # Errors
    /// [`TcpError::NoSocket`] if it is closed.
    pub fn set_quick_acks(
        &mut self,
        socket: TcpSocket,
        on: bool,
        out: &mut TcpOut<'_>,
    ) -> Result<(), TcpError> {
        match &mut self.entry_mut(socket)?.kind {
            Kind::Idle(idle) => idle.options.quick_acks = on,
            Kind::Listener(listener) => listener.options.quick_acks = on,
            Kind::Connection(_) => {
                self.call(socket, out, |connection, cx| connection.set_quick_acks(on, cx))?;
            }
        }
        Ok(())
    }

    /// True if ACKs are sent at once now; false after a reply, too.
    ///
    /// # Errors
    /// [`TcpError::NoSocket`] if the socket is closed.
    pub fn has_quick_acks(&self, socket: TcpSocket) -> Result<bool, TcpError> {
        let entry = self.entry(socket)?;
        Ok(match &entry.kind {
            Kind::Connection(connection) => connection.has_quick_acks(),
            _ => entry.options().quick_acks,
        })
    }
}

//! Calls of the application, by socket.

mod opening; // sockets, until they listen or are connected
mod data; //    bytes to and from a connection
mod options; // options of sockets
mod closing; // ends of connections and listeners

use crate::tcp::connection::{Connection, Context, Readiness, TcpInfo};
use crate::tcp::error::TcpError;
use crate::tcp::error_queue::TcpReport;
use crate::tcp::flow::Flow;
use crate::tcp::machine::{Found, Kind, Target, Tcp, TcpOut, TcpSocket};

impl Tcp {
    /// Takes the error that waits (`SO_ERROR`).
    ///
    /// # Errors
    /// [`TcpError::NoSocket`] if the socket is closed.
    pub fn take_error(&mut self, socket: TcpSocket) -> Result<Option<TcpError>, TcpError> {
        let entry = self.entry_mut(socket)?;
        Ok(match &mut entry.kind {
            Kind::Connection(connection) => {
                let error = connection.take_error();
                // Without the error it may no longer be readable: what comes next is told again.
                entry.told.replace(&connection.readiness());
                error
            }
            Kind::Idle(idle) => idle.error.take(),
            Kind::Listener(_) => None,
        })
    }

    /// Takes the oldest report of the error queue (`MSG_ERRQUEUE`); `None` if there is none. If others follow, the socket is told
    /// to be ready again.
    ///
    /// # Errors
    /// [`TcpError::NoSocket`] if the socket is closed.
    pub fn take_report(&mut self, socket: TcpSocket) -> Result<Option<TcpReport>, TcpError> {
        let entry = self.entry_mut(socket)?;
        let (report, others_follow) = match &mut entry.kind {
            Kind::Connection(connection) => {
                let report = connection.take_report();
                entry.told.replace(&connection.readiness());
                (report, connection.take_report_news())
            }
            Kind::Idle(idle) if !idle.errors.is_empty() => {
                let report = idle.errors.take();
                idle.errors.release_spare();
                (report, idle.errors.take_news())
            }
            Kind::Idle(_) | Kind::Listener(_) => (None, false),
        };
        if others_follow {
            self.ready.push(socket);
        }
        self.charge_anew(socket.index);
        Ok(report)
    }

    /// Times that reports have woken pollers of a socket so far: each is a new event, whatever waited before (`EPOLLET`).
    ///
    /// # Errors
    /// [`TcpError::NoSocket`] if the socket is closed.
    pub fn report_wakes(&self, socket: TcpSocket) -> Result<u32, TcpError> {
        Ok(match &self.entry(socket)?.kind {
            Kind::Connection(connection) => connection.report_wakes(),
            Kind::Idle(idle) => idle.errors.wakes(),
            Kind::Listener(_) => 0,
        })
    }

    /// Readiness of a socket.
    ///
    /// # Errors
    /// [`TcpError::NoSocket`] if it is closed.
    pub fn readiness(&self, socket: TcpSocket) -> Result<Readiness, TcpError> {
        Ok(match &self.entry(socket)?.kind {
            Kind::Idle(idle) => Readiness {
                readable: idle.shut.receive,
                peer_closed: idle.shut.receive,
                hung_up: true,
                writable: true,
                failed: idle.error.is_some(),
                reported: !idle.errors.is_empty(),
                ..Readiness::default()
            },
            Kind::Listener(listener) => {
                Readiness { readable: !listener.accepted.is_empty(), ..Readiness::default() }
            }
            Kind::Connection(connection) => connection.readiness(),
        })
    }

    /// State of a connection (`TCP_INFO`); `None` of other sockets.
    ///
    /// # Errors
    /// [`TcpError::NoSocket`] if it is closed.
    pub fn info(&self, socket: TcpSocket) -> Result<Option<TcpInfo>, TcpError> {
        Ok(match &self.entry(socket)?.kind {
            Kind::Connection(connection) => Some(connection.info()),
            _ => None,
        })
    }

    /// Finds out about a flow.
    #[must_use]
    pub fn find(&self, flow: &Flow) -> Option<Found> {
        match self.targets.find(flow)? {
            Target::Connection(index) => match &self.sockets.at(index)?.kind {
                Kind::Connection(connection) => Some(Found::Connection(connection.info())),
                _ => None,
            },
            Target::Request(_) => Some(Found::Handshake),
            Target::TimeWait(_) => Some(Found::TimeWait),
        }
    }

    /// Ends of a connection.
    ///
    /// # Errors
    /// [`TcpError::NotConnected`] without a connection.
    pub fn flow(&self, socket: TcpSocket) -> Result<Flow, TcpError> {
        self.connection(socket).map(Connection::flow).ok_or(TcpError::NotConnected)
    }

    fn connection(&self, socket: TcpSocket) -> Option<&Connection> {
        match &self.entry(socket).ok()?.kind {
            Kind::Connection(connection) => Some(connection),
            Kind::Idle(_) | Kind::Listener(_) => None,
        }
    }

    /// Calls a connection to read. Without one, an error that waits is told first.
    fn call_reading(
        &mut self,
        socket: TcpSocket,
        out: &mut TcpOut<'_>,
        act: impl FnOnce(&mut Connection, &mut Context<'_>) -> Result<usize, TcpError>,
    ) -> Result<usize, TcpError> {
        if let Kind::Idle(idle) = &self.entry(socket)?.kind {
            let is_shut = idle.shut.receive;
            return match self.take_error(socket)? {
                Some(error) => Err(error),
                None if is_shut => Ok(0),
                None => Err(TcpError::NotConnected),
            };
        }
        self.call(socket, out, act)?
    }

    /// Calls a connection.
    fn call<R>(
        &mut self,
        socket: TcpSocket,
        out: &mut TcpOut<'_>,
        act: impl FnOnce(&mut Connection, &mut Context<'_>) -> R,
    ) -> Result<R, TcpError> {
        self.entry_mut(socket)?;
        self.with_connection(socket.index, out, act).ok_or(TcpError::NotConnected)
    }
}

//! Listeners and connections, for observers.

use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::super::connection::TcpInfo;
use super::super::flow::Flow;
use super::levels::TcpLevels;
use super::{Kind, ListenerQueues, SocketEntry, Tcp, TcpError, TcpSocket};

/// A listener.
#[derive(Clone, Debug)]
pub struct Listening {
    /// Socket that listens.
    pub socket: TcpSocket,
    /// Address that it listens at.
    pub local: SocketAddr,
    /// Connections that may wait to be accepted, less one.
    pub backlog: u32,
    /// Queues of handshakes and connections.
    pub queues: Arc<ListenerQueues>,
}

impl ListenerQueues {
    /// Handshakes that are not complete.
    #[must_use]
    pub fn handshakes(&self) -> u32 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Connections that began with their SYN and whose SYN-ACK is not acknowledged, accepted ones among them.
    #[must_use]
    pub fn opening(&self) -> u32 {
        self.fast_open.opening()
    }

    /// Connections that wait to be accepted.
    #[must_use]
    pub fn waiting(&self) -> u32 {
        self.accepted.load(Ordering::Relaxed)
    }
}

impl Tcp {
    /// Memory of all queues, in bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }

    /// Connections in TIME-WAIT, or without owner in FIN-WAIT-2.
    #[must_use]
    pub fn time_wait_count(&self) -> u32 {
        self.time_waits.len()
    }

    /// Handshakes of listeners that are not complete.
    #[must_use]
    pub fn request_count(&self) -> u32 {
        self.requests.len()
    }

    /// Connections of listeners that began with their SYN and whose SYN-ACK is not acknowledged.
    #[must_use]
    pub fn opening_count(&self) -> usize {
        self.fast_opening.len()
    }

    /// Connections, handshakes, and connections in TIME-WAIT.
    #[must_use]
    pub fn flow_count(&self) -> usize {
        self.targets.len()
    }

    /// Connections without an owner, those in TIME-WAIT and FIN-WAIT-2 not counted.
    #[must_use]
    pub fn orphan_count(&self) -> u32 {
        self.orphans
    }

    /// Sockets, connections without an owner counted.
    #[must_use]
    pub fn socket_count(&self) -> u32 {
        self.sockets.len()
    }

    /// Socket at an [index](TcpSocket::index), if there is one.
    #[must_use]
    pub fn socket_at(&self, index: usize) -> Option<TcpSocket> {
        let index = u32::try_from(index).ok()?;
        self.sockets.at(index).map(|entry| TcpSocket { index, generation: entry.generation })
    }

    /// Sequence numbers that are not acknowledged, and bytes received and not read up to an urgent one
    /// (`SIOCOUTQ`, `SIOCINQ`); none before a connection.
    ///
    /// # Errors
    /// [`TcpError::Invalid`] of a listener, [`TcpError::NotConnected`] of a closed socket.
    pub fn queued_bytes(&self, socket: TcpSocket) -> Result<(u32, u32), TcpError> {
        match &self.entry(socket).map_err(|_| TcpError::NotConnected)?.kind {
            Kind::Connection(connection) => {
                Ok((connection.unacknowledged(), connection.received_bytes()))
            }
            Kind::Idle(_) => Ok((0, 0)),
            Kind::Listener(_) => Err(TcpError::Invalid),
        }
    }

    /// True if the next byte to read is the urgent one (`SIOCATMARK`).
    ///
    /// # Errors
    /// [`TcpError::NoSocket`] if the socket is closed.
    pub fn is_at_urgent(&self, socket: TcpSocket) -> Result<bool, TcpError> {
        Ok(match &self.entry(socket)?.kind {
            Kind::Connection(connection) => connection.is_at_urgent(),
            _ => false,
        })
    }

    /// True if all bytes before an urgent one can be read: a call that looks at bytes ends there, even one that waits for
    /// more (`tcp_recvmsg_locked`).
    ///
    /// # Errors
    /// [`TcpError::NoSocket`] if the socket is closed.
    pub fn is_urgent_behind_unread(&self, socket: TcpSocket) -> Result<bool, TcpError> {
        Ok(match &self.entry(socket)?.kind {
            Kind::Connection(connection) => connection.is_urgent_behind_unread(),
            _ => false,
        })
    }

    /// Numbers of connections by state, for any reader.
    #[must_use]
    pub fn levels(&self) -> &Arc<TcpLevels> {
        &self.levels
    }

    /// Number of slots that sockets have or had: an upper bound of [`TcpSocket::index`].
    #[must_use]
    pub fn slots(&self) -> u32 {
        self.sockets.end()
    }

    /// Connections whose sockets have these slots.
    pub fn connections(&self, slots: Range<u32>) -> impl Iterator<Item = (Flow, TcpInfo)> + '_ {
        let of_slot = |at| match self.sockets.at(at)? {
            SocketEntry { kind: Kind::Connection(connection), .. } => {
                Some((connection.flow(), connection.info()))
            }
            _ => None,
        };
        slots.filter_map(of_slot)
    }

    /// Listeners, by address.
    pub fn listening(&self) -> impl Iterator<Item = Listening> + '_ {
        let of_socket = |index| match self.sockets.at(index)? {
            SocketEntry { generation, kind: Kind::Listener(listener), .. } => Some(Listening {
                socket: TcpSocket { index, generation: *generation },
                local: listener.local,
                backlog: listener.backlog,
                queues: Arc::clone(&listener.queues),
            }),
            _ => None,
        };
        self.listeners.sockets().filter_map(of_socket)
    }
}

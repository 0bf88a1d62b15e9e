//! Sockets, until they listen or are connected.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::socket::LOCAL_PORTS;
use crate::tcp::config::TcpOptions;
use crate::tcp::connection::{Begin, Connection};
use crate::tcp::error::TcpError;
use crate::tcp::fast_open::{FastOpen, FastOpenOptions};
use crate::tcp::flow::Flow;
use crate::tcp::machine::time_wait::Continued;
use crate::tcp::machine::{
    Kind, Listener, ListenerQueues, ReusePort, SocketEntry, Target, Tcp, TcpOut, TcpSocket,
};

/// Connections that may wait to be accepted, at most (`somaxconn`).
const BACKLOG_MAX: u32 = 4096;

impl Tcp {
    /// Creates a socket.
    ///
    /// # Errors
    /// [`TcpError::NoBuffers`] beyond the limit of sockets.
    pub fn socket(&mut self) -> Result<TcpSocket, TcpError> {
        if self.sockets.len() >= self.config.max_sockets {
            return Err(TcpError::NoBuffers);
        }
        let index = self.insert(Kind::Idle(Box::default()));
        Ok(TcpSocket { index, generation: self.generation })
    }

    /// Binds a socket to a local address. Port 0 is chosen when it listens or connects.
    ///
    /// # Errors
    /// [`TcpError::Invalid`] if it is bound already, [`TcpError::AddressInUse`] if another socket
    /// listens there.
    pub fn bind(&mut self, socket: TcpSocket, local: SocketAddr) -> Result<(), TcpError> {
        self.bind_reuse_port(socket, local, None)
    }

    /// Binds a socket to a local address that others may share, too (`SO_REUSEPORT`).
    ///
    /// # Errors
    /// As [`Self::bind`]; [`TcpError::AddressInUse`] if another socket listens there and does not share it.
    pub fn bind_reuse_port(
        &mut self,
        socket: TcpSocket,
        local: SocketAddr,
        reuse_port: Option<ReusePort>,
    ) -> Result<(), TcpError> {
        let is_in_use = local.port() != 0 && self.listeners.has_conflict(local, reuse_port);
        match &mut self.entry_mut(socket)?.kind {
            Kind::Idle(idle) if idle.bound.is_none() => {
                if is_in_use {
                    return Err(TcpError::AddressInUse);
                }
                (idle.bound, idle.reuse_port) = (Some(local), reuse_port);
            }
            _ => return Err(TcpError::Invalid),
        }
        Ok(())
    }

    /// True if a socket listens at this address, or at one that it overlaps with.
    #[must_use]
    pub fn has_listener_at(&self, address: SocketAddr) -> bool {
        self.listeners.has_conflict(address, None)
    }

    /// Lets a bound socket listen, with at most `backlog` connections that wait to be accepted. A
    /// socket that listens gets the new backlog.
    ///
    /// # Errors
    /// [`TcpError::Invalid`] of a connected or unbound socket, [`TcpError::AddressInUse`] if another
    /// one listens there.
    pub fn listen(&mut self, socket: TcpSocket, backlog: u32) -> Result<(), TcpError> {
        self.listen_with_queues(socket, backlog, Arc::default())
    }

    /// Lets a bound socket listen, as one of several in as many TCPs: `queues`, which they share, are bounded
    /// together.
    ///
    /// # Errors
    /// As [`Self::listen`].
    pub fn listen_with_queues(
        &mut self,
        socket: TcpSocket,
        backlog: u32,
        queues: Arc<ListenerQueues>,
    ) -> Result<(), TcpError> {
        let backlog = backlog.min(BACKLOG_MAX);
        let (local, options, mut fast_open, reuse_port) = match &mut self.entry_mut(socket)?.kind {
            Kind::Listener(listener) => {
                listener.backlog = backlog;
                return Ok(());
            }
            Kind::Idle(idle) => match idle.bound {
                Some(local) if local.port() != 0 => {
                    (local, idle.options, idle.fast_open, idle.reuse_port)
                }
                _ => return Err(TcpError::Invalid),
            },
            Kind::Connection(_) => return Err(TcpError::Invalid),
        };
        if self.listeners.has_conflict(local, reuse_port) {
            return Err(TcpError::AddressInUse);
        }
        self.listeners.insert(local, socket.index, reuse_port);
        if fast_open.queue == 0
            && self.config.fast_open.has(FastOpen::SERVER.with(FastOpen::ALL_LISTENERS))
        {
            fast_open.queue = backlog;
        }
        let accepted = VecDeque::new();
        // As the kernel: the mode of ACKs begins anew (`inet_csk_listen_start`).
        let options = TcpOptions { quick_acks: TcpOptions::DEFAULT.quick_acks, ..options };
        let listener =
            Listener { options, fast_open, local, reuse_port, backlog, accepted, queues };
        self.entry_mut(socket)?.kind = Kind::Listener(Box::new(listener));
        Ok(())
    }

    /// Takes a connection that waits to be accepted, and its peer.
    ///
    /// # Errors
    /// [`TcpError::WouldBlock`] if none waits, [`TcpError::Invalid`] if the socket does not listen.
    pub fn accept(&mut self, socket: TcpSocket) -> Result<(TcpSocket, SocketAddr), TcpError> {
        self.accept_at(socket, 0)
    }

    /// Takes the connection at a place of the queue.
    pub(in super::super) fn accept_at(
        &mut self,
        socket: TcpSocket,
        place: usize,
    ) -> Result<(TcpSocket, SocketAddr), TcpError> {
        let Kind::Listener(listener) = &mut self.entry_mut(socket)?.kind else {
            return Err(TcpError::Invalid);
        };
        let index = listener.accepted.remove(place).ok_or(TcpError::WouldBlock)?;
        listener.queues.accepted.fetch_sub(1, Ordering::Relaxed);
        let is_empty = listener.accepted.is_empty();
        self.entry_mut(socket)?.told.set_readable(!is_empty);
        match self.sockets.at_mut(index) {
            Some(SocketEntry { generation, kind: Kind::Connection(connection), .. }) => {
                connection.note_accepted();
                Ok((TcpSocket { index, generation: *generation }, connection.flow().theirs))
            }
            _ => Err(TcpError::WouldBlock),
        }
    }

    /// Opens a connection from `local`, whose port may be 0, over a path of `mtu_bytes`. Called again
    /// when the socket is ready, it returns the outcome; after a failure, the next call tries anew.
    ///
    /// # Errors
    /// [`TcpError::InProgress`] of the first call, which is the normal answer;
    /// [`TcpError::Already`] as long as the connection is being opened; [`TcpError::NoPort`] if another connection has the
    /// ends that the socket is bound to, [`TcpError::AddressInUse`] those of `local`; else the reason.
    pub fn connect(
        &mut self,
        socket: TcpSocket,
        (local, peer): (SocketAddr, SocketAddr),
        mtu_bytes: u32,
        out: &mut TcpOut<'_>,
    ) -> Result<(), TcpError> {
        match &self.entry(socket)?.kind {
            Kind::Idle(_) => {}
            Kind::Listener(_) => return Err(TcpError::IsConnected),
            Kind::Connection(_) => return self.connect_outcome(socket, out),
        }
        let fast_open = self.open(socket, (local, peer), mtu_bytes, out)?;
        self.begin(socket, fast_open, out)
    }

    /// Outcome of the first `connect`, as a second one returns it. After a failure, the socket may connect anew.
    pub(in super::super) fn connect_outcome(
        &mut self,
        socket: TcpSocket,
        out: &mut TcpOut<'_>,
    ) -> Result<(), TcpError> {
        let Kind::Connection(connection) = &mut self.entry_mut(socket)?.kind else {
            return Err(TcpError::NotConnected);
        };
        let outcome = connection.connect_again();
        if connection.has_failed_to_open() {
            self.forget_attempt(socket.index, out);
        }
        outcome
    }

    /// Makes a socket a connection, whose SYN is not sent. Returns the socket's Fast Open.
    pub(in super::super) fn open(
        &mut self,
        socket: TcpSocket,
        (local, peer): (SocketAddr, SocketAddr),
        mtu_bytes: u32,
        out: &mut TcpOut<'_>,
    ) -> Result<FastOpenOptions, TcpError> {
        let (options, bound, fast_open) = match &self.entry(socket)?.kind {
            Kind::Idle(idle) => (idle.options, idle.bound, idle.fast_open),
            _ => return Err(TcpError::IsConnected),
        };
        let local = match bound {
            Some(bound) if bound.ip().is_unspecified() => SocketAddr::new(local.ip(), bound.port()),
            Some(bound) => bound,
            None => local,
        };
        let is_chosen = bound.is_some_and(|bound| bound.port() != 0);
        let (flow, continued) = match is_chosen {
            true => self.chosen_flow(Flow { ours: local, theirs: peer })?,
            false => (self.free_flow(local, peer)?, None),
        };
        let fresh = || self.secret.initial_sequence(&flow, out.now_us);
        let begin = Begin {
            flow,
            options,
            sequence: continued.map_or_else(fresh, |continued| continued.sequence),
            timestamp_offset: self.secret.timestamp_offset(&flow),
            mtu_bytes,
            now_us: out.now_us,
        };
        let recent = continued.map_or(0, |continued| continued.timestamp);
        let mut connection = {
            let mut cx = self.context(self.pressure(), out);
            Connection::connect(&begin, recent, &mut cx)
        };
        let entry = self.entry_mut(socket)?;
        if let Kind::Idle(idle) = &mut entry.kind {
            connection.keep_errors(std::mem::take(&mut idle.errors));
            connection.keep_shut(idle.shut);
        }
        if let Kind::Idle(idle) =
            std::mem::replace(&mut entry.kind, Kind::Connection(Box::new(connection)))
        {
            entry.before = Some(idle).filter(|idle| idle.has_more_than_options());
        }
        self.targets.insert(&flow, Target::Connection(socket.index));
        Ok(fast_open)
    }

    /// After the failure was told, the socket may connect anew.
    pub(super) fn forget_attempt(&mut self, index: u32, out: &mut TcpOut<'_>) {
        let Some(entry) = self.sockets.at_mut(index) else { return };
        let Kind::Connection(connection) = &mut entry.kind else { return };
        connection.free(out.pool);
        let options = connection.options.get();
        let mut idle = entry.before.take().unwrap_or_default();
        (idle.options, idle.error) = (options, None);
        idle.errors = connection.take_errors();
        idle.reset_connection_options();
        entry.kind = Kind::Idle(idle);
        self.charge_anew(index);
    }

    /// Flow whose port the application has bound. One in TIME-WAIT with timestamps is continued, so that the peer can tell
    /// old segments from new ones (`tcp_twsk_unique`).
    fn chosen_flow(&mut self, flow: Flow) -> Result<(Flow, Option<Continued>), TcpError> {
        match self.targets.find(&flow) {
            None => Ok((flow, None)),
            Some(Target::TimeWait(at)) => match self.continue_time_wait(at) {
                Some(continued) => Ok((flow, Some(continued))),
                None => Err(TcpError::NoPort),
            },
            Some(_) => Err(TcpError::NoPort),
        }
    }

    /// Flow that no connection has, not in TIME-WAIT either, with a local port of its own (RFC 6056, algorithm 4).
    fn free_flow(&mut self, local: SocketAddr, theirs: SocketAddr) -> Result<Flow, TcpError> {
        let flow = |port| Flow { ours: SocketAddr::new(local.ip(), port), theirs };
        if local.port() != 0 {
            let flow = flow(local.port());
            return match self.targets.find(&flow) {
                None => Ok(flow),
                Some(_) => Err(TcpError::AddressInUse),
            };
        }
        let count = u32::from(LOCAL_PORTS.end() - LOCAL_PORTS.start()) + 1;
        let offset = self.secret.port_offset(&flow(0));
        for _ in 0..count {
            let step = offset.wrapping_add(self.port_steps) % count;
            self.port_steps = self.port_steps.wrapping_add(1);
            let port = LOCAL_PORTS.start() + u16::try_from(step).unwrap_or(0);
            if self.targets.find(&flow(port)).is_none() && !self.listeners.has(flow(port).ours) {
                return Ok(flow(port));
            }
        }
        Err(TcpError::NoPort)
    }
}

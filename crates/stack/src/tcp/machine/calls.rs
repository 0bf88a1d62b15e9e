//! Calls of the application, by socket.

use std::collections::VecDeque;
use std::net::{Shutdown, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::super::config::TcpOptions;
use super::super::connection::{
    Begin, Connection, Context, ReadMode, Readiness, State, TcpInfo, WriteFlags,
};
use super::super::error::TcpError;
use super::super::fast_open::{FastOpen, FastOpenOptions};
use super::super::flow::Flow;
use super::super::memory::Charge;
use super::super::seq::len_u32;
use super::{
    Found, Idle, Kind, Listener, ListenerQueues, ReusePort, SocketEntry, Target, Tcp, TcpOut,
    TcpSocket,
};
use crate::socket::LOCAL_PORTS;

/// Bytes that each connection may have to send whatever the memory of others (least of `tcp_wmem`).
const SENT_BYTES_MIN: u32 = 4096;
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
    pub fn is_listened(&self, address: SocketAddr) -> bool {
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
    pub(super) fn accept_at(
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
    /// [`TcpError::Already`] as long as the connection is being opened; else the reason.
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
    pub(super) fn connect_outcome(
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
    pub(super) fn open(
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
        let flow = self.free_flow(local, peer)?;
        let begin = Begin {
            flow,
            options,
            sequence: self.secret.initial_sequence(&flow, out.now_us),
            timestamp_offset: self.secret.timestamp_offset(&flow),
            mtu_bytes,
            now_us: out.now_us,
        };
        let connection = {
            let mut cx = self.context(self.pressure(), out);
            Connection::connect(&begin, &mut cx)
        };
        let entry = self.entry_mut(socket)?;
        if let Kind::Idle(idle) =
            std::mem::replace(&mut entry.kind, Kind::Connection(Box::new(connection)))
        {
            entry.before = Some(idle).filter(|idle| idle.has_more_than_options());
        }
        self.targets.insert(&flow, Target::Connection(socket.index));
        Ok(fast_open)
    }

    /// After the failure was told, the socket may connect anew.
    fn forget_attempt(&mut self, index: u32, out: &mut TcpOut<'_>) {
        let Some(entry) = self.sockets.at_mut(index) else { return };
        let Kind::Connection(connection) = &mut entry.kind else { return };
        connection.free(out.pool);
        let options = connection.options.get();
        let mut idle = entry.before.take().unwrap_or_default();
        *idle = Idle { options, error: None, ..*idle };
        idle.forget_passing_options();
        entry.kind = Kind::Idle(idle);
        let charge = std::mem::take(&mut entry.charge);
        self.memory_bytes -= charge.bytes();
        self.memory.replace(charge, Charge::default());
    }

    /// Flow that no connection has, with a local port of its own (RFC 6056, algorithm 4). One in
    /// TIME-WAIT is used again only if the caller chose the port.
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
    /// [`TcpError::Invalid`] without one, [`TcpError::WouldBlock`] if it has not come yet.
    pub fn read_urgent(
        &mut self,
        socket: TcpSocket,
        mode: ReadMode,
        out: &mut TcpOut<'_>,
    ) -> Result<Option<u8>, TcpError> {
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
                self.send_syn(socket, bytes, false, out)
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

    /// Sends what Nagle's rule or [`TcpOptions::cork`] holds back.
    ///
    /// # Errors
    /// [`TcpError::NotConnected`] without a connection.
    pub fn push(&mut self, socket: TcpSocket, out: &mut TcpOut<'_>) -> Result<(), TcpError> {
        self.call(socket, out, |connection, cx| connection.push(cx))
    }

    /// Closes directions (`shutdown`).
    ///
    /// # Errors
    /// [`TcpError::NotConnected`] without a connection.
    pub fn shutdown(
        &mut self,
        socket: TcpSocket,
        how: Shutdown,
        out: &mut TcpOut<'_>,
    ) -> Result<(), TcpError> {
        match &self.entry(socket)?.kind {
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
            Kind::Idle(idle) => idle.forget_passing_options(),
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
        let mut idle = Idle { options, fast_open, bound: Some(local), reuse_port, error: None };
        idle.forget_passing_options();
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

    /// Lets the receive buffer hold as many bytes as a reader waits for (`SO_RCVLOWAT`), unless its size is fixed.
    ///
    /// # Errors
    /// [`TcpError::NotConnected`] of a socket without a connection.
    pub fn fit_low_water(
        &mut self,
        socket: TcpSocket,
        len_bytes: u32,
        out: &mut TcpOut<'_>,
    ) -> Result<(), TcpError> {
        self.call(socket, out, |connection, cx| connection.fit_low_water(len_bytes, cx))
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

    /// Takes the error that waits (`SO_ERROR`).
    ///
    /// # Errors
    /// [`TcpError::NoSocket`] if the socket is closed.
    pub fn take_error(&mut self, socket: TcpSocket) -> Result<Option<TcpError>, TcpError> {
        Ok(match &mut self.entry_mut(socket)?.kind {
            Kind::Connection(connection) => connection.take_error(),
            Kind::Idle(idle) => idle.error.take(),
            Kind::Listener(_) => None,
        })
    }

    /// Readiness of a socket.
    ///
    /// # Errors
    /// [`TcpError::NoSocket`] if it is closed.
    pub fn readiness(&self, socket: TcpSocket) -> Result<Readiness, TcpError> {
        Ok(match &self.entry(socket)?.kind {
            Kind::Idle(idle) => Readiness {
                hung_up: true,
                writable: true,
                failed: idle.error.is_some(),
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
        act: impl FnOnce(&mut Connection, &mut super::Context<'_>) -> Result<usize, TcpError>,
    ) -> Result<usize, TcpError> {
        if matches!(self.entry_mut(socket)?.kind, Kind::Idle(_))
            && let Some(error) = self.take_error(socket)?
        {
            return Err(error);
        }
        self.call(socket, out, act)?
    }

    /// Calls a connection.
    fn call<R>(
        &mut self,
        socket: TcpSocket,
        out: &mut TcpOut<'_>,
        act: impl FnOnce(&mut Connection, &mut super::Context<'_>) -> R,
    ) -> Result<R, TcpError> {
        self.entry_mut(socket)?;
        self.with_connection(socket.index, out, act).ok_or(TcpError::NotConnected)
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
    let is_urgent = flags.is_urgent && taken.len() == bytes.len();
    let written = connection.write(taken, WriteFlags { is_urgent, ..flags }, cx)?;
    if written == 0 && !bytes.is_empty() { Err(TcpError::WouldBlock) } else { Ok(written) }
}

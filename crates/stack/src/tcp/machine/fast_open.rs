//! Connections that begin with their SYN: which ones, and how many of a listener (`tcp_try_fastopen`).

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use forebay_rx::packet::Packet;

use super::super::connection::{Connection, FastConnect, WriteFlags};
use super::super::error::TcpError;
use super::super::fast_open::{
    CookieMatch, CookieOption, FastOpen, FastOpenCache, FastOpenKeys, FastOpenOptions, Refused,
    Server, clock_second,
};
use super::super::flow::Flow;
use super::super::wire::Segment;
use super::request::Request;
use super::{Kind, ListenerQueues, SocketEntry, Target, Tcp, TcpOut, TcpSocket};

/// Time for which a connection that was reset counts in its listener's queue, in s: in seconds of the clock, so up to one
/// more.
const RESET_COUNTS_S: u32 = 60;
/// Seconds that are told apart.
const SECONDS: usize = 64;
/// Largest queue (`somaxconn`).
const QUEUE_MAX: u32 = 4096;

/// Queue of a listener for connections that begin with their SYN (`fastopen_queue`): the places that are taken.
/// Several TCPs share it without waiting for each other.
#[derive(Debug)]
pub(super) struct FastOpenQueue {
    /// Connections whose SYN-ACK is not acknowledged.
    opening: AtomicU32,
    /// Connections that were reset once the application had them, by second: its number in the upper half, and how many.
    resets: [AtomicU64; SECONDS],
}

impl Default for FastOpenQueue {
    fn default() -> Self {
        Self { opening: AtomicU32::new(0), resets: [const { AtomicU64::new(0) }; SECONDS] }
    }
}

impl FastOpenQueue {
    /// Takes one of `limit` places. Returns false if there is none.
    fn take_place(&self, limit: u32, now_us: u64) -> bool {
        let resets = self.resets(now_us);
        let taken = self.opening.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |opening| {
            (opening.saturating_add(resets) < limit).then_some(opening + 1)
        });
        taken.is_ok()
    }

    /// Gives a place back: of a connection that was reset at `reset_us`, a minute later.
    fn give_back(&self, reset_us: Option<u64>) {
        if let Some(at_us) = reset_us {
            let second = clock_second(at_us);
            let at = &self.resets[second as usize % SECONDS];
            // The word of a second that is long over is begun anew.
            let _ = at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |word| {
                let (of, count) = parts_of(word);
                let count = if of == second { count.saturating_add(1) } else { 1 };
                Some(u64::from(second) << 32 | u64::from(count))
            });
        }
        let before = self.opening.fetch_sub(1, Ordering::Relaxed);
        debug_assert!(before > 0, "a place is given back once");
    }

    /// Connections whose SYN-ACK is not acknowledged.
    pub(super) fn opening(&self) -> u32 {
        self.opening.load(Ordering::Relaxed)
    }

    /// Connections that were reset in the last minute.
    fn resets(&self, now_us: u64) -> u32 {
        let now = clock_second(now_us);
        let words = self.resets.iter().map(|word| parts_of(word.load(Ordering::Relaxed)));
        words
            .filter(|(of, _)| now.wrapping_sub(*of) <= RESET_COUNTS_S)
            .map(|(_, count)| count)
            .sum()
    }
}

/// Second and count of a word.
fn parts_of(word: u64) -> (u32, u32) {
    let [c0, c1, c2, c3, s0, s1, s2, s3] = word.to_le_bytes();
    (u32::from_le_bytes([s0, s1, s2, s3]), u32::from_le_bytes([c0, c1, c2, c3]))
}

/// Beginning of a listener's connection, after its handshake or with its SYN, and the option of the SYN-ACK.
#[derive(Clone, Copy, Debug)]
pub(super) enum FastOpening {
    Handshake(Option<CookieOption>),
    WithSyn(Option<CookieOption>),
}

impl Tcp {
    /// Sets the keys of Fast Open cookies. By default, there is one, by the secret.
    pub fn set_fast_open_keys(&mut self, keys: FastOpenKeys) {
        self.fast_open_keys = keys;
    }

    /// Sets Fast Open of a socket. Its queue is that of a listener, bounded by 4,096.
    ///
    /// # Errors
    /// [`TcpError::NoSocket`] if it is closed, [`TcpError::Invalid`] of a connection, [`TcpError::Unsupported`] if its SYN
    /// shall wait for data and clients have no Fast Open.
    pub fn set_fast_open(
        &mut self,
        socket: TcpSocket,
        options: FastOpenOptions,
    ) -> Result<(), TcpError> {
        if options.waits_for_data && !self.config.fast_open.has(FastOpen::CLIENT) {
            return Err(TcpError::Unsupported);
        }
        let options = FastOpenOptions { queue: options.queue.min(QUEUE_MAX), ..options };
        match &mut self.entry_mut(socket)?.kind {
            Kind::Idle(idle) => idle.fast_open = options,
            Kind::Listener(listener) => listener.fast_open = options,
            Kind::Connection(_) => return Err(TcpError::Invalid),
        }
        Ok(())
    }

    /// Fast Open of a socket; of a connection, as it was set before.
    ///
    /// # Errors
    /// [`TcpError::NoSocket`] if it is closed.
    pub fn fast_open(&self, socket: TcpSocket) -> Result<FastOpenOptions, TcpError> {
        let entry = self.entry(socket)?;
        Ok(match &entry.kind {
            Kind::Idle(idle) => idle.fast_open,
            Kind::Listener(listener) => listener.fast_open,
            Kind::Connection(_) => {
                entry.before.as_ref().map_or_else(Default::default, |idle| idle.fast_open)
            }
        })
    }

    /// Keys of a socket's cookies.
    ///
    /// # Errors
    /// [`TcpError::NoSocket`] if it is closed.
    pub fn fast_open_keys(&self, socket: TcpSocket) -> Result<FastOpenKeys, TcpError> {
        Ok(self.fast_open(socket)?.keys.unwrap_or(self.fast_open_keys))
    }

    /// Shares the cookies of servers with other TCPs.
    pub fn share_fast_open(&mut self, cache: Arc<FastOpenCache>) {
        self.fast_open_cache = cache;
    }

    /// Opens a connection as [`Self::connect`], with data in the SYN if the server's cookie is known; else the SYN asks
    /// for one (`MSG_FASTOPEN`). Returns the number of bytes that left with the SYN. Once the connection is open, this is a write.
    ///
    /// # Errors
    /// [`TcpError::InProgress`] if the SYN has no data, [`TcpError::Already`] as long as the connection is being opened,
    /// [`TcpError::IsConnected`] of a second call after that, [`TcpError::Unsupported`] if clients have no Fast Open.
    pub fn connect_with_data(
        &mut self,
        socket: TcpSocket,
        ends: (SocketAddr, SocketAddr),
        mtu_bytes: u32,
        bytes: &[u8],
        flags: WriteFlags,
        out: &mut TcpOut<'_>,
    ) -> Result<usize, TcpError> {
        if !self.config.fast_open.has(FastOpen::CLIENT) {
            return Err(TcpError::Unsupported);
        }
        match &self.entry(socket)?.kind {
            Kind::Idle(_) => {
                let fast_open = self.open(socket, ends, mtu_bytes, out)?;
                self.inherit_no_cookie(socket, fast_open);
            }
            Kind::Listener(_) => return Err(TcpError::IsConnected),
            Kind::Connection(connection) if connection.waits_for_data() => {}
            Kind::Connection(_) => {
                self.connect_outcome(socket, out)?;
                return self.write(socket, bytes, flags, out);
            }
        }
        self.send_syn(socket, bytes, flags, out)
    }

    /// True of a connection whose SYN is sent with the first data.
    ///
    /// # Errors
    /// [`TcpError::NoSocket`] if it is closed.
    pub fn waits_for_data(&self, socket: TcpSocket) -> Result<bool, TcpError> {
        let entry = self.entry(socket)?;
        Ok(matches!(&entry.kind, Kind::Connection(connection) if connection.waits_for_data()))
    }

    /// Sends the SYN of a new connection, or lets it wait for data.
    pub(super) fn begin(
        &mut self,
        socket: TcpSocket,
        fast_open: FastOpenOptions,
        out: &mut TcpOut<'_>,
    ) -> Result<(), TcpError> {
        let has_fast_open = fast_open.waits_for_data && self.config.fast_open.has(FastOpen::CLIENT);
        let fast = match self.flow(socket) {
            Ok(flow) if has_fast_open => self.offer(&flow, fast_open.no_cookie, out.now_us),
            _ => FastConnect::default(),
        };
        if fast.takes_data {
            self.inherit_no_cookie(socket, fast_open);
            self.follow(socket.index, out);
            return Ok(());
        }
        self.with_connection(socket.index, out, |connection, cx| connection.send_syn(&fast, cx));
        Err(TcpError::InProgress)
    }

    /// Lets data go with the connection's SYN without a cookie, if the socket was set so before it connected.
    fn inherit_no_cookie(&mut self, socket: TcpSocket, fast_open: FastOpenOptions) {
        if fast_open.no_cookie
            && let Ok(SocketEntry { kind: Kind::Connection(connection), .. }) =
                self.entry_mut(socket)
        {
            connection.allow_no_cookie();
        }
    }

    /// Sends the SYN of a connection, with as many bytes as fit. Returns their number.
    pub(super) fn send_syn(
        &mut self,
        socket: TcpSocket,
        bytes: &[u8],
        flags: WriteFlags,
        out: &mut TcpOut<'_>,
    ) -> Result<usize, TcpError> {
        let SocketEntry { kind: Kind::Connection(connection), .. } = self.entry(socket)? else {
            return Err(TcpError::NotConnected);
        };
        let offer = self.offer(&connection.flow(), connection.needs_no_cookie(), out.now_us);
        let fast = FastConnect { bytes, flags, ..offer };
        let sent = self
            .with_connection(socket.index, out, |connection, cx| connection.send_syn(&fast, cx))
            .unwrap_or(0);
        if sent > 0 { Ok(sent) } else { Err(TcpError::InProgress) }
    }

    /// Fast Open of a SYN to the server of a flow (`tcp_fastopen_cookie_check`).
    fn offer(&self, flow: &Flow, no_cookie: bool, now_us: u64) -> FastConnect<'static> {
        let (cache, config) = (&self.fast_open_cache, &self.config);
        let Server { mss, cookie, refused, .. } = cache.find(flow).unwrap_or_default();
        let fast = FastConnect { mss, ..FastConnect::default() };
        if cache.pauses(config.fast_open_blackhole_timeout_us, now_us) {
            return fast;
        }
        if no_cookie || config.fast_open.has(FastOpen::CLIENT_NO_COOKIE) {
            return FastConnect { takes_data: true, ..fast };
        }
        let is_experimental = refused == Refused::Standard;
        let request = CookieOption { is_experimental, ..CookieOption::STANDARD_REQUEST };
        FastConnect { takes_data: cookie.is_some(), option: cookie.or(Some(request)), ..fast }
    }

    /// Decides if a connection begins with its SYN.
    pub(super) fn judge_fast_open(
        &mut self,
        listener: u32,
        request: &Request,
        packet: Option<&Packet>,
        segment: &Segment,
        now_us: u64,
    ) -> FastOpening {
        let allowed = self.config.fast_open;
        let none = FastOpening::Handshake(None);
        let Some(packet) = packet else { return none };
        let offer = Segment::fast_open_of(packet);
        if offer.is_some_and(|offer| offer.cookie.is_request()) {
            self.counters.fast_open_cookie_reqd.add(1);
        }
        if !allowed.has(FastOpen::SERVER) {
            return none;
        }
        let is_asked = segment.payload_len > 0 || offer.is_some();
        let Some((options, queues)) = is_asked.then(|| self.fast_open_of(listener)).flatten()
        else {
            return none;
        };
        if !queues.fast_open.take_place(options.queue, now_us) {
            self.counters.fast_open_listen_overflow.add(1);
            return none;
        }
        let opening = self.judge_offer(&options, offer, request);
        if matches!(opening, FastOpening::Handshake(_)) {
            queues.fast_open.give_back(None);
        }
        opening
    }

    fn judge_offer(
        &self,
        options: &FastOpenOptions,
        offer: Option<CookieOption>,
        request: &Request,
    ) -> FastOpening {
        if options.no_cookie || self.config.fast_open.has(FastOpen::SERVER_NO_COOKIE) {
            self.counters.fast_open_passive.add(1);
            return FastOpening::WithSyn(None);
        }
        let Some(CookieOption { cookie, is_experimental }) = offer else {
            return FastOpening::Handshake(None);
        };
        let keys = options.keys.unwrap_or(self.fast_open_keys);
        let (client, server) = (request.flow.theirs.ip(), request.flow.ours.ip());
        let valid = CookieOption { cookie: keys.cookie(client, server), is_experimental };
        if cookie.is_request() {
            return FastOpening::Handshake(Some(valid));
        }
        self.judge_cookie(keys.check(&cookie, client, server), valid)
    }

    fn judge_cookie(&self, found: CookieMatch, valid: CookieOption) -> FastOpening {
        match found {
            CookieMatch::Primary => {
                self.counters.fast_open_passive.add(1);
                FastOpening::WithSyn(None)
            }
            CookieMatch::Backup => {
                self.counters.fast_open_passive_alt_key.add(1);
                self.counters.fast_open_passive.add(1);
                FastOpening::WithSyn(Some(valid))
            }
            CookieMatch::Neither => {
                self.counters.fast_open_passive_fail.add(1);
                FastOpening::Handshake(Some(valid))
            }
        }
    }

    /// Options and queues of a listener with a queue for connections that begin with their SYN.
    fn fast_open_of(&self, index: u32) -> Option<(FastOpenOptions, Arc<ListenerQueues>)> {
        match self.sockets.at(index) {
            Some(SocketEntry { kind: Kind::Listener(listener), .. })
                if listener.fast_open.queue > 0 =>
            {
                Some((listener.fast_open, Arc::clone(&listener.queues)))
            }
            _ => None,
        }
    }

    /// Creates a listener's connection that begins with its SYN: the application may accept it before the handshake is
    /// over.
    pub(super) fn accept_fast_open(
        &mut self,
        request: &Request,
        packet: Packet,
        segment: &Segment,
        cookie: Option<&CookieOption>,
        out: &mut TcpOut<'_>,
    ) {
        let listener = request.listener;
        let queues = self.fast_open_of(listener.index).map(|(_, queues)| queues);
        let (Some(options), Some(queues)) = (self.options_of(request), &queues) else {
            queues.iter().for_each(|queues| queues.fast_open.give_back(None));
            out.pool.put(packet.frame);
            return self.forget_flow(&request.flow);
        };
        let (begin, accepted) = (request.begin(options, out.now_us), request.accepted(out.now_us));
        let connection = {
            let mut cx = self.context(self.pressure(), out);
            Connection::accept_fast_open(&begin, &accepted, packet, segment, cookie, &mut cx)
        };
        let index = self.insert(Kind::Connection(Box::new(connection)));
        self.targets.insert(&request.flow, Target::Connection(index));
        if let Ok(SocketEntry { kind: Kind::Listener(waiting), .. }) = self.entry_mut(listener) {
            waiting.accepted.push_back(index);
        }
        queues.accepted.fetch_add(1, Ordering::Relaxed);
        self.fast_opening.insert(index, Arc::clone(queues));
        self.follow(index, out);
        self.notify_listener(listener.index);
    }

    /// A connection that began with its SYN is open, or over (`reqsk_fastopen_remove`). One that was reset after the
    /// application had it counts on for a while: its SYN may have come from another address, whose host resets what it does
    /// not know.
    pub(super) fn end_fast_opening(&mut self, index: u32, reset_us: Option<u64>) {
        if let Some(queues) = self.fast_opening.remove(&index) {
            queues.fast_open.give_back(reset_us);
        }
    }
}

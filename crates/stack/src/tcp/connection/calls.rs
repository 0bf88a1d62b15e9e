//! The application's calls.

use std::net::Shutdown;

use super::super::config::{TIME_WAIT_US, TcpOptions};
use super::super::error::TcpError;
use super::super::seq::Seq;
use super::busy_time::Sending;
use super::fast_open::Opening;
use super::options::ConnectionOptions;
use super::{Connection, Context, Shut, State, Substate};

/// Readiness of a socket.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Readiness {
    /// A read returns as many bytes as were asked for or as there is room for, the end of the stream or an error.
    pub readable: bool,
    /// A write takes bytes or returns an error; a connection being opened is open, or failed.
    pub writable: bool,
    /// The peer closed its side (`EPOLLRDHUP`).
    pub peer_closed: bool,
    /// Both sides are closed (`EPOLLHUP`).
    pub hung_up: bool,
    /// An error waits (`EPOLLERR`).
    pub failed: bool,
    /// An urgent byte waits (`EPOLLPRI`).
    pub urgent: bool,
    /// A report waits in the error queue, which is no error of the connection (`EPOLLERR`).
    pub reported: bool,
}

/// Fate of the bytes that a read returns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReadMode {
    /// Removed from the queue.
    Take,
    /// Left there for the next read (`MSG_PEEK`).
    Peek,
}

impl Connection {
    /// Readiness, as `tcp_poll` tells it.
    pub(in crate::tcp) fn readiness(&self) -> Readiness {
        // Of Fast Open, data may be written before the handshake, or begin it.
        let is_opening = matches!(self.state, State::SynSent | State::SynReceived)
            && !self.opening.has(Opening::AWAITS_ACK.with(Opening::WAITS_FOR_DATA));
        let both = self.shut.receive && self.shut.send;
        let has_room = self.is_writable();
        Readiness {
            readable: self.has_enough_to_read() || self.shut.receive || self.error.is_some(),
            writable: !is_opening && (has_room || self.shut.send) || self.error.is_some(),
            peer_closed: self.shut.receive,
            hung_up: both || self.state == State::Closed,
            failed: self.error.is_some(),
            urgent: self.has_urgent_byte(),
            reported: !self.errors.is_empty(),
        }
    }

    /// Bytes that a read can return now.
    pub(in crate::tcp) fn readable_bytes(&self) -> u32 {
        let len = self.receive.queue.len_bytes();
        let alone = self.is_at_urgent();
        if alone && !self.options.oob_inline { len.saturating_sub(1) } else { len }
    }

    /// True if there is what a reader waits for, or no room for that: the buffer is nearly full, or its window takes no more
    /// than a segment (`tcp_epollin_ready`).
    fn has_enough_to_read(&self) -> bool {
        let (readable, buffer) = (self.readable_bytes(), self.receive.buffer.bytes());
        let is_full = || {
            self.receive.queue.truesize() > buffer - buffer / 8
                || self.usable_window() <= self.delayed.segment_bytes()
        };
        readable > 0 && (readable >= self.options.rare.low_water_bytes || is_full())
    }

    /// Goes on with the directions that its socket has shut down.
    pub(in crate::tcp) fn keep_shut(&mut self, shut: Shut) {
        self.shut = shut;
    }

    /// Takes the error that waits, or else that of the path (`SO_ERROR`).
    pub(in crate::tcp) fn take_error(&mut self) -> Option<TcpError> {
        self.error.take().or_else(|| self.soft_error.take())
    }

    /// Answer to a second `connect`: the outcome of the first, once.
    pub(in crate::tcp) fn connect_again(&mut self) -> Result<(), TcpError> {
        match self.state {
            _ if !self.opening.has(Opening::CONNECTING) => Err(TcpError::IsConnected),
            State::SynSent if self.waits_for_data() => Err(TcpError::IsConnected),
            State::SynSent | State::SynReceived => Err(TcpError::Already),
            State::Closed => Err(self.error.take().unwrap_or(TcpError::Aborted)),
            _ => {
                self.opening.forget(Opening::CONNECTING);
                Ok(())
            }
        }
    }

    /// True of a connection that was never open.
    pub(in crate::tcp) fn has_failed_to_open(&self) -> bool {
        self.opening.has(Opening::CONNECTING) && self.state == State::Closed
    }

    /// Bytes to read, in the frame that they came in; empty if there are none in order.
    pub(in crate::tcp) fn fill(&self) -> &[u8] {
        let bytes = self.receive.queue.first();
        match self.urgent_seq() {
            Some(urgent) if !self.options.oob_inline => {
                let before = urgent.bytes_since(self.read_seq()) as usize;
                bytes.get(..before.min(bytes.len())).unwrap_or_default()
            }
            _ => bytes,
        }
    }

    /// Copies bytes to read. 0 is the end of the stream.
    pub(in crate::tcp) fn read(
        &mut self,
        room: &mut [u8],
        mode: ReadMode,
        cx: &mut Context<'_>,
    ) -> Result<usize, TcpError> {
        let passed = match mode {
            ReadMode::Take => {
                self.skip_urgent(cx);
                0
            }
            // A look passes the urgent byte, and leaves it.
            ReadMode::Peek => usize::from(self.is_urgent_next()),
        };
        let before_urgent = match self.urgent_seq() {
            // A byte that stays in the stream is read with those behind it.
            Some(urgent) if urgent.is_after(self.read_seq()) => (urgent - self.read_seq()) as usize,
            _ => usize::MAX,
        };
        let len = room.len().min(before_urgent);
        let copied = self.receive.queue.peek(passed, &mut room[..len]);
        if copied == 0 {
            return self.nothing_to_read(room.is_empty());
        }
        match mode {
            ReadMode::Take => self.consume(copied, cx),
            // A look calls for an ACK as a read does.
            ReadMode::Peek => self.after_read(copied, cx),
        }
        Ok(copied)
    }

    /// Removes bytes that were read in place.
    pub(in crate::tcp) fn consume(&mut self, len: usize, cx: &mut Context<'_>) {
        self.receive.queue.consume(len, cx.pool);
        if self.urgent_seq().is_some_and(|urgent| urgent.is_before(self.read_seq())) {
            self.receive.urgent = None;
        }
        self.after_read(len, cx);
    }

    fn nothing_to_read(&mut self, is_empty_room: bool) -> Result<usize, TcpError> {
        if is_empty_room || self.receive.has_fin {
            return Ok(0);
        }
        if let Some(error) = self.error.take() {
            return Err(error);
        }
        match self.state {
            _ if self.shut.receive => Ok(0),
            State::Closed => Err(TcpError::NotConnected),
            _ => Err(TcpError::WouldBlock),
        }
    }

    /// Closes directions (`shutdown`).
    pub(in crate::tcp) fn shutdown(
        &mut self,
        how: Shutdown,
        cx: &mut Context<'_>,
    ) -> Result<(), TcpError> {
        if self.state == State::Closed {
            return Err(TcpError::NotConnected);
        }
        self.shut.receive |= how != Shutdown::Write;
        if how != Shutdown::Read && !self.send.fin {
            self.shut.send = true;
            self.close_sending(cx);
        }
        Ok(())
    }

    /// Queues the FIN (`tcp_close_state`, `tcp_send_fin`).
    pub(super) fn close_sending(&mut self, cx: &mut Context<'_>) {
        self.state = match self.state {
            State::Established => State::FinWait1,
            State::CloseWait => State::LastAck,
            // As the kernel: nobody waits for the handshake, and the FIN may end it.
            State::SynReceived if self.is_orphan => State::FinWait1,
            // The FIN follows when the handshake is over.
            State::SynReceived if self.awaits_ack() => return,
            State::SynReceived => State::SynReceived,
            _ => return,
        };
        if self.unsent_bytes() == 0 {
            self.begin_sending(Sending::Busy, cx.now_us);
        }
        self.send.fin = true;
        self.options.cork = false;
        self.send_queued(cx);
    }

    /// Closes the connection; nobody holds it any more (`tcp_close`).
    pub(in crate::tcp) fn close(&mut self, cx: &mut Context<'_>) {
        let has_unread = self.receive.queue.len_bytes() > 0;
        self.is_orphan = true;
        self.errors.release();
        self.shut.receive = true;
        self.receive.queue.clear(cx.pool);
        match self.state {
            State::Closed => {}
            State::SynSent => self.finish(cx),
            _ if has_unread => {
                // RFC 2525, section 2.17: the peer must learn that its data were lost.
                cx.counters.abort_on_close.add(1);
                self.abort(cx);
            }
            _ if self.options.rare.linger_s == Some(0) => {
                cx.counters.abort_on_linger.add(1);
                self.disconnect(cx);
            }
            _ => {
                // Of a connection that was shut down before it was open, the FIN waits for this, too.
                if !self.send.fin || self.state == State::SynReceived {
                    self.shut.send = true;
                    self.close_sending(cx);
                }
                self.wait_for_fin(cx);
            }
        }
    }

    /// FIN-WAIT-2 at a close.
    fn wait_for_fin(&mut self, cx: &mut Context<'_>) {
        if self.state != State::FinWait2 {
            return;
        }
        match self.fin_timeout_us(cx) {
            None => {
                cx.counters.abort_on_linger.add(1);
                self.abort(cx);
            }
            Some(wait_us) if wait_us > TIME_WAIT_US => {
                self.set_end(cx.now_us + wait_us - TIME_WAIT_US);
            }
            Some(wait_us) => self.hand_over(Substate::FinWait2, wait_us, cx),
        }
    }

    /// Ends the connection at once (`tcp_disconnect`), and returns the error that the next call tells.
    /// A peer that closed, and has all of ours or will soon, is not told.
    pub(in crate::tcp) fn disconnect(&mut self, cx: &mut Context<'_>) -> Option<TcpError> {
        let is_reset = match self.state {
            State::Closed | State::SynSent => false,
            State::Closing | State::LastAck => !self.is_fin_sent(),
            _ => true,
        };
        if is_reset {
            self.send_reset(cx);
        }
        let is_told = is_reset || self.state == State::SynSent;
        self.error = None;
        self.finish(cx);
        is_told.then_some(TcpError::Reset)
    }

    fn is_fin_sent(&self) -> bool {
        self.send.next.is_after(self.send.queue.end())
    }

    /// Resets the connection.
    pub(in crate::tcp) fn abort(&mut self, cx: &mut Context<'_>) {
        if !matches!(self.state, State::Closed | State::SynSent) {
            self.send_reset(cx);
        }
        self.finish(cx);
    }

    /// Least time to live of segments that are taken.
    pub(in crate::tcp) fn min_ttl(&self) -> u8 {
        self.options.rare.min_ttl
    }

    /// Replaces the socket's options. Those of the handshake keep what was agreed.
    pub(in crate::tcp) fn set_options(&mut self, options: TcpOptions, cx: &mut Context<'_>) {
        let before = self.options.get();
        let options = TcpOptions { max_segment: before.max_segment, ..options };
        self.options = ConnectionOptions::of(&options);
        self.follow_timestamping(before.timestamping);
        if options.keepalive != before.keepalive {
            self.arm_keepalive(cx.now_us);
        } else if options.keepalive_idle_us != before.keepalive_idle_us {
            self.arm_keepalive(self.receive.last_us);
        }
        if let Some(bytes) = options.sndbuf {
            self.send.buffer_bytes = bytes;
            self.send.is_full &= !self.is_writable();
        }
        if let Some(bytes) = options.rcvbuf.filter(|_| options.rcvbuf != before.rcvbuf) {
            self.receive.buffer.fix(bytes);
        }
        if options.low_water_bytes != before.low_water_bytes {
            self.receive.buffer.fit_low_water(&options, cx.config);
        }
        if let Some(clamp) =
            options.window_clamp.filter(|_| options.window_clamp != before.window_clamp)
        {
            self.receive.buffer.set_clamp(clamp.get(), self.receive.window);
        }
        if options.rto_max_us != before.rto_max_us {
            self.rtt.set_max(options.rto_max_us(cx.config));
        }
        if options.congestion != before.congestion {
            let algorithm = options.congestion.unwrap_or(cx.config.congestion);
            self.congestion.set_algorithm(algorithm);
        }
        if !before.nodelay && options.nodelay {
            self.push(cx);
        } else if before.cork && !options.cork {
            self.send_queued(cx);
        }
    }

    /// Sends what waits to fill a segment (`TCP_NAGLE_PUSH`).
    pub(in crate::tcp) fn push(&mut self, cx: &mut Context<'_>) {
        let options = &mut self.options;
        let before = (options.cork, options.nodelay);
        (options.cork, options.nodelay) = (false, true);
        self.send_queued(cx);
        (self.options.cork, self.options.nodelay) = before;
    }

    /// `TCP_QUICKACK`.
    pub(in crate::tcp) fn set_quick_acks(&mut self, on: bool, cx: &mut Context<'_>) {
        self.delayed.set_quick(on);
        if on && matches!(self.state, State::Established | State::CloseWait) {
            let unacked = self.receive.next.bytes_since(self.receive.acked);
            let is_empty = self.receive.queue.len_bytes() == 0;
            if self.delayed.is_due_by_option(unacked, is_empty) {
                self.send_ack(cx);
            }
        }
    }

    pub(in crate::tcp) fn has_quick_acks(&self) -> bool {
        !self.delayed.is_interactive()
    }

    /// Bytes that were written and not acknowledged.
    pub(in crate::tcp) fn unacknowledged_bytes(&self) -> u32 {
        self.send.queue.len_bytes()
    }

    /// Sequence numbers that are not acknowledged, that of the FIN among them: none as long as the connection is not open,
    /// and at its end as many as were left (`SIOCOUTQ`).
    pub(in crate::tcp) fn unacknowledged(&self) -> u32 {
        match self.state {
            State::SynSent | State::SynReceived => 0,
            _ => (self.send.queue.end() + u32::from(self.send.fin)).bytes_since(self.send.una),
        }
    }

    /// Bytes that were received and not read, up to an urgent one: none as long as the handshake is not over, even if data
    /// came with the SYN (`SIOCINQ`).
    pub(in crate::tcp) fn received_bytes(&self) -> u32 {
        if self.state == State::SynReceived {
            return 0;
        }
        let len = self.receive.queue.len_bytes();
        let is_awaited = |urgent: &Seq| {
            !urgent.is_before(self.read_seq()) && urgent.is_before(self.receive.next)
        };
        match self.urgent_seq().filter(|_| !self.options.oob_inline).filter(is_awaited) {
            Some(urgent) => len.min(urgent - self.read_seq()),
            None => len,
        }
    }
}

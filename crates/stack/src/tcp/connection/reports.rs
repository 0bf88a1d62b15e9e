//! Reports to the error queue: of zero-copy writes (`MSG_ZEROCOPY`), and of times of what is sent (`SO_TIMESTAMPING`).

use super::super::config::Timestamping;
use super::super::error::TcpError;
use super::super::error_queue::{ErrorQueue, TcpReport};
use super::super::on_demand::OnDemand;
use super::super::seq::Seq;
use super::{Connection, IcmpMessage, WriteFlags};

impl Connection {
    /// Oldest report of the error queue (`MSG_ERRQUEUE`). The error that it tells, if any, is no longer the connection's: that
    /// is the one of the next report (`sock_dequeue_err_skb`).
    pub(in crate::tcp) fn take_report(&mut self) -> Option<TcpReport> {
        if self.errors.is_empty() {
            return None;
        }
        let report = self.errors.take();
        let is_error = matches!(report, Some(TcpReport::Path { .. }));
        match self.errors.first() {
            Some(&TcpReport::Path { error, .. }) => self.error = Some(error),
            _ if is_error => self.error = None,
            _ => {}
        }
        // An active connection needs the memory again.
        if !self.sent.is_allocated() {
            self.errors.release_spare();
        }
        report
    }

    /// Reports the error that ends an attempt to connect. Over IPv6 it is kept only if that was asked for
    /// (`ip_icmp_error`, `ipv6_icmp_error`).
    pub(super) fn report_path_error(&mut self, error: TcpError, message: IcmpMessage) {
        let flow = self.flow();
        if !flow.is_ipv6() || self.options.tells_path_errors {
            self.errors.report_error(error, message, flow.theirs);
        }
    }

    /// Error queue of a connection that ends, which its socket keeps.
    pub(in crate::tcp) fn take_errors(&mut self) -> OnDemand<ErrorQueue> {
        std::mem::take(&mut self.errors)
    }

    /// Goes on with the error queue of its socket.
    pub(in crate::tcp) fn keep_errors(&mut self, errors: OnDemand<ErrorQueue>) {
        self.errors = errors;
    }

    /// Times that a report has woken pollers so far.
    pub(in crate::tcp) fn report_wakes(&self) -> u32 {
        self.errors.wakes()
    }

    /// True if a report came since the last call.
    pub(in crate::tcp) fn take_report_news(&mut self) -> bool {
        self.errors.is_allocated() && self.errors.take_news()
    }

    pub(super) fn is_zero_copy(&self, flags: WriteFlags) -> bool {
        flags.zero_copy && self.options.rare.zero_copy
    }

    /// Refuses a zero-copy write of which no report could be kept.
    pub(super) fn check_reports(&self, flags: WriteFlags) -> Result<(), TcpError> {
        let is_refused = !flags.is_rest && self.is_zero_copy(flags) && self.errors.is_full();
        if is_refused { Err(TcpError::NoBuffers) } else { Ok(()) }
    }

    /// True if a zero-copy write appends to a packet with bytes of another one.
    pub(super) fn appends_to_zero_copy(&self, flags: WriteFlags) -> bool {
        flags.zero_copy
            && self.unsent_bytes() > 0
            && self.errors.written_end().is_some_and(|end| end.is_after(self.last_packet_begin()))
    }

    fn last_packet_begin(&self) -> Seq {
        self.send.queue.last_begin(self.send.next)
    }

    /// Notes a zero-copy write that has taken `len_bytes`.
    pub(super) fn note_zero_copy(&mut self, len_bytes: usize, appends: bool, flags: WriteFlags) {
        if !self.is_zero_copy(flags) || len_bytes == 0 {
            return;
        }
        let end = self.send.queue.end();
        if flags.is_rest {
            self.errors.extend_write(end);
        } else {
            self.errors.note_write(len_bytes, end, appends);
        }
    }

    /// Asks for the times of the last byte of a write that ends here, if it was not sent (`tcp_tx_timestamp`).
    pub(super) fn ask_times(&mut self) {
        let asked = self.options.rare.timestamping.of_transmission();
        if asked == Timestamping::default() || self.unsent_bytes() == 0 {
            return;
        }
        let begin = self.last_packet_begin();
        let last = self.send.queue.end() - 1;
        self.errors.ask_times(last, begin, asked);
    }

    /// Tells the times of a packet that is sent.
    pub(super) fn report_sent(&mut self, begin: Seq, len_bytes: u32, now_us: u64) {
        if self.errors.is_allocated() {
            let options = self.options.rare.timestamping;
            self.errors.note_sent(begin, begin + len_bytes, now_us, options);
        }
    }

    /// Tells what an ACK ended.
    pub(super) fn report_acknowledged(&mut self, una: Seq, now_us: u64) {
        if self.errors.is_allocated() {
            let options = self.options.rare.timestamping;
            self.errors.acknowledge(una, now_us, options);
        }
    }

    /// Tells the end of all writes, unless nobody would read it.
    pub(super) fn report_end(&mut self) {
        if self.errors.is_allocated() && !self.is_orphan {
            self.errors.finish();
        }
    }

    /// Numbers bytes from here on, if they were not numbered before (`sock_set_timestamping`).
    pub(super) fn follow_timestamping(&mut self, before: Timestamping) {
        let now = self.options.rare.timestamping;
        if now.has(Timestamping::OPT_ID) && !before.has(Timestamping::OPT_ID) {
            let from_end = now.has(Timestamping::OPT_ID_TCP);
            self.errors.number_from(if from_end { self.send.queue.end() } else { self.send.una });
        }
    }
}

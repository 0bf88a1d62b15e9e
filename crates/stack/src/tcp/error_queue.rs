//! Error queue of a connection (`sk_error_queue`): reports of what it sent.

use std::collections::VecDeque;
use std::net::SocketAddr;

use super::config::Timestamping;
use super::connection::IcmpMessage;
use super::error::TcpError;
use super::on_demand::{Initial, OnDemand};
use super::seq::{Seq, len_u32};

/// Reports of times and errors that wait to be read, at most; later ones are lost, as the kernel's beyond the receive buffer.
/// Beyond as many zero-copy writes whose reports are not read, another one is refused, as by the kernel beyond `optmem_max`.
const REPORTS_MAX: usize = 256;
/// Zero-copy writes that are told together, and their bytes, at most (`msg_zerocopy_realloc`).
const WRITES_MAX: u32 = 0xfffe;
const WRITE_BYTES_MAX: usize = 1 << 19;

/// Report of the error queue (`struct sock_extended_err`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TcpReport {
    /// The peer has the bytes of writes with `MSG_ZEROCOPY`, which were copied (`SO_EE_CODE_ZEROCOPY_COPIED`).
    ZeroCopy {
        /// Number of the first of them. That of the first of the socket is 0.
        first: u32,
        /// Number of the last of them.
        last: u32,
    },
    /// ICMP error that ended an attempt to connect (`SO_EE_ORIGIN_ICMP`, `SO_EE_ORIGIN_ICMP6`). The kernel's report has
    /// the quoted segment, too.
    Path {
        /// Error that the application is told.
        error: TcpError,
        /// Message that told it.
        message: IcmpMessage,
        /// Peer that the segment was for.
        to: SocketAddr,
    },
    /// Time of the last byte of a write (`SO_EE_ORIGIN_TIMESTAMPING`).
    Time {
        /// Event that it is the time of.
        event: SentEvent,
        /// Time, in µs of the clock that calls are given.
        at_us: u64,
        /// Number of the byte in the stream ([`Timestamping::OPT_ID`]), else 0.
        byte: u32,
        /// True if the kernel's report has the packet, too ([`Timestamping::OPT_TSONLY`] is not set). Ours never has.
        lacks_packet: bool,
    },
}

/// Event on the way of a byte to the peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SentEvent {
    /// The device has the packet (`SCM_TSTAMP_SND`).
    Sent,
    /// The packet is on its way to the device (`SCM_TSTAMP_SCHED`).
    Scheduled,
    /// The peer has acknowledged all up to the byte (`SCM_TSTAMP_ACK`).
    Acknowledged,
}

/// Reports that wait, and what others will be about.
#[derive(Debug)]
pub(super) struct ErrorQueue {
    held: OnDemand<Held>,
    /// Number of the next zero-copy write (`sk_zckey`).
    next_write: u32,
    /// Byte with the number 0 (`sk_tskey`).
    base: Seq,
    /// Times that pollers were woken, and those of [`ErrorQueue::take_news`].
    wakes: u32,
    taken_wakes: u32,
}

/// Part of the queue that an idle connection does not keep.
#[derive(Debug)]
struct Held {
    reports: VecDeque<TcpReport>,
    /// Number of those among them that tell zero-copy writes.
    told_writes: usize,
    /// Zero-copy writes that are not acknowledged.
    writes: VecDeque<Writes>,
    /// Bytes whose times are asked for and that are not acknowledged, in their order.
    bytes: VecDeque<TimedByte>,
}

/// Zero-copy writes into packets that follow each other, which are told together.
#[derive(Clone, Copy, Debug)]
struct Writes {
    first: u32,
    last: u32,
    len_bytes: usize,
    end: Seq,
}

/// Last byte of a write, and the times of it that are asked for.
#[derive(Clone, Copy, Debug)]
struct TimedByte {
    seq: Seq,
    asked: Timestamping,
}

impl Initial for ErrorQueue {
    const INITIAL: Self =
        Self { held: OnDemand::UNCHANGED, next_write: 0, base: Seq(0), wakes: 0, taken_wakes: 0 };

    fn initial() -> &'static Self {
        static EMPTY: ErrorQueue = ErrorQueue::INITIAL;
        &EMPTY
    }
}

impl Initial for Held {
    const INITIAL: Self = Self {
        reports: VecDeque::new(),
        told_writes: 0,
        writes: VecDeque::new(),
        bytes: VecDeque::new(),
    };

    fn initial() -> &'static Self {
        static EMPTY: Held = Held::INITIAL;
        &EMPTY
    }
}

impl ErrorQueue {
    pub(super) fn is_empty(&self) -> bool {
        self.held.reports.is_empty()
    }

    pub(super) fn first(&self) -> Option<&TcpReport> {
        self.held.reports.front()
    }

    /// Memory that the queue occupies.
    pub(super) fn memory_bytes(&self) -> u32 {
        if !self.held.is_allocated() {
            return 0;
        }
        let Held { reports, writes, bytes, .. } = &*self.held;
        let queued = reports.capacity() * size_of::<TcpReport>()
            + writes.capacity() * size_of::<Writes>()
            + bytes.capacity() * size_of::<TimedByte>();
        len_u32(size_of::<Held>() + queued)
    }

    /// True if it keeps memory that nothing waits in.
    pub(super) fn has_spare(&self) -> bool {
        let Held { reports, writes, bytes, .. } = &*self.held;
        self.held.is_allocated() && reports.is_empty() && writes.is_empty() && bytes.is_empty()
    }

    /// Gives that back. Numbers go on.
    pub(super) fn release_spare(&mut self) {
        if self.has_spare() {
            self.held.release();
        }
    }

    /// Oldest report. If others follow, pollers are woken again (`sock_dequeue_err_skb`).
    pub(super) fn take(&mut self) -> Option<TcpReport> {
        if self.is_empty() {
            return None;
        }
        let report = self.held.reports.pop_front()?;
        self.held.told_writes -= usize::from(matches!(report, TcpReport::ZeroCopy { .. }));
        if !self.is_empty() {
            self.wake();
        }
        Some(report)
    }

    fn wake(&mut self) {
        self.wakes = self.wakes.wrapping_add(1);
    }

    /// Times that pollers were woken so far.
    pub(super) fn wakes(&self) -> u32 {
        self.wakes
    }

    /// True if pollers are to be woken since the last call.
    pub(super) fn take_news(&mut self) -> bool {
        std::mem::replace(&mut self.taken_wakes, self.wakes) != self.wakes
    }

    /// Gives the number 0 to a byte.
    pub(super) fn number_from(&mut self, base: Seq) {
        self.base = base;
    }

    /// True if the reports of so many zero-copy writes are not read that another one is refused.
    pub(super) fn is_full(&self) -> bool {
        self.held.told_writes + self.held.writes.len() >= REPORTS_MAX
    }

    /// True if there are so many other reports that another one is lost.
    fn loses_reports(&self) -> bool {
        self.held.reports.len() - self.held.told_writes >= REPORTS_MAX
    }

    /// End of the last zero-copy write that is not acknowledged.
    pub(super) fn written_end(&self) -> Option<Seq> {
        self.held.writes.back().map(|writes| writes.end)
    }

    /// Notes a zero-copy write of `len_bytes`, whose last byte is before `end`. One that appends to the packet of the
    /// last is told with it.
    pub(super) fn note_write(&mut self, len_bytes: usize, end: Seq, appends: bool) {
        let number = self.next_write;
        self.next_write = number.wrapping_add(1);
        let is_joined = |writes: &&mut Writes| {
            appends
                && writes.last.wrapping_sub(writes.first) < WRITES_MAX - 1
                && writes.len_bytes + len_bytes <= WRITE_BYTES_MAX
        };
        let waiting = &mut self.held.writes;
        match waiting.back_mut().filter(is_joined) {
            Some(writes) => {
                (writes.last, writes.end) = (number, end);
                writes.len_bytes += len_bytes;
            }
            None => waiting.push_back(Writes { first: number, last: number, len_bytes, end }),
        }
    }

    /// Notes that the last zero-copy write goes on to `end`. One that is told already was copied, and stays told.
    pub(super) fn extend_write(&mut self, end: Seq) {
        if self.written_end().is_some()
            && let Some(writes) = self.held.writes.back_mut()
        {
            writes.end = end;
        }
    }

    /// Asks for times of the last byte of a write. It replaces that of a write into the same packet, which begins at
    /// `packet_begin`.
    pub(super) fn ask_times(&mut self, seq: Seq, packet_begin: Seq, asked: Timestamping) {
        let is_replaced = |byte: &TimedByte| !byte.seq.is_before(packet_begin);
        let bytes = &mut self.held.bytes;
        while bytes.back().is_some_and(is_replaced) {
            bytes.pop_back();
        }
        bytes.push_back(TimedByte { seq, asked });
    }

    /// Tells the times of bytes of a packet that is sent, perhaps again.
    pub(super) fn note_sent(&mut self, begin: Seq, end: Seq, now_us: u64, options: Timestamping) {
        let first = self.held.bytes.partition_point(|byte| byte.seq.is_before(begin));
        for at in first.. {
            let byte = match self.held.bytes.get(at) {
                Some(&byte) if byte.seq.is_before(end) => byte,
                _ => return,
            };
            for (asked, event) in [
                (Timestamping::TX_SCHED, SentEvent::Scheduled),
                (Timestamping::TX_SOFTWARE, SentEvent::Sent),
            ] {
                if byte.asked.has(asked) {
                    self.report_time(event, byte.seq, now_us, options);
                }
            }
        }
    }

    /// Tells what is over as everything before `una` is acknowledged, in the order of the stream: of a packet first its times,
    /// and then the end of its writes (`tcp_clean_rtx_queue`).
    pub(super) fn acknowledge(&mut self, una: Seq, now_us: u64, options: Timestamping) {
        let is_over = |end: &Seq| !end.is_after(una);
        loop {
            let byte_end = self.held.bytes.front().map(|byte| byte.seq + 1).filter(is_over);
            let writes_end = self.held.writes.front().map(|writes| writes.end).filter(is_over);
            let is_of_writes = match (byte_end, writes_end) {
                (None, None) => return,
                (Some(byte_end), Some(writes_end)) => writes_end.is_before(byte_end),
                (Some(_), None) => false,
                (None, Some(_)) => true,
            };
            if is_of_writes {
                self.end_writes();
            } else {
                self.end_byte(now_us, options);
            }
        }
    }

    /// Tells that the first of the bytes is acknowledged.
    fn end_byte(&mut self, now_us: u64, options: Timestamping) {
        let Some(byte) = self.held.bytes.pop_front() else { return };
        if byte.asked.has(Timestamping::TX_ACK) {
            self.report_time(SentEvent::Acknowledged, byte.seq, now_us, options);
        }
    }

    /// Tells the end of the first of the writes.
    fn end_writes(&mut self) {
        let Some(writes) = self.held.writes.pop_front() else { return };
        self.report_writes(&writes);
    }

    /// Tells the end of all writes, as the connection is over: their bytes are needed no more.
    pub(super) fn finish(&mut self) {
        if !self.held.is_allocated() {
            return;
        }
        self.held.bytes.clear();
        while let Some(writes) = self.held.writes.pop_front() {
            self.report_writes(&writes);
        }
        self.release_spare();
    }

    /// Reports an error of the path.
    pub(super) fn report_error(&mut self, error: TcpError, message: IcmpMessage, to: SocketAddr) {
        if !self.loses_reports() {
            self.held.reports.push_back(TcpReport::Path { error, message, to });
            self.wake();
        }
    }

    fn report_time(&mut self, event: SentEvent, seq: Seq, at_us: u64, options: Timestamping) {
        if self.loses_reports() {
            return;
        }
        let byte = if options.has(Timestamping::OPT_ID) { seq - self.base } else { 0 };
        let lacks_packet = !options.has(Timestamping::OPT_TSONLY);
        self.held.reports.push_back(TcpReport::Time { event, at_us, byte, lacks_packet });
        self.wake();
    }

    /// Reports writes, together with those before if these were reported last (`skb_zerocopy_notify_extend`).
    fn report_writes(&mut self, writes: &Writes) {
        self.wake();
        match self.held.reports.back_mut() {
            Some(TcpReport::ZeroCopy { last, .. }) if last.wrapping_add(1) == writes.first => {
                *last = writes.last;
            }
            _ => {
                let &Writes { first, last, .. } = writes;
                self.held.told_writes += 1;
                self.held.reports.push_back(TcpReport::ZeroCopy { first, last });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Timestamping = Timestamping::TX_SCHED
        .with(Timestamping::TX_SOFTWARE)
        .with(Timestamping::TX_ACK)
        .with(Timestamping::OPT_ID);

    fn told(queue: &mut ErrorQueue) -> Vec<TcpReport> {
        std::iter::from_fn(|| queue.take()).collect()
    }

    #[test]
    fn tcp_51_writes_are_told_in_ranges() {
        let mut queue = ErrorQueue::INITIAL;
        for end in [100, 200, 300] {
            queue.note_write(100, Seq(end), false);
        }
        queue.acknowledge(Seq(99), 0, ALL);
        assert!(queue.is_empty() && !queue.take_news());
        queue.acknowledge(Seq(200), 0, ALL);
        queue.acknowledge(Seq(300), 0, ALL);
        assert!(queue.take_news() && !queue.take_news());
        assert_eq!(told(&mut queue), [TcpReport::ZeroCopy { first: 0, last: 2 }]);
        queue.note_write(100, Seq(400), false);
        queue.note_write(100, Seq(500), true);
        queue.acknowledge(Seq(499), 0, ALL);
        assert!(queue.is_empty(), "both share a packet");
        queue.finish();
        assert_eq!(told(&mut queue), [TcpReport::ZeroCopy { first: 3, last: 4 }]);
    }

    #[test]
    fn tcp_51_large_writes_are_told_apart() {
        let mut queue = ErrorQueue::INITIAL;
        queue.note_write(WRITE_BYTES_MAX, Seq(100), false);
        queue.note_write(1, Seq(101), true);
        queue.acknowledge(Seq(100), 0, ALL);
        assert_eq!(told(&mut queue), [TcpReport::ZeroCopy { first: 0, last: 0 }]);
    }

    #[test]
    fn tcp_51_queue_is_bounded() {
        let mut queue = ErrorQueue::INITIAL;
        let mut end = Seq(0);
        while !queue.is_full() {
            end += 1;
            queue.note_write(1, end, false);
        }
        assert_eq!(queue.held.writes.len(), REPORTS_MAX);
        for _ in 0..2 * REPORTS_MAX {
            queue.ask_times(end, end, ALL);
            queue.note_sent(end, end + 1, 0, ALL);
        }
        assert_eq!((queue.held.reports.len(), queue.held.bytes.len()), (REPORTS_MAX, 1));
        queue.acknowledge(end, 0, ALL);
        assert_eq!(queue.held.reports.len(), REPORTS_MAX + 1, "no write is forgotten");
    }

    #[test]
    fn tcp_51_unread_times_refuse_no_write() {
        let mut queue = ErrorQueue::INITIAL;
        let mut end = Seq(0);
        for _ in 0..REPORTS_MAX {
            end += 1;
            queue.ask_times(end - 1, end - 1, ALL);
            queue.note_sent(end - 1, end, 0, ALL);
        }
        assert!(!queue.is_full(), "times are bounded apart");
        for number in 0..REPORTS_MAX {
            assert!(!queue.is_full());
            end += 1;
            queue.note_write(1, end, false);
            if number % 2 == 0 {
                queue.acknowledge(end, 0, Timestamping::default());
            }
            // Reports with a gap between them are not joined.
            queue.next_write += 1;
        }
        assert!(queue.is_full());
        while let Some(TcpReport::Time { .. }) = queue.first() {
            assert!(queue.is_full());
            queue.take();
        }
        assert!(matches!(queue.take(), Some(TcpReport::ZeroCopy { .. })) && !queue.is_full());
    }

    #[test]
    fn tcp_52_reports_come_packet_by_packet() {
        let mut queue = ErrorQueue::INITIAL;
        for (at, end) in [100, 200, 300, 400].into_iter().enumerate() {
            if at % 2 == 0 {
                queue.note_write(100, Seq(end), false);
            }
            queue.ask_times(Seq(end - 1), Seq(end - 100), Timestamping::TX_ACK);
        }
        queue.acknowledge(Seq(400), 9, ALL);
        let is_time = |report: &TcpReport| matches!(report, TcpReport::Time { .. });
        let kinds: Vec<_> = told(&mut queue).iter().map(is_time).collect();
        assert_eq!(kinds, [true, false, true, true, false, true]);
    }

    #[test]
    fn tcp_52_times_are_those_of_last_bytes() {
        let mut queue = ErrorQueue::INITIAL;
        queue.number_from(Seq(1));
        queue.ask_times(Seq(10), Seq(1), ALL);
        queue.ask_times(Seq(20), Seq(1), ALL);
        queue.note_sent(Seq(1), Seq(20), 5, ALL);
        assert!(
            queue.is_empty(),
            "the first byte was replaced, and the second is not in the packet"
        );
        queue.note_sent(Seq(20), Seq(21), 6, ALL);
        queue.acknowledge(Seq(20), 7, ALL);
        queue.acknowledge(Seq(21), 8, ALL.with(Timestamping::OPT_TSONLY));
        let times = told(&mut queue).into_iter().map(|report| match report {
            TcpReport::Time { event, at_us, byte, lacks_packet } => {
                (event, at_us, byte, lacks_packet)
            }
            _ => panic!("{report:?}"),
        });
        let expected = [
            (SentEvent::Scheduled, 6, 19, true),
            (SentEvent::Sent, 6, 19, true),
            (SentEvent::Acknowledged, 8, 19, false),
        ];
        assert_eq!(times.collect::<Vec<_>>(), expected);
    }
}

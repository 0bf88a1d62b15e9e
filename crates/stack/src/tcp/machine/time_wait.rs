//! Connections that ended: TIME-WAIT, and FIN-WAIT-2 without an owner
//! (`tcp_timewait_state_process`).

use forebay_rx::packet::Packet;

use super::super::config::{TIME_WAIT_US, TcpConfig};
use super::super::connection::{Answer, Substate, TimeWaitEntry, stamp_ms};
use super::super::flow::{Flow, PackedFlow};
use super::super::seq::Seq;
use super::super::wire::{Flags, Options, Outgoing, Segment, Timestamps};
use super::handshake::Syn;
use super::{Target, Tcp, TcpOut};

/// Distance of a new connection's first number from the last one of the old.
const SEQUENCE_GAP: u32 = 65_535 + 2;

/// An ended connection. Small, since a busy host has many.
#[derive(Clone, Copy, Debug)]
pub(super) struct TimeWait {
    flow: PackedFlow,
    send_next: Seq,
    receive_next: Seq,
    timestamp: u32,
    timestamp_offset: u32,
    /// Time of the last answer, in ms modulo 2^32.
    answered_ms: u32,
    /// Window, as it was announced last.
    window: u16,
    window_scale: u8,
    has_timestamps: bool,
    substate: Substate,
    tos: u8,
}

const _: () = assert!(size_of::<TimeWait>() <= 64, "TCP-12: an ended connection takes 64 bytes");

impl TimeWait {
    fn new(flow: &Flow, entry: &TimeWaitEntry) -> Self {
        let window = entry.window >> entry.window_scale;
        Self {
            flow: PackedFlow::of(flow),
            send_next: entry.send_next,
            receive_next: entry.receive_next,
            timestamp: entry.timestamp.map_or(0, |stamps| stamps.recent),
            timestamp_offset: entry.timestamp.map_or(0, |stamps| stamps.offset),
            answered_ms: 0,
            window: u16::try_from(window).unwrap_or(u16::MAX),
            window_scale: entry.window_scale,
            has_timestamps: entry.timestamp.is_some(),
            substate: entry.substate,
            tos: entry.tos,
        }
    }

    pub(super) fn flow(&self) -> Flow {
        self.flow.unpacked()
    }

    /// PAWS.
    fn is_old(&self, segment: &Segment) -> bool {
        self.has_timestamps
            && self.timestamp != 0
            && segment
                .options
                .timestamps
                .is_some_and(|stamps| self.timestamp.wrapping_sub(stamps.value).cast_signed() > 0)
    }

    fn is_in_window(&self, segment: &Segment) -> bool {
        let window = u32::from(self.window) << self.window_scale;
        let end = self.receive_next + window.max(1);
        segment.seq == self.receive_next
            || segment.end().is_after(self.receive_next) && segment.seq.is_before(end)
    }

    /// True if a SYN may open the connection anew (RFC 6191).
    fn allows(&self, segment: &Segment) -> bool {
        let is_syn =
            segment.has(Flags::SYN) && !segment.has(Flags::RST) && !segment.has(Flags::ACK);
        let is_newer = self.has_timestamps
            && segment
                .options
                .timestamps
                .is_some_and(|stamps| stamps.value.wrapping_sub(self.timestamp).cast_signed() > 0);
        is_syn && !self.is_old(segment) && (segment.seq.is_after(self.receive_next) || is_newer)
    }
}

/// Numbers of an ended connection that the next one with the same ends goes on with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Continued {
    /// Initial sequence number.
    pub(super) sequence: Seq,
    /// The peer's last timestamp, which the SYN echoes.
    pub(super) timestamp: u32,
}

/// Outcome of a segment in TIME-WAIT (`tcp_tw_status`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Outcome {
    Ignore,
    Acknowledge,
    Reset,
    End,
    Reopen,
}

impl Tcp {
    /// Keeps an ended connection, unless too many are kept.
    pub(super) fn keep_time_wait(&mut self, flow: &Flow, entry: &TimeWaitEntry, now_us: u64) {
        if self.time_waits.len() >= self.config.max_time_wait {
            self.counters.time_wait_overflow.add(1);
            self.forget_flow(flow);
            return;
        }
        let at = self.time_waits.insert(TimeWait::new(flow, entry));
        self.levels.set_time_waits(self.time_waits.len());
        self.targets.insert(flow, Target::TimeWait(at));
        self.time_wait_timers.arm(at, now_us + entry.stay_us, now_us);
        if let Some(division) = &self.division {
            division.mark_ended(flow);
        }
    }

    pub(super) fn receive_in_time_wait(
        &mut self,
        at: u32,
        packet: Packet,
        segment: &Segment,
        mtu_bytes: u32,
        out: &mut TcpOut<'_>,
    ) -> Answer {
        let mut packet = Some(packet);
        let answer = self.process_in_time_wait(at, &mut packet, segment, mtu_bytes, out);
        if let Some(packet) = packet {
            out.pool.put(packet.frame);
        }
        answer
    }

    fn process_in_time_wait(
        &mut self,
        at: u32,
        packet: &mut Option<Packet>,
        segment: &Segment,
        mtu_bytes: u32,
        out: &mut TcpOut<'_>,
    ) -> Answer {
        let Some(entry) = self.time_waits.at_mut(at) else { return Answer::None };
        let flow = entry.flow();
        let (outcome, stays) = match entry.substate {
            Substate::FinWait2 => entry.process_in_fin_wait_2(segment),
            Substate::TimeWait => entry.process(segment, &self.config),
        };
        if stays {
            self.time_wait_timers.arm(at, out.now_us + TIME_WAIT_US, out.now_us);
        }
        let is_over = matches!(outcome, Outcome::Reset | Outcome::Reopen);
        if is_over && self.is_others_to_open(&flow, segment, out) {
            self.drop_time_wait(at);
            return Answer::None;
        }
        match outcome {
            Outcome::Ignore => {}
            Outcome::Acknowledge => {
                if segment.carries_data() || self.may_acknowledge(at, out.now_us) {
                    self.acknowledge_in_time_wait(at, out);
                }
            }
            Outcome::Reset => {
                self.drop_time_wait(at);
                return Answer::Reset;
            }
            Outcome::End => self.drop_time_wait(at),
            Outcome::Reopen => {
                self.reopen(at, &flow, packet, segment, mtu_bytes, out);
            }
        }
        Answer::None
    }

    /// True of a SYN that another process answers, as the flow has ended here.
    fn is_others_to_open(&self, flow: &Flow, segment: &Segment, out: &TcpOut<'_>) -> bool {
        if self.division.is_none() || !segment.has(Flags::SYN) || segment.has(Flags::ACK) {
            return false;
        }
        let listener = self.listeners.find(&self.targets.hashed(flow), out.cpu);
        !listener.is_some_and(|listener| self.takes(listener, flow))
    }

    fn reopen(
        &mut self,
        at: u32,
        flow: &Flow,
        packet: &mut Option<Packet>,
        segment: &Segment,
        mtu_bytes: u32,
        out: &mut TcpOut<'_>,
    ) {
        let hashed = self.targets.hashed(flow);
        let Some(listener) = self.listeners.find(&hashed, out.cpu) else {
            return self.acknowledge_in_time_wait(at, out);
        };
        if self.is_too_far_for(listener, packet.as_ref()) {
            return;
        }
        let Some(entry) = self.time_waits.at(at) else { return };
        let sequence = entry.send_next + SEQUENCE_GAP;
        self.drop_time_wait(at);
        if segment.has(Flags::FIN) {
            // As at a listener.
            return;
        }
        let syn = Syn { packet, segment, mtu_bytes, continues_at: Some(sequence) };
        self.begin_request(listener, flow, syn, out);
    }

    /// True once in an interval: [`InvalidLimit`](super::super::invalid_limit::InvalidLimit) in fewer bits.
    fn may_acknowledge(&mut self, at: u32, now_us: u64) -> bool {
        let limit_ms = u32::try_from(self.config.invalid_ratelimit_us / 1000).unwrap_or(u32::MAX);
        let Some(entry) = self.time_waits.at_mut(at) else { return false };
        let now_ms = stamp_ms(now_us).max(1);
        if entry.answered_ms != 0 && now_ms.wrapping_sub(entry.answered_ms) < limit_ms {
            let skipped = match entry.substate {
                Substate::FinWait2 => &self.counters.ack_skipped_fin_wait2,
                Substate::TimeWait => &self.counters.ack_skipped_time_wait,
            };
            skipped.add(1);
            return false;
        }
        entry.answered_ms = now_ms;
        true
    }

    fn acknowledge_in_time_wait(&self, at: u32, out: &mut TcpOut<'_>) {
        let Some(entry) = self.time_waits.at(at) else { return };
        let flow = entry.flow();
        let value = stamp_ms(out.now_us).wrapping_add(entry.timestamp_offset);
        let stamps = Timestamps { value, echo: entry.timestamp };
        let outgoing = Outgoing {
            ack: entry.receive_next,
            flags: Flags::ACK,
            window: entry.window,
            options: Options {
                // As the kernel, none without a timestamp to echo.
                timestamps: (entry.has_timestamps && stamps.echo != 0).then_some(stamps),
                ..Options::default()
            },
            tos: entry.tos,
            ..Outgoing::empty(&flow, entry.send_next)
        };
        self.send(&outgoing, out);
    }

    /// Ends a stay for a connection that this host opens. `None` of one without timestamps, which stays.
    pub(super) fn continue_time_wait(&mut self, at: u32) -> Option<Continued> {
        let entry = self.time_waits.at(at).filter(|entry| entry.has_timestamps)?;
        let sequence = entry.send_next + SEQUENCE_GAP;
        let continued = Continued { sequence, timestamp: entry.timestamp };
        self.drop_time_wait(at);
        Some(continued)
    }

    pub(super) fn drop_time_wait(&mut self, at: u32) {
        self.time_wait_timers.cancel(at);
        if let Some(entry) = self.time_waits.remove(at) {
            self.levels.set_time_waits(self.time_waits.len());
            self.forget_flow(&entry.flow());
        }
    }
}

impl TimeWait {
    /// A segment in FIN-WAIT-2. The second value is true if the stay begins anew.
    fn process_in_fin_wait_2(&mut self, segment: &Segment) -> (Outcome, bool) {
        if self.is_old(segment) || !self.is_in_window(segment) {
            // As the kernel, a reset too.
            return (Outcome::Acknowledge, false);
        }
        if segment.has(Flags::RST) {
            return (Outcome::End, false);
        }
        if segment.has(Flags::SYN) && !segment.seq.is_before(self.receive_next) {
            return (Outcome::Reset, false);
        }
        if !segment.has(Flags::ACK)
            || !segment.end().is_after(self.receive_next)
            || segment.len() == 0
        {
            return (Outcome::Ignore, false);
        }
        if !segment.has(Flags::FIN) || segment.end() != self.receive_next + 1 {
            // Data for nobody.
            return (Outcome::Reset, false);
        }
        self.substate = Substate::TimeWait;
        self.receive_next = segment.end();
        if let Some(stamps) = segment.options.timestamps {
            self.timestamp = stamps.value;
        }
        (Outcome::Acknowledge, true)
    }

    fn process(&mut self, segment: &Segment, config: &TcpConfig) -> (Outcome, bool) {
        let is_old = self.is_old(segment);
        let is_expected =
            segment.seq == self.receive_next && (segment.len() == 0 || segment.has(Flags::RST));
        if !is_old && is_expected {
            let is_reset = segment.has(Flags::RST);
            if is_reset && !config.ignores_time_wait_resets {
                return (Outcome::End, false);
            }
            if let Some(stamps) = segment.options.timestamps.filter(|_| self.has_timestamps) {
                self.timestamp = stamps.value;
            }
            return (Outcome::Ignore, !is_reset);
        }
        if self.allows(segment) {
            return (Outcome::Reopen, false);
        }
        if segment.has(Flags::RST) {
            return (Outcome::Ignore, false);
        }
        let stays = is_old || segment.has(Flags::ACK);
        (Outcome::Acknowledge, stays)
    }
}

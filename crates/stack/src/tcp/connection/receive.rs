//! The spine of a connection: a segment's way through the stages (`tcp_rcv_state_process`).

use forebay_rx::packet::Packet;

use super::super::config::TIME_WAIT_US;
use super::super::wire::{Flags, Segment};
use super::ack::Acknowledged;
use super::open::Answer;
use super::validate::Validation;
use super::{Connection, Context, Leaving, State, Substate, TimeWaitEntry, TimeWaitStamps};

impl Connection {
    /// Processes a segment. Frames go to the receive queue, or back to their pool.
    pub(in crate::tcp) fn receive(
        &mut self,
        packet: Packet,
        segment: &Segment,
        cx: &mut Context<'_>,
    ) -> Answer {
        self.tally.count_received(packet.wire_count(), segment.payload_len);
        let mut packet = Some(packet);
        let answer = self.process(&mut packet, segment, cx);
        if let Some(packet) = packet {
            cx.pool.put(packet.frame);
        }
        answer
    }

    fn process(
        &mut self,
        packet: &mut Option<Packet>,
        segment: &Segment,
        cx: &mut Context<'_>,
    ) -> Answer {
        match self.state {
            // A closed connection that the application still holds: `tcp_v4_do_rcv` resets.
            State::Closed => {
                return if segment.has(Flags::RST) { Answer::None } else { Answer::Reset };
            }
            // It has sent nothing yet: as if there were no connection.
            State::SynSent if self.waits_for_data() => {
                return Answer::reset_if(segment.has(Flags::ACK) && !segment.has(Flags::RST));
            }
            State::SynSent => return self.receive_in_syn_sent(packet, segment, cx),
            State::SynReceived | State::FinWait1 if self.awaits_ack() => {
                if let Some(answer) = self.check_opening(segment, cx) {
                    return answer;
                }
            }
            _ => {}
        }
        if ![Flags::ACK, Flags::RST, Flags::SYN].into_iter().any(|flag| segment.has(flag)) {
            // RFC 9293, section 3.10.7.4, fifth: nothing without an ACK. As the kernel, before an answer
            // to what is out of the window.
            return Answer::None;
        }
        if self.validate(segment, cx) == Validation::Discard {
            return Answer::None;
        }
        if !segment.has(Flags::ACK) {
            return Answer::None;
        }
        if self.state == State::Established {
            self.count_capable(segment, packet.as_ref().map_or(1, Packet::wire_count));
        }
        let heard_us = self.receive.last_us;
        if !self.awaits_ack() {
            self.receive.last_us = cx.now_us;
        }
        let una = match self.state {
            // The SYN-ACK was the listener's.
            State::SynReceived => self.send.initial + 1,
            _ => self.send.una,
        };
        if !segment.ack.is_after(self.send.next) && self.is_predicted(packet.as_ref(), segment) {
            return self.take_predicted(packet, segment, cx);
        }
        let acknowledged = self.acknowledge(segment, cx);
        self.tally.bytes_acked += u64::from(self.send.una.bytes_since(una));
        match acknowledged {
            Acknowledged::Yes => {}
            Acknowledged::Discard | Acknowledged::Unsent => {
                return Answer::reset_if(self.state == State::SynReceived);
            }
        }
        self.receive.last_us = cx.now_us;
        if let Some(answer) = self.after_ack(segment, heard_us, cx) {
            return answer;
        }
        self.note_urgent(packet.as_ref(), segment, cx);
        let next = self.receive.next;
        let answer = self.take_payload(packet, segment, cx);
        self.tally.bytes_received += u64::from(self.receive.next - next);
        if answer == Answer::Reset {
            return Answer::Reset;
        }
        if self.state != State::Closed {
            self.send_queued(cx);
            self.check_send_buffer(cx);
            self.acknowledge_if_due(cx);
        }
        Answer::None
    }

    /// Takes predicted data before their ACK, as the kernel does (`tcp_rcv_established`): what the ACK has sent again, or the
    /// answer to one far too old, acknowledges them. If it acknowledges nothing, less than a segment is not sent.
    fn take_predicted(
        &mut self,
        packet: &mut Option<Packet>,
        segment: &Segment,
        cx: &mut Context<'_>,
    ) -> Answer {
        let next = self.receive.next;
        self.note_timestamp(segment, cx.now_us);
        self.queue_payload(packet, segment, cx);
        self.tally.bytes_received += u64::from(self.receive.next - next);
        let una = self.send.una;
        let is_other = segment.ack != una;
        if is_other {
            // Far too old or not, the data are taken.
            let _ = self.acknowledge(segment, cx);
            self.tally.bytes_acked += u64::from(self.send.una.bytes_since(una));
        } else {
            self.send.window_seq = segment.seq;
        }
        if is_other || self.unsent_bytes() >= self.send.mss {
            self.send_queued(cx);
            self.check_send_buffer(cx);
        }
        self.acknowledge_if_due(cx);
        Answer::None
    }

    /// Transitions that an acknowledgement of SYN or FIN makes. An answer ends the segment's way.
    fn after_ack(
        &mut self,
        segment: &Segment,
        heard_us: u64,
        cx: &mut Context<'_>,
    ) -> Option<Answer> {
        if self.awaits_ack() {
            self.end_fast_opening(segment, heard_us, cx);
        }
        // A FIN may be acknowledged with the SYN-ACK.
        let is_fin_acked = self.is_fin_acked();
        match self.state {
            State::SynReceived => {
                // Of a SYN-ACK that crosses ours it is not scaled (RFC 7323, section 2.2).
                self.send.window = self.scaled_window(segment);
                self.send.max_window = self.send.max_window.max(self.send.window);
                self.send.window_seq = segment.seq;
                self.set_mss(cx.config);
                self.sample_answer(segment, cx.now_us);
                self.become_established(cx);
                // As the kernel: until the peer's window grows, segments are as long as the path promises.
                self.begin_mtu_search(cx);
                if self.send.fin {
                    // Closed before the handshake ended: the FIN goes out now.
                    self.state = State::FinWait1;
                } else if self.shut.send {
                    // Shut down before the SYN was sent.
                    self.close_sending(cx);
                }
            }
            State::FinWait1 if is_fin_acked => {
                self.state = State::FinWait2;
                if self.is_orphan {
                    return self.wait_without_owner(segment, cx);
                }
            }
            State::Closing if is_fin_acked => {
                self.enter_time_wait(cx);
                return Some(Answer::None);
            }
            State::LastAck if is_fin_acked => {
                self.finish(cx);
                return Some(Answer::None);
            }
            _ => {}
        }
        None
    }

    /// FIN-WAIT-2 without an owner: the peer's FIN is awaited for a while.
    fn wait_without_owner(&mut self, segment: &Segment, cx: &mut Context<'_>) -> Option<Answer> {
        let Some(stay_us) = self.fin_timeout_us(cx) else {
            cx.counters.abort_on_linger.add(1);
            self.finish(cx);
            return Some(Answer::Reset);
        };
        let new_end = segment.end() - u32::from(segment.has(Flags::FIN));
        if segment.len() > 0 && new_end.is_after(self.receive.next) {
            // `take_payload` resets the connection: nobody is there to read, in order or not.
            return None;
        }
        if segment.has(Flags::FIN) {
            // The FIN is processed below, and leads to TIME-WAIT.
            return None;
        }
        if stay_us > TIME_WAIT_US {
            self.set_end(cx.now_us + stay_us - TIME_WAIT_US);
            return None;
        }
        self.hand_over(Substate::FinWait2, stay_us, cx);
        Some(Answer::None)
    }

    /// The time of FIN-WAIT-2 without an owner as a connection is over, if it is longer than that of TIME-WAIT
    /// (`tcp_keepalive_timer`): as much of it goes on in the table.
    pub(super) fn end_wait_without_owner(&mut self, cx: &mut Context<'_>) {
        match self.fin_timeout_us(cx) {
            Some(wait_us) if wait_us > TIME_WAIT_US => {
                let least_us = self.least_fin_timeout_us();
                let stay_us = (wait_us - TIME_WAIT_US).max(least_us);
                self.hand_over(Substate::FinWait2, stay_us, cx);
            }
            _ => self.abort(cx),
        }
    }

    /// Time that a connection without an owner stays in FIN-WAIT-2; `None` for not at all.
    pub(super) fn fin_timeout_us(&self, cx: &Context<'_>) -> Option<u64> {
        let wanted = self.options.rare.fin_timeout_us.map_or(cx.config.fin_timeout_us, u64::from);
        (wanted > 0).then(|| wanted.max(self.least_fin_timeout_us()))
    }

    /// Time that a FIN is awaited at least, as in the kernel: 3.5 time-outs, so that one sent again is answered.
    fn least_fin_timeout_us(&self) -> u64 {
        let rto_us = self.rtt.rto_us();
        (rto_us << 2) - (rto_us >> 1)
    }

    pub(super) fn is_fin_acked(&self) -> bool {
        self.send.fin && self.send.una == self.send.queue.end() + 1
    }

    /// Goes to TIME-WAIT.
    pub(super) fn enter_time_wait(&mut self, cx: &mut Context<'_>) {
        self.hand_over(Substate::TimeWait, TIME_WAIT_US, cx);
    }

    /// Hands the rest over to an entry in the table of TIME-WAIT (`tcp_time_wait`).
    pub(super) fn hand_over(&mut self, substate: Substate, stay_us: u64, cx: &mut Context<'_>) {
        self.leaving = Some(Leaving::new(substate, stay_us));
        cx.counters.time_waits.add(1);
        self.finish(cx);
    }

    /// Takes the order to go on in the table of TIME-WAIT.
    pub(in crate::tcp) fn take_time_wait(&mut self) -> Option<TimeWaitEntry> {
        let leaving = self.leaving.take()?;
        Some(TimeWaitEntry {
            send_next: self.send.next,
            receive_next: self.receive.next,
            window: self.usable_window(),
            window_scale: self.agreed.receive_scale(),
            timestamp: self.agreed.timestamps.then_some(TimeWaitStamps {
                offset: self.timestamp_offset,
                recent: self.receive.timestamp,
                recent_us: self.receive.timestamp_us,
            }),
            tos: self.options.tos,
            substate: leaving.substate(),
            stay_us: leaving.stay_us(),
        })
    }
}

//! Work after each change of a connection: timers, memory, readiness, its end.

use super::super::connection::{Context, IDLE_US, Readiness, State};
use super::super::memory::{Charge, Pressure};
use super::{Kind, SocketEntry, Target, Tcp, TcpOut, TcpSocket, Told};

/// Timers that one call runs at most; the rest follow in the next.
const TIMERS_A_TURN: usize = 256;

impl Tcp {
    /// Runs what is due. To be called each turn, and at [`Self::next_timer_us`].
    pub fn advance(&mut self, out: &mut TcpOut<'_>) {
        let mut fired = std::mem::take(&mut self.fired);
        self.socket_timers.advance(out.now_us, TIMERS_A_TURN, &mut fired);
        for index in fired.drain(..) {
            self.with_connection(index, out, |connection, cx| connection.on_timer(cx));
        }
        self.request_timers.advance(out.now_us, TIMERS_A_TURN, &mut fired);
        fired.drain(..).for_each(|at| self.on_request_timer(at, out));
        self.time_wait_timers.advance(out.now_us, TIMERS_A_TURN, &mut fired);
        fired.drain(..).for_each(|at| self.drop_time_wait(at));
        self.fired = fired;
    }

    /// Time of the next call of [`Self::advance`], in µs; `None` if nothing waits.
    #[must_use]
    pub fn next_timer_us(&self) -> Option<u64> {
        let wheels = [&self.socket_timers, &self.request_timers, &self.time_wait_timers];
        wheels.into_iter().filter_map(super::TimerWheel::next_us).min()
    }

    /// Takes the sockets whose readiness grew since the last call.
    pub fn take_ready(&mut self, ready: &mut Vec<TcpSocket>) {
        ready.append(&mut self.ready);
    }

    pub(super) fn pressure(&self) -> Pressure {
        self.memory.pressure(&self.config)
    }

    pub(super) fn context<'a>(&'a self, memory: Pressure, out: &'a mut TcpOut<'_>) -> Context<'a> {
        Context {
            now_us: out.now_us,
            pool: out.pool,
            out: out.packets,
            config: &self.config,
            counters: &self.counters,
            fast_open: &self.fast_open_cache,
            memory,
        }
    }

    pub(super) fn insert(&mut self, kind: Kind) -> u32 {
        self.generation = self.generation.wrapping_add(1);
        let (generation, counted) = (self.generation, State::Closed);
        let (told, charge) = (Told::default(), Charge::default());
        let entry = SocketEntry { generation, kind, told, counted, charge, before: None };
        self.sockets.insert(entry)
    }

    /// Charges a socket for the memory of its queues.
    pub(super) fn charge_anew(&mut self, index: u32) {
        let Some(entry) = self.sockets.at_mut(index) else { return };
        let charge = match &entry.kind {
            Kind::Connection(connection) => connection.charge(),
            Kind::Idle(idle) => {
                Charge { written_bytes: idle.errors.memory_bytes(), ..Charge::default() }
            }
            Kind::Listener(_) => Charge::default(),
        };
        let before = std::mem::replace(&mut entry.charge, charge);
        self.memory_bytes = self.memory_bytes + charge.bytes() - before.bytes();
        self.memory.replace(before, charge);
    }

    /// Follows a change of a connection.
    pub(super) fn follow(&mut self, index: u32, out: &mut TcpOut<'_>) {
        let Some(entry) = self.sockets.at_mut(index) else { return };
        let Kind::Connection(connection) = &mut entry.kind else { return };
        let charge = connection.charge();
        let before = std::mem::replace(&mut entry.charge, charge);
        self.memory_bytes = self.memory_bytes + charge.bytes() - before.bytes();
        self.memory.replace(before, charge);
        let state = connection.state;
        let before = std::mem::replace(&mut entry.counted, state);
        self.levels.change(before, state);
        let is_opened = matches!(before, State::SynReceived | State::FinWait1)
            && !self.fast_opening.is_empty()
            && !connection.awaits_ack();
        let readiness = connection.readiness();
        let has_news = connection.take_report_news();
        if entry.told.replace(&readiness) || has_news {
            self.ready.push(TcpSocket { index, generation: entry.generation });
        }
        let timers = &mut self.socket_timers;
        // Not at each segment: it may fire early.
        let release_us = connection.has_spare().then_some(out.now_us + IDLE_US);
        match (connection.next_timer_us(), release_us) {
            (Some(at_us), None) => timers.arm(index, at_us, out.now_us),
            (Some(at_us), Some(by_us)) if at_us <= by_us => timers.arm(index, at_us, out.now_us),
            (_, Some(by_us)) => timers.arm_by(index, by_us, out.now_us),
            (None, None) => timers.cancel(index),
        }
        let (flow, is_closed) = (connection.flow(), connection.is_closed());
        let (is_done, time_wait) = (connection.is_done(), connection.take_time_wait());
        if is_opened {
            let reset_us = connection.was_reset_after_accept().then_some(out.now_us);
            self.end_fast_opening(index, reset_us);
        }
        if let Some(entry) = time_wait {
            self.keep_time_wait(&flow, &entry, out.now_us);
        } else if is_closed && self.targets.find(&flow) == Some(Target::Connection(index)) {
            self.forget_flow(&flow);
        }
        if is_done {
            self.remove(index, out);
        }
    }

    /// Forgets a socket.
    pub(super) fn remove(&mut self, index: u32, out: &mut TcpOut<'_>) {
        self.socket_timers.cancel(index);
        self.end_fast_opening(index, None);
        let Some(mut entry) = self.sockets.remove(index) else { return };
        self.memory_bytes -= entry.charge.bytes();
        self.memory.replace(entry.charge, Charge::default());
        self.levels.change(entry.counted, State::Closed);
        if let Kind::Connection(connection) = &mut entry.kind {
            connection.free(out.pool);
            self.orphans -= u32::from(connection.is_orphan());
            let flow = connection.flow();
            if self.targets.find(&flow) == Some(Target::Connection(index)) {
                self.forget_flow(&flow);
            }
        }
    }

    /// Notes that a listener has a connection to accept, of which its owner is to be notified.
    pub(super) fn notify_listener(&mut self, index: u32) {
        if let Some(entry) = self.sockets.at_mut(index) {
            entry.told.set_readable(true);
            self.ready.push(TcpSocket { index, generation: entry.generation });
        }
    }
}

impl Told {
    const READABLE: u8 = 1;

    /// Notes the readiness, and returns true if there is some that was not told.
    pub(super) fn replace(&mut self, now: &Readiness) -> bool {
        let kinds =
            [now.writable, now.peer_closed, now.hung_up, now.failed, now.urgent, now.reported];
        let others = kinds.into_iter().fold(0, |bits, is_set| (bits | u8::from(is_set)) << 1);
        let bits = others | u8::from(now.readable);
        let before = std::mem::replace(&mut self.0, bits);
        bits & !before != 0
    }

    pub(super) fn set_readable(&mut self, is_readable: bool) {
        self.0 = self.0 & !Self::READABLE | u8::from(is_readable);
    }
}

//! Work after each change of a connection: timers, memory, readiness, its end.

use super::super::connection::{Context, Readiness, State};
use super::{Kind, SocketEntry, Target, Tcp, TcpOut, TcpSocket};

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

    pub(super) fn is_memory_tight(&self) -> bool {
        self.memory.bytes() > self.config.memory_bytes / 4 * 3
    }

    pub(super) fn context<'a>(
        &'a self,
        is_memory_tight: bool,
        out: &'a mut TcpOut<'_>,
    ) -> Context<'a> {
        Context {
            now_us: out.now_us,
            pool: out.pool,
            out: out.packets,
            config: &self.config,
            counters: &self.counters,
            fast_open: &self.fast_open_cache,
            is_memory_tight,
        }
    }

    pub(super) fn insert(&mut self, kind: Kind) -> u32 {
        self.generation = self.generation.wrapping_add(1);
        let told = Readiness::default();
        let (generation, counted) = (self.generation, State::Closed);
        let entry = SocketEntry { generation, kind, told, counted, charged_bytes: 0 };
        self.sockets.insert(entry)
    }

    /// Follows a change of a connection.
    pub(super) fn follow(&mut self, index: u32, out: &mut TcpOut<'_>) {
        let Some(entry) = self.sockets.at_mut(index) else { return };
        let Kind::Connection(connection) = &mut entry.kind else { return };
        let now_bytes = u32::try_from(connection.memory_bytes()).unwrap_or(u32::MAX);
        let before_bytes = std::mem::replace(&mut entry.charged_bytes, now_bytes);
        self.memory_bytes = self.memory_bytes + u64::from(now_bytes) - u64::from(before_bytes);
        self.memory.replace(before_bytes.into(), now_bytes.into());
        let state = connection.state;
        let before = std::mem::replace(&mut entry.counted, state);
        self.levels.change(before, state);
        let is_opened = matches!(before, State::SynReceived | State::FinWait1)
            && !self.at_once.is_empty()
            && !connection.awaits_ack();
        let readiness = connection.readiness();
        if grew(&entry.told, &readiness) {
            self.ready.push(TcpSocket { index, generation: entry.generation });
        }
        entry.told = readiness;
        match connection.next_timer_us() {
            Some(at_us) => self.socket_timers.arm(index, at_us, out.now_us),
            None => self.socket_timers.cancel(index),
        }
        let (flow, is_closed) = (connection.flow(), connection.is_closed());
        let (is_done, time_wait) = (connection.is_done(), connection.take_time_wait());
        if is_opened {
            let was_reset = connection.was_reset_at_once();
            self.end_at_once(index, was_reset, out.now_us);
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
        self.end_at_once(index, false, 0);
        let Some(mut entry) = self.sockets.remove(index) else { return };
        self.memory_bytes -= u64::from(entry.charged_bytes);
        self.memory.replace(entry.charged_bytes.into(), 0);
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

    /// A listener has a connection to accept.
    pub(super) fn tell_listener(&mut self, index: u32) {
        if let Some(entry) = self.sockets.at_mut(index) {
            entry.told.readable = true;
            self.ready.push(TcpSocket { index, generation: entry.generation });
        }
    }
}

fn grew(before: &Readiness, now: &Readiness) -> bool {
    now.readable && !before.readable
        || now.writable && !before.writable
        || now.peer_closed && !before.peer_closed
        || now.hung_up && !before.hung_up
        || now.failed && !before.failed
        || now.urgent && !before.urgent
}

//! Numbers of connections by state, for observers.

use std::sync::atomic::{AtomicU32, Ordering};

use super::super::connection::State;

/// Numbers of connections now, by state. One CPU at a time writes them, and any thread reads them.
#[derive(Debug, Default)]
pub struct TcpLevels {
    by_state: [AtomicU32; State::ALL.len()],
    requests: AtomicU32,
    time_waits: AtomicU32,
}

impl TcpLevels {
    /// Numbers of connections, by the names of their states in `ss`. Handshakes at listeners are
    /// `SYN-RECV`, and connections without an owner in FIN-WAIT-2 are `TIME-WAIT`, as in the kernel.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u32)> + '_ {
        let handshakes = self.requests.load(Ordering::Relaxed);
        let open =
            State::ALL.into_iter().filter(|state| *state != State::Closed).map(move |state| {
                let count = self.by_state[state as usize].load(Ordering::Relaxed);
                (state.name(), if state == State::SynReceived { count + handshakes } else { count })
            });
        open.chain(std::iter::once(("TIME-WAIT", self.time_waits.load(Ordering::Relaxed))))
    }

    /// Counts a connection in state `now` that was counted in state `before`.
    pub(super) fn change(&self, before: State, now: State) {
        // A load and a store: there is one writer.
        let add = |state: State, change: u32| {
            let count = &self.by_state[state as usize];
            count.store(count.load(Ordering::Relaxed).wrapping_add(change), Ordering::Relaxed);
        };
        if before != now {
            add(before, u32::MAX);
            add(now, 1);
        }
    }

    pub(super) fn set_requests(&self, count: u32) {
        self.requests.store(count, Ordering::Relaxed);
    }

    pub(super) fn set_time_waits(&self, count: u32) {
        self.time_waits.store(count, Ordering::Relaxed);
    }
}

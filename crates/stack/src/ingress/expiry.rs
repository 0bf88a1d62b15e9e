//! Expiry of fragments and neighbours: by time, whether packets come or not.

use std::mem::take;

use forebay_rx::packet::Packet;

use super::Stack;
use crate::network::NetworkDrop;

/// Interval between two checks, in ns.
const EXPIRE_NS: u64 = 100_000_000;

/// Checks for expired fragments and neighbours.
#[derive(Debug, Default)]
pub(super) struct Expiry {
    /// Time of the turn in which the last check became due, in ns of the engine.
    looked_ns: u64,
    /// Time of the host at which a check became due that the next turn begins with, in ns.
    due_ns: Option<u64>,
    /// Fragments that reassembly gave up; empty between checks.
    fragments: Vec<(Packet, NetworkDrop)>,
    /// Packets of neighbours that did not answer; empty between checks.
    unanswered: Vec<Packet>,
}

impl Stack {
    /// Begins a turn. A check is for the time at which a turn before began: whose answer was delivered in that turn has answered
    /// in time, however late the turn was.
    pub(super) fn expire_if_due(&mut self, now_ns: u64) {
        if let Some(due_ns) = self.expiry.due_ns.take() {
            self.expire(due_ns);
        }
        if now_ns.saturating_sub(self.expiry.looked_ns) >= EXPIRE_NS {
            self.expiry.looked_ns = now_ns;
            self.expiry.due_ns = Some(self.host.now_ns());
        }
    }

    /// Time until something may expire, in ns; `None` if nothing waits.
    pub(super) fn expiry_ns(&self) -> Option<u64> {
        let mut devices = 0..self.host.device_count();
        let waits = self.network.fragments().frames() > 0
            || devices.any(|device| self.host.neighbours(device).waiting() > 0);
        let is_due = self.expiry.due_ns.is_some();
        waits.then_some(if is_due { 0 } else { EXPIRE_NS })
    }

    /// Drops expired fragments, solicits unresolved neighbours again, and drops the packets of
    /// neighbours that did not answer.
    fn expire(&mut self, now_ns: u64) {
        let Self { network, host, expiry: Expiry { fragments, unanswered, .. }, answers, .. } =
            self;
        network.expire(now_ns, fragments);
        let mut asks = take(answers);
        for device in 0..host.device_count() {
            let on = host.identity(device);
            host.with_pool(&mut |pool| {
                fragments.drain(..).for_each(|(packet, _)| pool.put(packet.frame));
                host.neighbours(device).tick(&on, now_ns, pool, &mut asks, unanswered);
                unanswered.drain(..).for_each(|packet| pool.put(packet.frame));
                // This CPU may sleep from now on, while others wait for their frames.
                pool.flush();
            });
            if !asks.is_empty() {
                host.send(device, &mut asks);
            }
        }
        *answers = asks;
    }
}

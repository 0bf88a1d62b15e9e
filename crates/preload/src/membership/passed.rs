//! Connections that other processes have passed on.

use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use forebay_stack::Division;
use forebay_stack::tcp::PassedConnection;

use super::{LEAVE_LOOK, LEAVE_MAX, Membership, OTHERS_LOOK};
use crate::listener::OtherCopies;
use crate::passing::{self, Adopting};
use crate::shares::DividedAddress;

/// Looks of each process at a connection that none can go on with, 100 ms apart, before that is reset.
pub(super) const ATTEMPTS_MAX: usize = 8;

/// Looks while no process serves its address, and one may.
pub(super) const LATER_ATTEMPTS_MAX: usize = 50;

/// Connections that a process keeps for its next look, as it cannot go on with them.
const REFUSED_MAX: usize = 64;

/// Closed listeners whose copies in other processes are known, at most.
const COPIES_MAX: usize = 16;

/// Longest wait of connections that were passed on for a process that serves some address.
pub(super) const HEIR_MAX: Duration = Duration::from_secs(5);

impl Membership {
    /// Goes on with connections that others have passed on.
    pub(super) fn adopt_passed(&self) {
        let (mailbox, shares) = (self.engine_lock.mailbox(), self.engine_lock.shares());
        let Some(_adopting) = Adopting::begin() else { return };
        self.leave_refused();
        let has_room = || self.state().refused.len() < REFUSED_MAX;
        let attempt = u16::from(self.counts_attempts());
        while !Adopting::are_over()
            && self.serves_or_nobody_will()
            && has_room()
            && let Some((passed, attempts)) = mailbox.take()
        {
            // Before: if this process is killed, others answer for the connection. False of one that is a third process's.
            if !shares.adopt(passed.flow(), passed.syn()) {
                continue;
            }
            let bucket = shares.bucket_bit(passed.flow());
            self.let_needed_pass(&mut self.state(), shares.needed() | bucket);
            if passing::adopt(&passed) {
                continue;
            }
            if usize::from(attempts) >= self.attempts_max(passed.flow().ours) {
                self.reset(&passed);
            } else {
                self.state().refused.push((passed, attempts + attempt));
            }
        }
        self.leave_refused();
    }

    /// True at one look in 100 ms, however often changes are told.
    pub(super) fn counts_attempts(&self) -> bool {
        let counted = &mut self.state().counted;
        let is_due = counted.is_none_or(|counted| counted.elapsed() >= OTHERS_LOOK);
        if is_due {
            *counted = Some(Instant::now());
        }
        is_due
    }

    /// Attempts of all processes to go on with a connection to an address: while none serves that, one may begin to.
    pub(super) fn attempts_max(&self, ours: SocketAddr) -> usize {
        let shares = self.engine_lock.shares();
        let is_served = passing::listeners_of(ours).into_iter().any(|at| shares.has_members(at));
        let since = self.state().unserved_since;
        let is_late = since.is_some_and(|since| since.elapsed() >= HEIR_MAX);
        let looks = match is_served || is_late || !self.may_be_served_later() {
            true => ATTEMPTS_MAX,
            false => LATER_ATTEMPTS_MAX,
        };
        looks * (1 + shares.others().count())
    }

    /// True while another process has a copy of a listener that this one has closed.
    pub(super) fn may_be_served_later(&self) -> bool {
        let mut state = self.state();
        state.copies.retain(OtherCopies::exist);
        !state.copies.is_empty()
    }

    /// Notes copies of a listener that this process closes.
    pub(crate) fn note_copies(&self, others: OtherCopies) {
        let copies = &mut self.state().copies;
        copies.retain(OtherCopies::exist);
        if copies.len() < COPIES_MAX {
            copies.push(others);
        }
    }

    /// Gives to others what this process has taken and cannot go on with, as it ends. Resets what nobody will go on with.
    pub(crate) fn end(&self) {
        let began = Instant::now();
        self.leave_refused();
        while !self.state().refused.is_empty() && began.elapsed() < LEAVE_MAX {
            thread::sleep(LEAVE_LOOK);
            self.leave_refused();
        }
        let refused = std::mem::take(&mut self.state().refused);
        refused.iter().for_each(|(passed, _)| self.reset(passed));
        let (mailbox, shares) = (self.engine_lock.mailbox(), self.engine_lock.shares());
        self.engine_lock.evict_dead();
        while shares.others().next().is_none()
            && !self.may_be_served_later()
            && let Some((passed, _)) = mailbox.take()
        {
            if shares.adopt(passed.flow(), passed.syn()) {
                self.reset(&passed);
            }
        }
    }

    /// True if this process serves an address, or if none does and none will: no process is known to have a copy of a
    /// listener, or none has served one for long.
    pub(super) fn serves_or_nobody_will(&self) -> bool {
        let may_be_served_later = self.may_be_served_later();
        let mut state = self.state();
        let is_listener =
            |address: &DividedAddress| matches!(address, DividedAddress::OfListeners(_));
        let has_listeners = state.served.keys().any(is_listener);
        if has_listeners || self.engine_lock.shares().any_served() {
            state.unserved_since = None;
            return has_listeners;
        }
        let since = *state.unserved_since.get_or_insert_with(Instant::now);
        !may_be_served_later || since.elapsed() >= HEIR_MAX
    }

    /// Leaves connections that this process cannot go on with to another one, which serves the address, or has room, and is
    /// told at its next look.
    pub(super) fn leave_refused(&self) {
        let (mailbox, shares) = (self.engine_lock.mailbox(), self.engine_lock.shares());
        self.state().refused.retain(|(passed, attempts)| {
            shares.pass_on(passed.flow());
            !mailbox.put(passed, *attempts) && shares.adopt(passed.flow(), passed.syn())
        });
    }

    /// Resets a connection that no process goes on with.
    pub(super) fn reset(&self, passed: &PassedConnection) {
        if !passing::reset(passed) {
            // From now on its peer's segments are those of no connection.
            self.engine_lock.shares().release(passed.flow());
        }
    }
}

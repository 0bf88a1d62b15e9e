//! Flows that UDP sockets of this process are connected to.

use forebay_stack::tcp::Flow;

use super::{Membership, State};
use crate::shares::Shares;

/// Claim of this process to the datagrams of a flow.
#[derive(Default)]
pub(super) struct FlowClaim {
    /// Sockets that are connected to it.
    sockets: usize,
    is_used: bool,
    /// False while another process has claimed them.
    is_held: bool,
}

impl Membership {
    /// Takes the datagrams of a flow, which a socket is connected to, once no other process that uses such a socket does.
    pub(crate) fn claim_datagrams(&self, flow: Flow, is_used: bool) {
        let mut state = self.state();
        let claim = state.claims.entry(flow).or_default();
        claim.sockets += 1;
        claim.is_used |= is_used;
        claim.hold(&flow, self.engine_lock.shares());
        self.let_needed_pass(&mut state, self.engine_lock.shares().needed());
    }

    /// Keeps other processes from taking the datagrams of a flow, as this one uses its socket.
    pub(crate) fn use_claimed(&self, flow: &Flow) {
        let (mut state, shares) = (self.state(), self.engine_lock.shares());
        let Some(claim) = state.claims.get_mut(flow).filter(|claim| !claim.is_used) else { return };
        if std::mem::take(&mut claim.is_held) {
            shares.release_datagrams(flow);
        }
        claim.is_used = true;
        claim.hold(flow, shares);
        self.let_needed_pass(&mut state, shares.needed());
    }

    /// Ends the part of a socket in the datagrams of a flow.
    pub(crate) fn release_datagrams(&self, flow: &Flow) {
        let mut state = self.state();
        let Some(claim) = state.claims.get_mut(flow) else { return };
        claim.sockets -= 1;
        if claim.sockets > 0 {
            return;
        }
        let is_held = claim.is_held;
        state.claims.remove(flow);
        if is_held {
            self.engine_lock.shares().release_datagrams(flow);
            self.engine_lock.notify_change();
        }
    }

    /// True if another process uses a socket that is connected to a flow.
    pub(crate) fn has_other_user_of(&self, flow: &Flow) -> bool {
        self.engine_lock.evict_dead();
        self.engine_lock.shares().has_other_user_of(flow)
    }

    /// Claims the flows that no other process takes any more.
    pub(super) fn claim_free(&self, state: &mut State) {
        for (flow, claim) in &mut state.claims {
            claim.hold(flow, self.engine_lock.shares());
        }
    }
}

impl FlowClaim {
    /// Claims the flow, unless another process takes it.
    fn hold(&mut self, flow: &Flow, shares: &Shares) {
        if !self.is_held {
            self.is_held = shares.claim_datagrams(flow);
            if self.is_held && !self.is_used {
                shares.mark_idle(flow);
            }
        }
    }
}

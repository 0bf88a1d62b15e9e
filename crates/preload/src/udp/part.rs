//! Part of this process in the datagrams to a socket's address, if other processes may have some.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_stack::tcp::Flow;

use crate::membership::Membership;
use crate::runtime::Runtime;
use crate::shares::DividedAddress;

/// Part of a socket: that of its process in all datagrams to the address, or the flow that it is connected to.
pub(super) struct DatagramPart {
    membership: Option<Arc<Membership>>,
    bound_to: SocketAddr,
    v6_only: bool,
    state: Mutex<PartState>,
}

#[derive(Default)]
struct PartState {
    is_member: bool,
    claimed: Option<Flow>,
}

impl DatagramPart {
    pub(super) fn of(runtime: &Runtime, bound_to: SocketAddr, v6_only: bool) -> Self {
        let (membership, state) = (runtime.membership.clone(), Mutex::default());
        Self { membership, bound_to, v6_only, state }
    }

    /// Takes the datagrams that no other process takes.
    pub(super) fn join(&self) {
        if let Some(membership) = &self.membership
            && !std::mem::replace(&mut self.state().is_member, true)
        {
            self.addresses().for_each(|at| membership.join_idle(at));
        }
    }

    /// Takes a part of the datagrams beside others, or those of the peer.
    pub(super) fn begin_use(&self) {
        let Some(membership) = &self.membership else { return };
        let state = self.state();
        if let Some(flow) = &state.claimed {
            membership.use_claimed(flow);
        } else if state.is_member {
            self.addresses().for_each(|at| membership.begin_use(at));
        }
    }

    /// Takes the datagrams of one flow, and no others.
    pub(super) fn claim(&self, ours: SocketAddr, theirs: SocketAddr, is_used: bool) {
        let Some(membership) = &self.membership else { return };
        let canonical = |end: SocketAddr| SocketAddr::new(end.ip().to_canonical(), end.port());
        let flow = Flow { ours: canonical(ours), theirs: canonical(theirs) };
        let mut state = self.state();
        // First: the flow may be the same.
        membership.claim_datagrams(flow, is_used);
        let before = state.claimed.replace(flow);
        before.iter().for_each(|flow| membership.release_datagrams(flow));
        self.end_membership(membership, &mut state);
    }

    /// Takes datagrams of all flows again.
    pub(super) fn rejoin(&self, is_used: bool) {
        self.leave();
        self.join();
        if is_used {
            self.begin_use();
        }
    }

    /// Takes none any more.
    pub(super) fn leave(&self) {
        let Some(membership) = &self.membership else { return };
        let mut state = self.state();
        state.claimed.take().iter().for_each(|flow| membership.release_datagrams(flow));
        self.end_membership(membership, &mut state);
    }

    /// True if another process takes datagrams to the address, or of the peer.
    pub(super) fn has_other_users(&self) -> bool {
        let Some(membership) = &self.membership else { return false };
        match &self.state().claimed {
            Some(flow) => membership.has_other_user_of(flow),
            None => self.addresses().any(|at| membership.has_other_users(at)),
        }
    }

    fn end_membership(&self, membership: &Membership, state: &mut PartState) {
        if std::mem::take(&mut state.is_member) {
            let last = self.addresses().filter(|at| membership.close(*at));
            last.for_each(|at| membership.abandon(at));
        }
    }

    /// Addresses as the engine has them: a socket of IPv6 may take IPv4, too.
    fn addresses(&self) -> impl Iterator<Item = DividedAddress> + use<> {
        let (ip, port) = (self.bound_to.ip(), self.bound_to.port());
        let has_both = !self.v6_only && ip == IpAddr::V6(Ipv6Addr::UNSPECIFIED);
        let any: IpAddr = Ipv4Addr::UNSPECIFIED.into();
        let ips = std::iter::once(ip.to_canonical()).chain(has_both.then_some(any));
        ips.map(move |ip| DividedAddress::OfDatagrams(SocketAddr::new(ip, port)))
    }

    fn state(&self) -> MutexGuard<'_, PartState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

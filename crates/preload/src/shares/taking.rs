//! Packets that this process takes, and those that it answers, as its stack asks.

use std::net::SocketAddr;
use std::sync::atomic::Ordering::SeqCst;

use forebay_stack::Division;
use forebay_stack::tcp::Flow;

use super::claims::DatagramClaim;
use super::owner::{Owner, heir};
use super::table::{
    COOKIE, ENDED, OCCUPIED, ORIGIN, PASSED, PRINT_SHIFT, ROWLESS, SYN_MASK, UNCLAIMED,
};
use super::{BUCKETS, Shares};

impl Division for Shares {
    fn secret(&self) -> [u8; 16] {
        self.table.secret()
    }

    fn origin_ns(&self) -> u64 {
        self.table.0[ORIGIN].load(SeqCst)
    }

    fn takes_datagrams(&self, flow: &Flow) -> bool {
        let Some(own) = self.own() else { return true };
        let occupied = self.table.0[OCCUPIED].load(SeqCst);
        if occupied & !(1 << own) == 0 {
            return true;
        }
        if let Some(claim) = self.datagram_claim(flow, own) {
            return claim == DatagramClaim::Own;
        }
        match self.row_of_datagrams(flow.ours) {
            Some(row) => {
                let bucket = self.bucket_of(flow);
                let Owner { current, before } = self.owner(row, bucket);
                let owner = before.or(current).or_else(|| heir(self.heirs(row), bucket));
                owner == Some(own)
            }
            // Of an address without a row each process that has a socket there takes all.
            None => true,
        }
    }

    fn refuses_datagrams(&self, flow: &Flow) -> bool {
        let (Some(own), occupied) = (self.own(), self.table.0[OCCUPIED].load(SeqCst)) else {
            return true;
        };
        let is_served = || {
            self.table.0[ROWLESS].load(SeqCst) != 0
                || self.row_of_datagrams(flow.ours).is_some()
                || self.datagram_claim(flow, own).is_some()
        };
        let is_alone = occupied & !(1 << own) == 0;
        is_alone || !is_served() && heir(occupied, self.bucket_of(flow)) == Some(own)
    }

    fn takes(&self, listener: SocketAddr, flow: &Flow) -> bool {
        let is_owner = |own| self.owner_of(listener, flow).is_none_or(|owner| owner.has(own));
        self.own().is_some_and(is_owner)
    }

    fn answers(&self, listener: SocketAddr, flow: &Flow) -> bool {
        let Some(own) = self.own() else { return false };
        let bit = self.bucket_bit(flow);
        let has_unclaimed = |slot: usize| self.table.0[UNCLAIMED + slot].load(SeqCst) & bit != 0;
        if self.settled.load(SeqCst) & bit == 0 || self.others().any(has_unclaimed) {
            return false; // another process may have had the flow until now
        }
        let (hash, print) = self.print_of(flow);
        let mut words = self.table.places(hash).map(|place| place.load(SeqCst));
        let alone = Owner { current: Some(own), before: None };
        let is_owner = match self.owner_of(listener, flow) {
            Some(owner) => owner == alone,
            None => heir(self.table.0[ROWLESS].load(SeqCst), 0) == Some(own),
        };
        is_owner && !words.any(|word| word >> PRINT_SHIFT == print && self.table.is_live(word))
    }

    fn has_others(&self, listener: SocketAddr) -> bool {
        match self.row_of(listener) {
            None => self.has_other_members(listener),
            Some(row) => {
                let is_others = |slot| self.own() != Some(slot);
                let has_owner = |bucket| {
                    let Owner { current, before } = self.owner(row, bucket);
                    current.is_some_and(is_others) || before.is_some_and(is_others)
                };
                self.has_other_members(listener) || (0..BUCKETS).any(has_owner)
            }
        }
    }

    fn claim(&self, flow: &Flow, syn: u32) -> bool {
        self.claim_if(flow, syn, |before, now| {
            // A copy of the SYN that the ended connection began with may be late.
            let is_another = before & SYN_MASK != now & SYN_MASK;
            before & ENDED != 0 && is_another
        })
    }

    fn adopt(&self, flow: &Flow, syn: u32) -> bool {
        self.claim_if(flow, syn, |before, _| before & PASSED != 0)
    }

    fn note_cookie(&self, now_us: u64) {
        self.table.0[COOKIE].store(now_us, SeqCst);
    }

    fn cookie_us(&self) -> u64 {
        self.table.0[COOKIE].load(SeqCst)
    }

    fn mark_ended(&self, flow: &Flow) {
        let Some(own) = self.own() else { return };
        self.mark(flow, own, ENDED);
    }

    fn pass_on(&self, flow: &Flow) {
        let Some(own) = self.own() else { return };
        self.mark(flow, own, PASSED);
        self.forget(flow);
    }

    fn release(&self, flow: &Flow) {
        let Some(own) = self.own() else { return };
        let (hash, print) = self.print_of(flow);
        let mut was_passed = false;
        for place in self.table.places(hash) {
            let found = place.load(SeqCst);
            if self.is_own(found, print, own)
                && place.compare_exchange(found, 0, SeqCst, SeqCst).is_ok()
            {
                was_passed |= found & PASSED != 0;
            }
        }
        if !was_passed {
            self.forget(flow);
        }
    }
}

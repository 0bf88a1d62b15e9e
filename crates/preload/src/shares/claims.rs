//! Claims: which process has which flow.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;

use forebay_stack::tcp::Flow;

use super::Shares;
use super::table::{ENDED, PASSED, PRINT_SHIFT, SYN_SHIFT, TAG_MASK, UNCLAIMED};

/// Result of a claim to a flow.
enum Claimed {
    New,
    /// Claimed by this process earlier.
    Before,
    /// The table has no room: the flow is taken as one that nobody else has.
    WithoutRoom,
    ByAnother,
}

/// Process that has claimed the datagrams of a flow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum DatagramClaim {
    Own,
    /// Another process, which does not use its socket.
    OfIdle,
    Others,
}

/// Mark of a claim to datagrams by a process that does not use its socket.
const IDLE: u64 = ENDED;

impl Shares {
    /// Hash of a flow, and what its word has of it.
    pub(super) fn print_of(&self, flow: &Flow) -> (u64, u64) {
        let hash = self.hasher.hashed(flow).hash();
        (hash, (hash >> PRINT_SHIFT).max(1))
    }

    pub(super) fn claim_if(
        &self,
        flow: &Flow,
        syn: u32,
        may_replace: impl Fn(u64, u64) -> bool,
    ) -> bool {
        let Some(own) = self.own() else { return false };
        let claimed = self.try_claim(flow, syn, own, may_replace);
        if let Claimed::New | Claimed::WithoutRoom = claimed {
            self.held[self.bucket_of(flow)].fetch_add(1, SeqCst);
        }
        if let Claimed::WithoutRoom = claimed {
            self.table.0[UNCLAIMED + own].fetch_or(self.bucket_bit(flow), SeqCst);
        }
        !matches!(claimed, Claimed::ByAnother)
    }

    /// Claims the datagrams of a flow, to which a socket is connected. False if another process has claimed them, unless it
    /// does not use its socket, or the table has no room.
    pub(crate) fn claim_datagrams(&self, flow: &Flow) -> bool {
        let Some(own) = self.own() else { return false };
        let is_idle = |before: u64, _| before & IDLE != 0;
        let claimed = self.try_claim(&of_datagrams(flow), 0, own, is_idle);
        let is_claimed = matches!(claimed, Claimed::New);
        if is_claimed {
            self.held_datagrams[self.bucket_of(flow)].fetch_add(1, SeqCst);
        }
        is_claimed
    }

    /// Lets another process claim the datagrams of a flow, which this one has claimed and does not use.
    pub(crate) fn mark_idle(&self, flow: &Flow) {
        if let Some(own) = self.own() {
            self.mark(&of_datagrams(flow), own, IDLE);
        }
    }

    /// Ends a claim to the datagrams of a flow.
    pub(crate) fn release_datagrams(&self, flow: &Flow) {
        let Some(own) = self.own() else { return };
        let (hash, print) = self.print_of(&of_datagrams(flow));
        for place in self.table.places(hash) {
            let word = place.load(SeqCst);
            if self.is_own(word, print, own) {
                // Ignored: another process has it by now.
                let _ = place.compare_exchange(word, 0, SeqCst, SeqCst);
            }
        }
        let held = &self.held_datagrams[self.bucket_of(flow)];
        // Err of a flow that was never claimed.
        let _ = held.fetch_update(SeqCst, SeqCst, |held| held.checked_sub(1));
    }

    /// Claim to the datagrams of a flow, of whichever process.
    pub(super) fn datagram_claim(&self, flow: &Flow, own: usize) -> Option<DatagramClaim> {
        let (hash, print) = self.print_of(&of_datagrams(flow));
        let mut words = self.table.places(hash).map(|place| place.load(SeqCst));
        let found = words.find(|word| word >> PRINT_SHIFT == print && self.table.is_live(*word));
        found.map(|word| match self.is_own(word, print, own) {
            true => DatagramClaim::Own,
            false if word & IDLE != 0 => DatagramClaim::OfIdle,
            false => DatagramClaim::Others,
        })
    }

    /// Marks the word of a flow of this process.
    pub(super) fn mark(&self, flow: &Flow, own: usize, mark: u64) {
        let (hash, print) = self.print_of(flow);
        for place in self.table.places(hash) {
            let word = place.load(SeqCst);
            if self.is_own(word, print, own) {
                // Ignored: another process has it by now.
                let _ = place.compare_exchange(word, word | mark, SeqCst, SeqCst);
            }
        }
    }

    /// Counts a flow no longer.
    pub(super) fn forget(&self, flow: &Flow) {
        let held = &self.held[self.bucket_of(flow)];
        // Err of a flow that was never claimed.
        let _ = held.fetch_update(SeqCst, SeqCst, |held| held.checked_sub(1));
    }

    /// Word of a flow that has begun with this sequence number.
    pub(super) fn word_of(&self, print: u64, syn: u32, own: usize) -> u64 {
        let mixed = syn.wrapping_mul(0x9e37_79b1) >> 24;
        print << PRINT_SHIFT | u64::from(mixed) << SYN_SHIFT | self.table.tag(own)
    }

    /// True if a word is that of a flow of this process.
    pub(super) fn is_own(&self, word: u64, print: u64, own: usize) -> bool {
        word >> PRINT_SHIFT == print && word & TAG_MASK == self.table.tag(own)
    }

    /// Claims a flow, if `may_replace` its word.
    fn try_claim(
        &self,
        flow: &Flow,
        syn: u32,
        own: usize,
        may_replace: impl Fn(u64, u64) -> bool,
    ) -> Claimed {
        let (hash, print) = self.print_of(flow);
        let word = self.word_of(print, syn, own);
        loop {
            let found =
                self.table.places(hash).find(|place| place.load(SeqCst) >> PRINT_SHIFT == print);
            let (place, expected) = match found {
                Some(place) => (place, place.load(SeqCst)),
                None => match self.table.places(hash).find(|place| place.load(SeqCst) == 0) {
                    Some(place) => (place, 0),
                    None => return Claimed::WithoutRoom,
                },
            };
            if self.is_own(expected, print, own) && expected & (ENDED | PASSED) == 0 {
                return Claimed::Before;
            }
            if expected != 0 && expected >> PRINT_SHIFT != print {
                continue; // it has just changed
            }
            let is_live = expected != 0 && self.table.is_live(expected);
            if is_live && !may_replace(expected, word) {
                return Claimed::ByAnother;
            }
            if place.compare_exchange(expected, word, SeqCst, SeqCst).is_err() {
                continue;
            }
            let is_rival = |rival: &&AtomicU64| {
                !std::ptr::eq(*rival, place) && rival.load(SeqCst) >> PRINT_SHIFT == print
            };
            if self.table.places(hash).any(|rival| is_rival(&rival)) {
                // Claimed at two places at the same time: who sees that gives way.
                let _ = place.compare_exchange(word, 0, SeqCst, SeqCst);
                return Claimed::ByAnother;
            }
            return Claimed::New;
        }
    }
}

/// Name of the datagrams between two ends among the flows, which no flow of TCP has: this host is at the other end.
fn of_datagrams(flow: &Flow) -> Flow {
    Flow { ours: flow.theirs, theirs: flow.ours }
}

//! Reasons why queues were shut and sessions ended, for reports.

use std::collections::BTreeMap;

use crate::Facts;

/// Reason why a queue is of no more use in a session, or the session is over.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Reason {
    pub(super) kind: EndKind,
    /// Observation, as in "the used index went from 3 to 900 with 64 buffers posted".
    pub(super) why: String,
}

/// Kinds that reasons are counted by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum EndKind {
    /// The connection was closed by the other side.
    Closed,
    /// A message was not answered, or not as it must be.
    Message,
    /// A ring was said to be used further than it can be.
    UsedIndex,
    /// A buffer was said to be sent that the device was not given.
    NotGiven,
    /// The kernel refused a kick.
    Kick,
}

impl EndKind {
    fn name(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Message => "message",
            Self::UsedIndex => "used_index",
            Self::NotGiven => "not_given",
            Self::Kick => "kick",
        }
    }

    pub(super) fn steer_reason(self, why: impl Into<String>) -> Reason {
        Reason { kind: self, why: why.into() }
    }
}

/// Ends of all sessions, as facts: `last_end` and `last_shut`, in words, and `ends` and `shut`,
/// how many of each kind. None of them is forgotten with the next session; they are bounded by there
/// being so few kinds.
#[derive(Debug)]
pub(super) struct SessionEnds {
    facts: Facts,
    ends: EndCounts,
    shut: EndCounts,
}

#[derive(Default, Debug)]
struct EndCounts(BTreeMap<&'static str, u64>);

impl SessionEnds {
    pub(super) fn new(facts: Facts) -> Self {
        Self { facts, ends: EndCounts::default(), shut: EndCounts::default() }
    }

    /// A session is over.
    pub(super) fn ended(&mut self, reason: &Reason) {
        self.facts.set("last_end", reason.why.clone());
        self.facts.set("ends", self.ends.add(reason.kind));
    }

    /// A queue of a session was shut. The session may go on.
    pub(super) fn shut(&mut self, session: u64, queue: usize, Reason { kind, why }: &Reason) {
        self.facts.set("last_shut", format!("queue {queue} in session {session}: {why}"));
        self.facts.set("shut", self.shut.add(*kind));
    }
}

impl EndCounts {
    /// Adds one; all of them, as in `closed 2, used_index 1`.
    fn add(&mut self, kind: EndKind) -> String {
        *self.0.entry(kind.name()).or_default() += 1;
        let all: Vec<_> = self.0.iter().map(|(name, count)| format!("{name} {count}")).collect();
        all.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn end_reason_outlives_next_end() {
        let facts = Facts::default();
        let mut ends = SessionEnds::new(facts.clone());
        let lie = EndKind::UsedIndex.steer_reason("it jumped");
        ends.shut(3, 1, &lie);
        ends.ended(&lie);
        (0..3).for_each(|_| ends.ended(&EndKind::Closed.steer_reason("it closed")));
        let all = facts.all();
        let told = ["last_end", "ends", "last_shut", "shut"].map(|name| all[name].as_str());
        let shut = ["queue 1 in session 3: it jumped", "used_index 1"];
        assert_eq!(told, ["it closed", "closed 3, used_index 1", shut[0], shut[1]]);
    }
}

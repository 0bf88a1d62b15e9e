//! Reasons why queues were shut and sessions ended, for reports.

use std::collections::BTreeMap;

use crate::Facts;

/// Reason why a queue is unusable for the rest of a session, or a session ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Reason {
    pub(super) kind: EndKind,
    /// Observation, as in "the used index went from 3 to 900 with 64 buffers posted".
    pub(super) why: String,
}

/// Kind of reason, for counting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum EndKind {
    /// The back end closed the connection.
    Closed,
    /// A message was not answered, or answered wrongly.
    Message,
    /// The device's used index advanced further than buffers were posted.
    UsedIndex,
    /// The device returned a buffer that was not posted.
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

    pub(super) fn reason(self, why: impl Into<String>) -> Reason {
        Reason { kind: self, why: why.into() }
    }
}

/// Ends of all sessions, as facts: `last_end` and `last_shut` in words, `ends` and `shut` as counts
/// of each kind. Facts of earlier sessions are kept; the number of kinds bounds them.
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

    /// Records the end of a session.
    pub(super) fn ended(&mut self, reason: &Reason) {
        let ends = self.ends.add(reason.kind);
        self.facts.set_together([("last_end", reason.why.clone()), ("ends", ends)]);
    }

    /// Records that a queue was shut. The session may go on. Returns the record.
    pub(super) fn shut(
        &mut self,
        session: u64,
        queue: usize,
        Reason { kind, why }: &Reason,
    ) -> String {
        let last = format!("queue {queue} in session {session}: {why}");
        self.facts.set_together([("last_shut", last.clone()), ("shut", self.shut.add(*kind))]);
        last
    }
}

impl EndCounts {
    /// Adds one. Returns all counts, as in `closed 2, used_index 1`.
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
        let lie = EndKind::UsedIndex.reason("it jumped");
        assert_eq!(ends.shut(3, 1, &lie), "queue 1 in session 3: it jumped");
        ends.ended(&lie);
        (0..3).for_each(|_| ends.ended(&EndKind::Closed.reason("it closed")));
        let all = facts.all();
        let told = ["last_end", "ends", "last_shut", "shut"].map(|name| all[name].as_str());
        let shut = ["queue 1 in session 3: it jumped", "used_index 1"];
        assert_eq!(told, ["it closed", "closed 3, used_index 1", shut[0], shut[1]]);
    }
}

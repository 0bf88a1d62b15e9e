//! Segment that was sent, and what is known of it.

use super::super::send_queue::PacketMarks;
use super::super::seq::Seq;
use super::rate::Deliveries;

/// A segment that was sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sent {
    pub(super) seq: Seq,
    pub(super) end: Seq,
    /// Time of the last transmission, in µs.
    pub(super) sent_us: u64,
    /// Deliveries before it.
    pub(super) deliveries: Deliveries,
    pub(super) marks: Marks,
}

impl Sent {
    /// Length without a FIN. A SYN counts as a byte.
    pub(super) fn payload_bytes(&self) -> u32 {
        self.end - self.seq - u32::from(self.marks.is_fin)
    }

    /// Length without a SYN and a FIN.
    pub(super) fn data_bytes(&self) -> u32 {
        self.payload_bytes() - u32::from(self.marks.is_syn)
    }
}

/// Facts about a segment that was sent.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Marks {
    pub(super) sacked: bool,
    pub(super) lost: bool,
    /// Sent again, and that transmission is outstanding.
    pub(super) retransmitted: bool,
    /// Sent again at any time.
    pub(super) ever_retransmitted: bool,
    pub(super) is_syn: bool,
    pub(super) is_fin: bool,
    pub(super) ending: Ending,
    /// Was sent in one packet with the segment before.
    pub(super) is_joined: bool,
    /// Was sent when the application had no more to send.
    pub(super) is_app_limited: bool,
}

/// End of a segment, by the end of the packet that it was written into: PSH is set there, or a record ends
/// (`MSG_EOR`). In one byte.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) enum Ending {
    #[default]
    Plain,
    Pushed,
    Record,
    PushedRecord,
}

impl Ending {
    pub(super) fn of(marks: PacketMarks) -> Self {
        match (marks.is_pushed, marks.ends_record) {
            (false, false) => Self::Plain,
            (true, false) => Self::Pushed,
            (false, true) => Self::Record,
            (true, true) => Self::PushedRecord,
        }
    }

    pub(super) fn is_pushed(self) -> bool {
        matches!(self, Self::Pushed | Self::PushedRecord)
    }

    /// Adds PSH.
    pub(super) fn pushed(self) -> Self {
        Self::Pushed.followed_by(self)
    }

    pub(super) fn ends_record(self) -> bool {
        matches!(self, Self::Record | Self::PushedRecord)
    }

    /// Ending of a segment with this one behind it.
    pub(super) fn followed_by(self, next: Self) -> Self {
        let is_pushed = self.is_pushed() || next.is_pushed();
        let ends_record = next.ends_record();
        Self::of(PacketMarks { is_pushed, ends_record, ..PacketMarks::default() })
    }
}

impl Marks {
    /// True if time says no more about the segment: it arrived, or is to be sent again.
    pub(super) fn is_settled(self) -> bool {
        self.sacked || self.awaits_resend()
    }

    pub(super) fn awaits_resend(self) -> bool {
        self.lost && !self.retransmitted && !self.sacked
    }
}

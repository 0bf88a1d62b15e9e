//! A case: what is sent, and what may become of it.

use std::time::Duration;

use crate::frames::Frame;
use crate::gro::around::Around;
use crate::gro::segment::{Segment, Transport};

pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) segments: Vec<Segment>,
    pub(crate) expected: Expected,
    /// Frames that must not be merged with any other.
    pub(crate) alone: Vec<usize>,
}

pub(crate) enum Expected {
    /// One of these lists of payload lengths, in the order of leaving.
    Payloads(Vec<Vec<usize>>),
    /// Payload lengths of the flow from a port: flows have no order among them.
    ByPort(Vec<(u16, Vec<usize>)>),
    /// At least so many merged packets.
    Merged(usize),
    /// Nothing but the laws.
    Lawful,
}

/// A case with one list of payload lengths that is right, or several that are.
pub(crate) fn case<const N: usize>(
    name: &'static str,
    segments: impl Into<Vec<Segment>>,
    accepted: [&[usize]; N],
) -> Case {
    let accepted = accepted.map(<[usize]>::to_vec).to_vec();
    Case {
        name,
        segments: segments.into(),
        expected: Expected::Payloads(accepted),
        alone: Vec::new(),
    }
}

impl Case {
    pub(crate) fn expecting(self, expected: Expected) -> Self {
        Self { expected, ..self }
    }

    pub(crate) fn alone(self, alone: &[usize]) -> Self {
        Self { alone: alone.to_vec(), ..self }
    }

    /// All that is sent, with the case's number in the source addresses: behind the segments, what
    /// ends each flow.
    pub(crate) fn frames(&self, number: u8) -> Vec<(Duration, Frame)> {
        let all = self.segments.iter().cloned().chain(self.ends());
        all.map(|segment| {
            let time = Duration::from_millis(segment.at_ms);
            (time, segment.of_case(number).frame())
        })
        .collect()
    }

    /// True if all of it fits into a tunnel: of an IP packet of the largest size, nothing can be sent in one.
    pub(crate) fn fits(&self, around: Around) -> bool {
        const LARGEST: usize = 60_000;
        let frames = self.frames(0);
        let bytes = |(_, frame): &(Duration, Frame)| frame.bytes.len();
        around == Around::Nothing || frames.iter().map(bytes).sum::<usize>() < LARGEST
    }

    /// True if it is about pauses.
    pub(crate) fn is_timed(&self) -> bool {
        self.segments.iter().any(|segment| segment.at_ms > 0)
    }

    fn ends(&self) -> Vec<Segment> {
        let mut flows: Vec<&Segment> = Vec::new();
        for segment in self.segments.iter().rev() {
            let is_tcp = |segment: &Segment| segment.transport == Transport::Tcp;
            let is_known = |known: &&Segment| {
                known.source_port == segment.source_port && is_tcp(known) == is_tcp(segment)
            };
            if !flows.iter().any(is_known) {
                flows.push(segment);
            }
        }
        flows.into_iter().rev().map(Segment::end).collect()
    }
}

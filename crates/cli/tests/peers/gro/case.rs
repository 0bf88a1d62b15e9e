//! A case: frames sent, and permitted results.

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
    /// One of these lists of payload lengths, in the order in which packets leave.
    Payloads(Vec<Vec<usize>>),
    /// Payload lengths of the flow from each port: flows are not ordered among each other.
    ByPort(Vec<(u16, Vec<usize>)>),
    /// At least this many merged packets.
    Merged(usize),
    /// Any result that satisfies the laws.
    Lawful,
}

/// A case with one or several permitted lists of payload lengths.
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

    /// All frames, with the case's number in the source addresses: the segments, then the segments
    /// that end each flow.
    pub(crate) fn frames(&self, number: u8) -> Vec<(Duration, Frame)> {
        let all = self.segments.iter().cloned().chain(self.ends());
        all.map(|segment| {
            let time = Duration::from_millis(segment.at_ms);
            (time, segment.of_case(number).frame())
        })
        .collect()
    }

    /// True if the merged packet fits into a tunnel: the largest IP packet does not.
    pub(crate) fn fits(&self, around: Around) -> bool {
        const LARGEST: usize = 60_000;
        let frames = self.frames(0);
        let bytes = |(_, frame): &(Duration, Frame)| frame.bytes.len();
        around == Around::Nothing || frames.iter().map(bytes).sum::<usize>() < LARGEST
    }

    /// True if the case depends on pauses.
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

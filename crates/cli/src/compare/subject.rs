//! Programs to be measured.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// Program of a comparison.
pub(super) struct Subject<'a> {
    pub(super) group: SubjectGroup,
    pub(super) name: String,
    pub(super) author: Author,
    /// True if the seed of the round determines what is drawn in a turn.
    pub(super) is_seeded: bool,
    /// One turn.
    pub(super) measure: Box<dyn Fn(RoundSeed) -> Result<TurnFigures, String> + 'a>,
}

/// Programs that are compared with each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct SubjectGroup {
    pub(super) name: &'static str,
    /// Quantities of one turn, in the order of the report.
    pub(super) metrics: &'static [Quantity],
    pub(super) turn: TurnLength,
}

/// Length of what a turn measures.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum TurnLength {
    /// Window, in milliseconds.
    WindowMs(u64),
    /// Number of pings.
    Pings(u16),
    /// Repeats, and the seconds that they may take.
    Repeats {
        /// Number of repeats.
        count: u32,
        /// Upper bound on their time.
        seconds_max: u32,
    },
}

impl TurnLength {
    pub(super) fn window(window: Duration) -> Self {
        Self::WindowMs(u64::try_from(window.as_millis()).unwrap_or(u64::MAX))
    }
}

impl fmt::Display for TurnLength {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WindowMs(ms) => write!(f, "{ms} ms"),
            Self::Pings(count) => write!(f, "{count} pings"),
            Self::Repeats { count, seconds_max } => {
                write!(f, "{count} repeats within {seconds_max} s")
            }
        }
    }
}

/// Seed of all that is drawn in a round: the round's number, from 1 on. All programs of a round have the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RoundSeed(pub(super) u16);

/// Side that a program is on (`side` in the JSON).
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Author {
    /// Another project: the kernel, DPDK, libxdp.
    Peer,
    /// This project.
    Forebay,
}

/// Measured quantity.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Quantity {
    pub(super) name: &'static str,
    pub(super) unit: &'static str,
    pub(super) better: Better,
}

/// Direction in which figures are better.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Better {
    /// More is better.
    More,
    /// Less is better.
    Less,
}

/// Figures of one turn.
#[derive(Clone, Debug, Default)]
pub(super) struct TurnFigures {
    /// Figures by the name of the metric.
    pub(super) figures: BTreeMap<&'static str, Vec<TurnFigure>>,
    /// Requests that the figures are of, if they are of requests that can be lost.
    pub(super) requests: Option<RequestCounts>,
}

/// One figure of a turn. Most turns have one for each metric; a program that repeats within its
/// turn has one for each class of cache distance.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TurnFigure {
    pub(super) value: f64,
    /// Class that the program itself determined.
    pub(super) class: Option<String>,
}

/// Upper bound on the requests without an answer of a row that has ratios, of a thousand: with more, a 99th
/// percentile of the answered ones says little of all.
pub(super) const LOST_PER_THOUSAND_MAX: u64 = 5;

/// Requests sent, and those of them that were answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize)]
pub(super) struct RequestCounts {
    pub(super) sent: u64,
    pub(super) answered: u64,
}

impl RequestCounts {
    /// Sum with the requests of another turn.
    pub(super) fn and(self, other: Self) -> Self {
        Self { sent: self.sent + other.sent, answered: self.answered + other.answered }
    }

    pub(super) fn lost(self) -> u64 {
        self.sent.saturating_sub(self.answered)
    }

    /// True if so many are lost that the times of the answered ones are not compared.
    pub(super) fn are_too_few_answered(self) -> bool {
        self.lost() * 1000 > self.sent * LOST_PER_THOUSAND_MAX
    }
}

impl TurnFigures {
    /// Adds a figure of the whole turn.
    pub(super) fn with(mut self, metric: &'static str, value: f64) -> Self {
        self.add(metric, TurnFigure { value, class: None });
        self
    }

    /// Adds the requests that the figures are of.
    pub(super) fn with_requests(self, requests: RequestCounts) -> Self {
        Self { requests: Some(requests), ..self }
    }

    pub(super) fn add(&mut self, metric: &'static str, figure: TurnFigure) {
        self.figures.entry(metric).or_default().push(figure);
    }
}

impl<'a> Subject<'a> {
    pub(super) fn new(
        group: SubjectGroup,
        author: Author,
        name: impl Into<String>,
        measure: impl Fn() -> Result<TurnFigures, String> + 'a,
    ) -> Self {
        let measure = move |_| measure();
        Self { is_seeded: false, ..Self::seeded(group, author, name, measure) }
    }

    /// Creates a subject whose turns draw by the seed of the round.
    pub(super) fn seeded(
        group: SubjectGroup,
        author: Author,
        name: impl Into<String>,
        measure: impl Fn(RoundSeed) -> Result<TurnFigures, String> + 'a,
    ) -> Self {
        Self { group, name: name.into(), author, is_seeded: true, measure: Box::new(measure) }
    }
}

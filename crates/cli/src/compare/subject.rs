//! Programs to be measured.

use std::collections::BTreeMap;

/// Program of a comparison.
pub(super) struct Subject<'a> {
    /// Subjects with the same group are compared with each other.
    pub(super) group: &'static str,
    pub(super) name: String,
    pub(super) author: Author,
    /// Quantities of one turn, in the order of the report.
    pub(super) metrics: &'static [Quantity],
    /// One turn.
    pub(super) measure: Box<dyn Fn() -> Result<TurnFigures, String> + 'a>,
}

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
}

/// One figure of a turn. Most turns have one for each metric; a program that repeats within its
/// turn has one for each class of cache distance.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TurnFigure {
    pub(super) value: f64,
    /// Class that the program itself determined.
    pub(super) class: Option<String>,
}

impl TurnFigures {
    /// Adds a figure of the whole turn.
    pub(super) fn with(mut self, metric: &'static str, value: f64) -> Self {
        self.add(metric, TurnFigure { value, class: None });
        self
    }

    pub(super) fn add(&mut self, metric: &'static str, figure: TurnFigure) {
        self.figures.entry(metric).or_default().push(figure);
    }
}

impl<'a> Subject<'a> {
    pub(super) fn new(
        group: &'static str,
        author: Author,
        name: impl Into<String>,
        metrics: &'static [Quantity],
        measure: impl Fn() -> Result<TurnFigures, String> + 'a,
    ) -> Self {
        Self { group, name: name.into(), author, metrics, measure: Box::new(measure) }
    }
}

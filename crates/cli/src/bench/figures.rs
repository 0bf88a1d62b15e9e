//! Output of a benchmark.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;

/// One line of output.
#[derive(Debug, Serialize)]
pub(super) struct Figures {
    name: &'static str,
    unit: &'static str,
    #[serde(flatten)]
    spread: RoundSpread,
    /// Parameters and conditions of the measurement.
    #[serde(flatten)]
    details: BTreeMap<&'static str, Value>,
}

/// Median, minimum and maximum of some repeats.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct RoundSpread {
    median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
    pub(crate) n: usize,
}

impl RoundSpread {
    pub(crate) fn of(samples: &[f64]) -> Self {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let n = sorted.len();
        let (Some(&min), Some(&max)) = (sorted.first(), sorted.last()) else {
            return Self::default();
        };
        let median = f64::midpoint(sorted[(n - 1) / 2], sorted[n / 2]);
        Self { median, min, max, n }
    }

    pub(crate) fn median(&self) -> f64 {
        self.median
    }
}

impl Figures {
    pub(super) fn new(name: &'static str, unit: &'static str, spread: RoundSpread) -> Self {
        Self { name, unit, spread, details: BTreeMap::new() }
    }

    /// Adds a parameter or condition.
    pub(super) fn with(mut self, name: &'static str, value: impl Serialize) -> Self {
        // Never fails: numbers, strings and structures of them can always be serialized.
        self.details.insert(name, serde_json::to_value(value).unwrap_or_default());
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_are_in_the_middle() {
        let spread = |median, min, max, n| RoundSpread { median, min, max, n };
        assert_eq!(RoundSpread::of(&[3.0, 1.0, 2.0]), spread(2.0, 1.0, 3.0, 3));
        assert_eq!(RoundSpread::of(&[4.0, 1.0, 2.0, 3.0]), spread(2.5, 1.0, 4.0, 4));
        assert_eq!(RoundSpread::of(&[]), RoundSpread::default());
    }
}

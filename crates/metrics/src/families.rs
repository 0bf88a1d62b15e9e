//! Metric families of one type, in the OpenMetrics format.

use std::collections::HashMap;
use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

use forebay_rx::counters::Histogram;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::exemplar::Exemplar;
use prometheus_client::registry::Unit;

/// Label: its name and its value.
pub(crate) type Label<'a> = (&'static str, &'a str);

/// Bounds of the buckets of times: from a quarter of a microsecond to 17 seconds, in nanoseconds.
const TIME_BUCKETS: RangeInclusive<u64> = 1 << 8..=1 << 34;

/// Bounds of the buckets of numbers: up to a burst's packets, and beyond it.
const NUMBER_BUCKETS: RangeInclusive<u64> = 1..=1 << 10;

/// Upper bound of a histogram's buckets.
const BUCKETS_SHOWN_MAX: usize = 32;

/// No exemplars, and the types that their absence has.
const NO_EXEMPLAR: Option<&Exemplar<[Label<'static>; 0], f64>> = None;

/// Encoder of whole families.
pub(crate) struct Families<'a>(DescriptorEncoder<'a>);

impl<'a> Families<'a> {
    pub(crate) fn new(encoder: DescriptorEncoder<'a>) -> Self {
        Self(encoder)
    }

    /// Adds a family of counters.
    pub(crate) fn counters<L: EncodeLabelSet>(
        &mut self,
        (name, help): (&str, &str),
        unit: Option<&Unit>,
        samples: impl IntoIterator<Item = (L, u64)>,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, unit, MetricType::Counter)?;
        samples.into_iter().try_for_each(|(labels, count)| {
            family.encode_family(&labels)?.encode_counter(&count, NO_EXEMPLAR)
        })
    }

    /// Adds a family of counters of time, given in nanoseconds.
    pub(crate) fn time_counters<L: EncodeLabelSet>(
        &mut self,
        (name, help): (&str, &str),
        samples: impl IntoIterator<Item = (L, u64)>,
    ) -> fmt::Result {
        let unit = Some(&Unit::Seconds);
        let mut family = self.0.encode_descriptor(name, help, unit, MetricType::Counter)?;
        samples.into_iter().try_for_each(|(labels, ns)| {
            family.encode_family(&labels)?.encode_counter(&seconds(ns), NO_EXEMPLAR)
        })
    }

    /// Adds a family of gauges.
    pub(crate) fn gauges<L: EncodeLabelSet>(
        &mut self,
        (name, help): (&str, &str),
        unit: Option<&Unit>,
        samples: impl IntoIterator<Item = (L, f64)>,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, unit, MetricType::Gauge)?;
        samples
            .into_iter()
            .try_for_each(|(labels, value)| family.encode_family(&labels)?.encode_gauge(&value))
    }

    /// Adds a family of histograms of times, given in nanoseconds.
    pub(crate) fn time_histograms<'h, L: EncodeLabelSet>(
        &mut self,
        about: (&str, &str),
        samples: impl IntoIterator<Item = (L, &'h Histogram)>,
    ) -> fmt::Result {
        self.histograms(about, Some(&Unit::Seconds), TIME_BUCKETS, seconds, samples)
    }

    /// Adds a family of histograms of numbers.
    pub(crate) fn number_histograms<'h, L: EncodeLabelSet>(
        &mut self,
        about: (&str, &str),
        samples: impl IntoIterator<Item = (L, &'h Histogram)>,
    ) -> fmt::Result {
        self.histograms(about, None, NUMBER_BUCKETS, gauge, samples)
    }

    fn histograms<'h, L: EncodeLabelSet>(
        &mut self,
        (name, help): (&str, &str),
        unit: Option<&Unit>,
        shown: RangeInclusive<u64>,
        value: fn(u64) -> f64,
        samples: impl IntoIterator<Item = (L, &'h Histogram)>,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, unit, MetricType::Histogram)?;
        samples.into_iter().try_for_each(|(labels, histogram)| {
            let (sum, buckets) = (value(histogram.sum()), buckets(histogram, &shown, value));
            let count = buckets.iter().map(|(_, count)| count).sum();
            let exemplars = None::<&HashMap<usize, Exemplar<[Label<'static>; 0], f64>>>;
            family.encode_family(&labels)?.encode_histogram(sum, count, &buckets, exemplars)
        })
    }

    /// Adds a family of facts that are labels.
    pub(crate) fn infos<L: EncodeLabelSet>(
        &mut self,
        (name, help): (&str, &str),
        facts: impl IntoIterator<Item = L>,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, None, MetricType::Info)?;
        facts.into_iter().try_for_each(|labels| family.encode_info(&labels))
    }
}

/// Buckets whose bounds are in a range, the last of which has no bound.
fn buckets(
    histogram: &Histogram,
    shown: &RangeInclusive<u64>,
    value: fn(u64) -> f64,
) -> Vec<(f64, u64)> {
    let mut buckets = Vec::with_capacity(BUCKETS_SHOWN_MAX);
    let mut below = 0;
    for (bound, count) in histogram.buckets() {
        below += count;
        if let Some(bound) = bound.filter(|bound| shown.contains(bound)) {
            buckets.push((value(bound), std::mem::take(&mut below)));
        }
    }
    buckets.push((f64::INFINITY, below));
    buckets
}

/// Seconds of a time in nanoseconds.
pub(crate) fn seconds(ns: u64) -> f64 {
    Duration::from_nanos(ns).as_secs_f64()
}

/// Value of a gauge: exact below 2^53.
#[expect(clippy::cast_precision_loss, reason = "the format's numbers are of this type")]
pub(crate) fn gauge(value: u64) -> f64 {
    value as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn met_5_buckets_beyond_range_are_kept() {
        let none = buckets(&Histogram::default(), &TIME_BUCKETS, seconds);
        assert_eq!(none.len(), 28);
        assert_eq!(none.first(), Some(&(256e-9, 0)));
        assert_eq!(none.last(), Some(&(f64::INFINITY, 0)));
        assert!(none.len() <= BUCKETS_SHOWN_MAX);
        let [.., (last, _), _] = none.as_slice() else { panic!("too few") };
        assert!((last - 17.18).abs() < 0.001, "{last}");
        assert_eq!(
            buckets(&Histogram::default(), &NUMBER_BUCKETS, gauge)[..2],
            [(1.0, 0), (2.0, 0)]
        );
    }
}

//! Metrics named by the dashboard and the alert rules.

use std::collections::BTreeSet;

use forebay_metrics::{Metrics, TextFormat};

use crate::scrape::full_metrics;

/// Files that name metrics.
const FILES: [(&str, &str); 2] = [
    ("forebay.json", include_str!("../../../../contrib/grafana/forebay.json")),
    ("forebay.rules.yml", include_str!("../../../../contrib/prometheus/forebay.rules.yml")),
];

/// Names that samples of all families can have.
fn sample_names(metrics: &Metrics) -> BTreeSet<String> {
    let text = metrics.text(TextFormat::OpenMetrics);
    let families = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    let names = families.flat_map(|(family, kind)| {
        let suffixes: &[&str] = match kind {
            "counter" => &["_total"],
            "histogram" => &["_bucket", "_sum", "_count"],
            "info" => &["_info"],
            _ => &[""],
        };
        suffixes.iter().map(move |suffix| format!("{family}{suffix}"))
    });
    names.collect()
}

/// Names of metrics in a text.
fn named(text: &str) -> BTreeSet<&str> {
    let is_part =
        |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '_';
    let words = text.split(|letter| !is_part(letter));
    words.filter(|word| word.starts_with("forebay_")).collect()
}

#[test]
fn met_6_named_metrics_are_scraped() {
    let scraped = sample_names(&full_metrics());
    for (file, text) in FILES {
        let named = named(text);
        assert!(named.len() >= 8, "{file} names {named:?}");
        for name in named {
            assert!(scraped.contains(name), "{file}: nothing is called {name}");
        }
    }
}

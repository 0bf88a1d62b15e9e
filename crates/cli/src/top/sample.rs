//! Metrics of a run at one time, read from their text.

use std::collections::{BTreeMap, HashMap};
use std::time::Instant;

use forebay_control::top_flows::TopFlow;
use forebay_metrics::{CONNECTIONS_LISTED_MAX, SOCKETS_LISTED_MAX};

/// Values of the labels by which samples are told apart.
pub(super) type Key = Vec<String>;

/// First parts of the names of metrics of lists, and the most members that a list has.
const LISTS: [(&str, usize); 2] =
    [("forebay_tcp_connection_", CONNECTIONS_LISTED_MAX), ("forebay_socket_", SOCKETS_LISTED_MAX)];

/// Metrics of a run at one time.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    /// Time of the answer.
    pub(super) at: Instant,
    families: HashMap<String, Vec<Series>>,
    pub(super) masks: Masks,
    /// Flows with the most packets in a sample of bursts.
    pub(super) flows: Vec<TopFlow>,
    /// Number of the connection that it came by. Another one may be to another run.
    pub(super) connection: u64,
}

/// Masks `rps_cpus`, by the names of their queues.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Masks(BTreeMap<String, String>);

impl Masks {
    /// Reads the answer to `get rps_cpus`: the mask of the only queue, or for each a line with the
    /// knob's name in front.
    pub(super) fn read<S: AsRef<str>>(lines: &[S]) -> Self {
        let line = |line: &S| {
            let (knob, mask) = line.as_ref().rsplit_once(' ').unwrap_or(("", line.as_ref()));
            let queue = knob.rsplit_once('/').map_or("", |(queue, _)| queue);
            (queue.to_owned(), mask.to_owned())
        };
        Self(lines.iter().map(line).collect())
    }

    /// Mask of a queue, by its name as `explain` gives it.
    pub(super) fn of(&self, queue: &str) -> Option<&str> {
        self.0.get(queue).or_else(|| self.0.get("")).map(String::as_str)
    }
}

/// Value of a metric for one set of labels.
#[derive(Clone, PartialEq, Debug)]
struct Series {
    labels: Vec<(String, String)>,
    value: f64,
}

impl Sample {
    /// Reads a text in the OpenMetrics format. Comments and malformed lines are ignored.
    pub(super) fn read<S: AsRef<str>>(at: Instant, lines: &[S], masks: Masks) -> Self {
        let mut families: HashMap<String, Vec<Series>> = HashMap::new();
        for line in lines.iter().map(AsRef::as_ref) {
            if let Some((name, series)) = read_line(line) {
                families.entry(name.to_owned()).or_default().push(series);
            }
        }
        Self { at, families, masks, flows: Vec::new(), connection: 0 }
    }

    /// Sums of a metric's values by some of its labels.
    pub(super) fn by(&self, name: &str, labels: &[&str]) -> BTreeMap<Key, f64> {
        let mut sums = BTreeMap::new();
        for series in self.families.get(name).into_iter().flatten() {
            *sums.entry(series.key(labels)).or_insert(0.0) += series.value;
        }
        sums
    }

    /// Growth of a counter since an earlier sample, by some of its labels. Each set of labels has a
    /// counter of its own, which begins at 0 in a new run. What enters a list that was full did not
    /// grow, as far as the samples tell: it may have been there before.
    pub(super) fn growth_since(
        &self,
        before: &Self,
        name: &str,
        labels: &[&str],
    ) -> BTreeMap<Key, f64> {
        let earlier = before.families.get(name).map_or(&[][..], Vec::as_slice);
        let was_full = LISTS.iter().any(|(of, max)| name.starts_with(of) && earlier.len() >= *max);
        let earlier: HashMap<_, _> =
            earlier.iter().map(|series| (&series.labels, series.value)).collect();
        let mut growth = BTreeMap::new();
        for series in self.families.get(name).into_iter().flatten() {
            let new = if was_full { series.value } else { 0.0 };
            let then = earlier.get(&series.labels).copied().unwrap_or(new);
            *growth.entry(series.key(labels)).or_insert(0.0) += (series.value - then).max(0.0);
        }
        growth
    }

    /// Sum of a metric's values.
    pub(super) fn sum(&self, name: &str) -> f64 {
        sum_of(self.families.get(name).into_iter().flatten().map(|series| series.value))
    }

    /// True if the run has this metric.
    pub(super) fn has(&self, name: &str) -> bool {
        self.families.contains_key(name)
    }
}

impl Series {
    fn key(&self, labels: &[&str]) -> Key {
        labels.iter().map(|label| self.label(label).to_owned()).collect()
    }

    fn label(&self, name: &str) -> &str {
        let named = self.labels.iter().find(|(label, _)| label == name);
        named.map_or("", |(_, value)| value.as_str())
    }
}

/// Sum of values. That of none is 0, and not -0 as the standard library's.
pub(super) fn sum_of(values: impl IntoIterator<Item = f64>) -> f64 {
    values.into_iter().fold(0.0, |sum, value| sum + value)
}

/// Metric of a line, and its value.
fn read_line(line: &str) -> Option<(&str, Series)> {
    if line.starts_with('#') {
        return None;
    }
    let end = line.find(['{', ' '])?;
    let (name, rest) = line.split_at(end);
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(rest) => read_labels(rest)?,
        None => (Vec::new(), rest),
    };
    let value = rest.split_whitespace().next()?.parse().ok()?;
    Some((name, Series { labels, value }))
}

/// Labels up to the closing brace, and the text behind it.
fn read_labels(mut rest: &str) -> Option<(Vec<(String, String)>, &str)> {
    let mut labels = Vec::new();
    loop {
        rest = rest.trim_start_matches(',');
        if let Some(behind) = rest.strip_prefix('}') {
            return Some((labels, behind));
        }
        let (name, quoted) = rest.split_once("=\"")?;
        let (value, behind) = read_quoted(quoted)?;
        labels.push((name.to_owned(), value));
        rest = behind;
    }
}

/// Text up to the closing quote, without its escapes, and the text behind it.
fn read_quoted(quoted: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut chars = quoted.char_indices();
    while let Some((at, char)) = chars.next() {
        match char {
            '"' => return Some((value, &quoted[at + 1..])),
            '\\' => match chars.next()?.1 {
                'n' => value.push('\n'),
                other => value.push(other),
            },
            char => value.push(char),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(text: &str) -> Sample {
        Sample::read(Instant::now(), &text.lines().collect::<Vec<_>>(), Masks::default())
    }

    #[test]
    fn top_1_masks_have_names_of_queues() {
        let one = Masks::read(&["00000003"]);
        assert_eq!((one.of("rx-0"), one.of("eth1/rx-0")), (Some("00000003"), Some("00000003")));
        let several = Masks::read(&["eth2/rx-0/rps_cpus 1,00000003", "eth10/rx-0/rps_cpus 2"]);
        assert_eq!(several.of("eth2/rx-0"), Some("1,00000003"));
        assert_eq!((several.of("eth10/rx-0"), several.of("rx-0")), (Some("2"), None));
    }

    #[test]
    fn top_1_sample_sums_by_labels() {
        let sample = read(
            "# HELP a Of a\n# TYPE a counter\na_total{cpu=\"0\",reason=\"rps\"} 5\n\
             a_total{cpu=\"0\",reason=\"held\"} 2\na_total{cpu=\"1\",reason=\"rps\"} 1.5\nb 7\n\
             c{to=\"a\\\"b\\\\c\\nd,e}\"} 1e3\nbroken{x=\"1\nbroken{x=\"1\"}\nbroken\n# EOF\n",
        );
        let key = |text: &str| text.split(' ').map(str::to_owned).collect::<Key>();
        assert_eq!(sample.by("a_total", &["cpu"]), [(key("0"), 7.0), (key("1"), 1.5)].into());
        assert_eq!(sample.by("a_total", &["reason", "cpu"])[&key("rps 0")], 5.0);
        assert_eq!(sample.sum("b"), 7.0);
        assert_eq!(sample.by("c", &["to"]), [(vec!["a\"b\\c\nd,e}".to_owned()], 1000.0)].into());
        assert!(sample.has("b") && !sample.has("broken") && !sample.has("a"));
    }

    proptest! {
        #[test]
        fn promise_5_no_metrics_text_panics(text in "([a-z]{1,3}[{]?[a-z\"=\\\\},0-9 ]{0,20}\n)*|\\PC{0,40}") {
            let _ = read(&text);
        }
    }
}

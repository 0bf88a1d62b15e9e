//! Report of a comparison: medians, spreads and ratios.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Serialize;

use super::cpu::DISTURBED;
use super::machine::MachineFacts;
use super::subject::{Author, Better, Quantity, RequestCounts, Subject, SubjectGroup, TurnLength};
use super::turns::Taken;
use crate::bench::figures::RoundSpread;
use crate::bench::pair::CacheClass;

/// Class of a comparison without a turn at one cache distance.
pub(super) const NO_CLASS: &str = "none";

/// Report of a comparison.
#[derive(Debug, Serialize)]
pub(super) struct CompareReport {
    pub(super) version: &'static str,
    /// True if Forebay was built without optimization: its figures then say nothing.
    pub(super) is_debug_build: bool,
    /// Seconds since 1970.
    pub(super) at: u64,
    pub(super) machine: MachineFacts,
    pub(super) rounds: u16,
    /// Window as asked for; each comparison has its `turn`, which may be longer.
    pub(super) window_ms: u128,
    /// True if a signal has ended the comparison before its last turn.
    pub(super) is_interrupted: bool,
    /// Kinds that could not be prepared, with the reasons.
    pub(super) unprepared: BTreeMap<String, String>,
    pub(super) comparisons: Vec<Comparison>,
}

/// Figures of one group of subjects in one metric.
#[derive(Debug, Serialize)]
pub(super) struct Comparison {
    pub(super) group: &'static str,
    pub(super) metric: &'static str,
    pub(super) unit: &'static str,
    pub(super) better: Better,
    /// Length of what each turn measures.
    pub(super) turn: TurnLength,
    /// First and last seed of what is drawn, one for each round that is planned; none if nothing is.
    pub(super) seeds: Option<[u16; 2]>,
    /// Class of cache distance that the rows' figures are of: the one with the most samples; none if all of them moved.
    pub(super) class: String,
    pub(super) rows: Vec<CompareRow>,
}

/// Figures of one subject.
#[derive(Debug, Serialize)]
pub(super) struct CompareRow {
    pub(super) program: String,
    #[serde(rename = "side")]
    pub(super) author: Author,
    /// Figures in the comparison's class; none if there are no samples of it.
    pub(super) spread: Option<RoundSpread>,
    /// Figures in all classes.
    pub(super) classes: BTreeMap<String, RoundSpread>,
    /// Requests that the figures are of, in all turns; none if no request can be lost.
    pub(super) requests: Option<RequestCounts>,
    /// Of a peer: Forebay's median, divided by this one, for each of Forebay's programs. None of a program that lost
    /// more than [`LOST_PER_THOUSAND_MAX`](super::subject::LOST_PER_THOUSAND_MAX) of its requests.
    pub(super) ratios: BTreeMap<String, f64>,
    /// Reason why the subject has no figures, or no further ones.
    pub(super) reason: Option<String>,
}

impl CompareReport {
    pub(super) fn new(machine: MachineFacts, rounds: u16, window: Duration) -> Self {
        let at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let (version, is_debug_build) = (env!("CARGO_PKG_VERSION"), cfg!(debug_assertions));
        let window_ms = window.as_millis();
        Self {
            version,
            is_debug_build,
            at,
            machine,
            rounds,
            window_ms,
            is_interrupted: false,
            unprepared: BTreeMap::new(),
            comparisons: Vec::new(),
        }
    }

    /// Adds the figures of a kind.
    pub(super) fn add(&mut self, subjects: &[Subject<'_>], taken: &[Taken]) {
        let mut groups: Vec<SubjectGroup> = Vec::new();
        for subject in subjects {
            if !groups.contains(&subject.group) {
                groups.push(subject.group);
            }
        }
        for group in groups {
            let of_group = || subjects.iter().zip(taken).filter(|(of, _)| of.group == group);
            let is_seeded = of_group().any(|(subject, _)| subject.is_seeded);
            let seeds = is_seeded.then_some([1, self.rounds]);
            for metric in group.metrics {
                let rows =
                    of_group().map(|(subject, taken)| CompareRow::of(subject, taken, metric));
                let comparison = Comparison::of(group, *metric, rows.collect());
                self.comparisons.push(Comparison { seeds, ..comparison });
            }
        }
    }
}

impl Comparison {
    fn of(group: SubjectGroup, metric: Quantity, mut rows: Vec<CompareRow>) -> Self {
        let classes: BTreeSet<_> =
            rows.iter().flat_map(|row| row.classes.keys()).cloned().collect();
        let is_compared =
            |class: &String| ![CacheClass::Moved.name(), DISTURBED].contains(&class.as_str());
        let classes = classes.into_iter().filter(is_compared);
        let samples = |class: &String| -> usize {
            rows.iter().filter_map(|row| row.classes.get(class)).map(|spread| spread.n).sum()
        };
        let class = classes.max_by_key(samples).unwrap_or_else(|| NO_CLASS.to_owned());
        for row in &mut rows {
            row.spread = row.classes.get(&class).copied();
        }
        let is_ours = |row: &&CompareRow| row.author == Author::Forebay && row.has_answers();
        let ours = rows.iter().filter(is_ours);
        let ours = ours.filter_map(|row| Some((row.program.clone(), row.spread?.median())));
        let ours: Vec<_> = ours.collect();
        let is_peer = |row: &&mut CompareRow| row.author == Author::Peer && row.has_answers();
        for row in rows.iter_mut().filter(is_peer) {
            let Some(spread) = row.spread.filter(|spread| spread.median() > 0.0) else { continue };
            let ratio = |(name, median): &(String, f64)| (name.clone(), median / spread.median());
            row.ratios = ours.iter().map(ratio).collect();
        }
        let Quantity { name, unit, better } = metric;
        let SubjectGroup { name: group, turn, .. } = group;
        Self { group, metric: name, unit, better, turn, seeds: None, class, rows }
    }
}

impl CompareRow {
    fn of(subject: &Subject<'_>, taken: &Taken, metric: &Quantity) -> Self {
        let mut classes: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        for (sample, class) in &taken.samples {
            for figure in sample.figures.get(metric.name).into_iter().flatten() {
                let class = figure.class.clone().unwrap_or_else(|| (*class).to_owned());
                classes.entry(class).or_default().push(figure.value);
            }
        }
        let classes = classes.into_iter().map(|(class, values)| (class, RoundSpread::of(&values)));
        let requests = taken.samples.iter().filter_map(|(sample, _)| sample.requests);
        Self {
            program: subject.name.clone(),
            author: subject.author,
            spread: None,
            classes: classes.collect(),
            requests: requests.reduce(RequestCounts::and),
            ratios: BTreeMap::new(),
            reason: taken.failed.clone(),
        }
    }

    /// True unless so many of its requests are lost that it is not compared.
    fn has_answers(&self) -> bool {
        !self.requests.is_some_and(RequestCounts::are_too_few_answered)
    }
}

/// Report of made-up figures, for tests.
#[cfg(test)]
pub(super) fn made_up() -> CompareReport {
    use super::subject::TurnFigures;

    const QUANTITIES: &[Quantity] =
        &[Quantity { name: "received", unit: "kpps", better: Better::More }];
    let turn = TurnLength::WindowMs(3000);
    let group = SubjectGroup { name: "UDP socket", metrics: QUANTITIES, turn };
    let subject =
        |author, name: &str| Subject::seeded(group, author, name, |_| Ok(TurnFigures::default()));
    let taken = |values: &[(f64, &'static str)]| Taken {
        samples: values
            .iter()
            .map(|(value, class)| (TurnFigures::default().with("received", *value), *class))
            .collect(),
        failed: None,
    };
    let (near, far) = ("same_l3", "far_l3");
    let subjects = [
        subject(Author::Peer, "kernel"),
        subject(Author::Peer, "cpumap"),
        subject(Author::Forebay, "forebay, af_xdp"),
        subject(Author::Forebay, "forebay, af_packet"),
    ];
    let absent = Taken { failed: Some("no C compiler (cc): install gcc".to_owned()), ..taken(&[]) };
    let taken = [
        taken(&[(100.0, far), (300.0, far), (200.0, far), (900.0, near)]),
        absent,
        taken(&[(100.0, far), (500.0, far), (300.0, far)]),
        taken(&[(50.0, far), (150.0, far), (1000.0, near)]),
    ];
    let machine = MachineFacts {
        processor: "A processor".to_owned(),
        cpus: 2,
        is_virtual: true,
        kernel: "6.18".to_owned(),
        compiler: "cc 12".to_owned(),
        load: 0.5,
    };
    let mut report = CompareReport::new(machine, 4, Duration::from_millis(400));
    report.add(&subjects, &taken);
    report
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::subject::TurnFigures;

    use super::*;

    const RECEIVED: Quantity = Quantity { name: "received", unit: "kpps", better: Better::More };
    const GROUP: SubjectGroup =
        SubjectGroup { name: "UDP socket", metrics: &[RECEIVED], turn: TurnLength::WindowMs(400) };

    #[test]
    fn cmp_5_lost_requests_leave_no_ratio() {
        let row = |author, name: &str, answered| CompareRow {
            program: name.to_owned(),
            author,
            spread: None,
            classes: BTreeMap::from([("far_l3".to_owned(), RoundSpread::of(&[4.0]))]),
            requests: Some(RequestCounts { sent: 1000, answered }),
            ratios: BTreeMap::new(),
            reason: None,
        };
        let compared = Comparison::of(
            GROUP,
            RECEIVED,
            vec![
                row(Author::Peer, "kernel", 995),
                row(Author::Peer, "libxdp", 994),
                row(Author::Forebay, "forebay", 1000),
                row(Author::Forebay, "forebay, lossy", 900),
            ],
        );
        let ratios = compared.rows.iter().map(|row| row.ratios.keys().map(String::as_str));
        let ratios: Vec<Vec<_>> = ratios.map(Iterator::collect).collect();
        assert_eq!(ratios, [vec!["forebay"], vec![], vec![], vec![]]);
        let row = serde_json::to_value(&compared.rows[1]).unwrap();
        assert_eq!(row["requests"], json!({ "sent": 1000, "answered": 994 }));
    }

    #[test]
    fn cmp_5_requests_of_turns_are_added() {
        let subject = Subject::new(GROUP, Author::Peer, "kernel", || Ok(TurnFigures::default()));
        let turn = |answered| {
            let requests = RequestCounts { sent: 10, answered };
            (TurnFigures::default().with_requests(requests), "far_l3")
        };
        let taken = Taken { samples: vec![turn(10), turn(7)], failed: None };
        let row = CompareRow::of(&subject, &taken, &RECEIVED);
        assert_eq!(row.requests, Some(RequestCounts { sent: 20, answered: 17 }));
    }

    #[test]
    fn cmp_3_ratios_are_of_one_class() {
        let report = serde_json::to_value(made_up()).unwrap();
        let comparison = &report["comparisons"][0];
        assert_eq!(
            (&comparison["class"], &comparison["better"]),
            (&json!("far_l3"), &json!("more"))
        );
        let spread = json!({ "median": 200.0, "min": 100.0, "max": 300.0, "n": 3 });
        assert_eq!(comparison["rows"][0]["spread"], spread);
        assert_eq!(comparison["rows"][0]["classes"]["same_l3"]["n"], 1);
        let ratios = json!({ "forebay, af_xdp": 1.5, "forebay, af_packet": 0.5 });
        assert_eq!(comparison["rows"][0]["ratios"], ratios);
        assert_eq!(comparison["rows"][2]["ratios"], json!({}));
    }

    #[test]
    fn cmp_3_moved_turns_have_no_ratio() {
        let samples = |values: &[f64]| {
            let moved = BTreeMap::from([("moved".to_owned(), RoundSpread::of(values))]);
            let row = |author| CompareRow {
                program: "kernel".to_owned(),
                author,
                spread: None,
                classes: moved.clone(),
                requests: None,
                ratios: BTreeMap::new(),
                reason: None,
            };
            vec![row(Author::Peer), row(Author::Forebay)]
        };
        let all_moved = Comparison::of(GROUP, RECEIVED, samples(&[1.0, 2.0]));
        assert_eq!(all_moved.class, NO_CLASS);
        let mut disturbed = samples(&[1.0]);
        for row in &mut disturbed {
            row.classes = BTreeMap::from([(DISTURBED.to_owned(), RoundSpread::of(&[1.0]))]);
        }
        assert_eq!(Comparison::of(GROUP, RECEIVED, disturbed).class, NO_CLASS);
        for row in &all_moved.rows {
            assert!(row.spread.is_none() && row.ratios.is_empty(), "{row:?}");
            assert_eq!(row.classes["moved"].n, 2);
        }
        let mut rows = samples(&[1.0, 2.0]);
        for row in &mut rows {
            row.classes.insert("far_l3".to_owned(), RoundSpread::of(&[4.0]));
        }
        let few_stayed = Comparison::of(GROUP, RECEIVED, rows);
        assert_eq!((few_stayed.class.as_str(), few_stayed.rows[0].ratios.len()), ("far_l3", 1));
    }

    #[test]
    fn cmp_2_row_without_figures_has_reason() {
        let report = serde_json::to_value(made_up()).unwrap();
        let row = &report["comparisons"][0]["rows"][1];
        assert_eq!((&row["program"], &row["spread"]), (&json!("cpumap"), &json!(null)));
        assert_eq!(row["reason"], "no C compiler (cc): install gcc");
    }

    #[test]
    fn cmp_3_document_states_machine_and_method() {
        let report = serde_json::to_value(made_up()).unwrap();
        assert_eq!((&report["rounds"], &report["window_ms"]), (&json!(4), &json!(400)));
        for fact in ["processor", "cpus", "is_virtual", "kernel", "compiler", "load"] {
            assert!(!report["machine"][fact].is_null(), "{fact}");
        }
        let comparison = &report["comparisons"][0];
        assert_eq!(comparison["turn"], json!({ "window_ms": 3000 }));
        assert_eq!(comparison["seeds"], json!([1, 4]));
        assert_eq!((&report["is_interrupted"], &report["unprepared"]), (&json!(false), &json!({})));
    }
}

//! Rounds in which all subjects take turns, so that a change of the machine affects all alike.

use std::sync::atomic::{AtomicBool, Ordering};

use indicatif::ProgressBar;

use super::subject::{RoundSeed, Subject, TurnFigures};
use crate::bench::pair::CacheClass;

/// Rounds of a comparison.
pub(super) struct RoundPlan<'a> {
    pub(super) count: u16,
    /// Measures the distance of the CPUs before and after each turn.
    pub(super) distance: &'a dyn Fn() -> CacheClass,
    /// True once a signal has asked to end.
    pub(super) is_interrupted: &'a AtomicBool,
}

/// Turns of one subject.
#[derive(Default)]
pub(super) struct Taken {
    /// Figures of each turn, with the class of cache distance at that time.
    pub(super) samples: Vec<(TurnFigures, &'static str)>,
    /// Reason why the subject has no further turns.
    pub(super) failed: Option<String>,
}

/// Lets all subjects take turns. A subject that fails has no further turns.
pub(super) fn take(subjects: &[Subject<'_>], rounds: &RoundPlan<'_>) -> Vec<Taken> {
    let mut taken: Vec<_> = subjects.iter().map(|_| Taken::default()).collect();
    let bar = ProgressBar::new(u64::from(rounds.count) * subjects.len() as u64);
    'rounds: for round in 0..rounds.count {
        let seed = RoundSeed(round + 1);
        for turn in 0..subjects.len() {
            // Each round begins with another subject, so that none always follows the same one.
            let index = (usize::from(round) + turn) % subjects.len();
            bar.set_message(subjects[index].name.clone());
            if rounds.is_interrupted.load(Ordering::Relaxed) {
                break 'rounds;
            }
            take_one(&subjects[index], &mut taken[index], rounds, seed);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    if rounds.is_interrupted.load(Ordering::Relaxed) {
        for taken in taken.iter_mut().filter(|taken| taken.samples.is_empty()) {
            taken.failed.get_or_insert_with(|| "interrupted before its first turn".to_owned());
        }
    }
    taken
}

fn take_one(subject: &Subject<'_>, taken: &mut Taken, rounds: &RoundPlan<'_>, seed: RoundSeed) {
    if taken.failed.is_some() {
        return;
    }
    let before = (rounds.distance)();
    match (subject.measure)(seed) {
        Ok(sample) => taken.samples.push((sample, before.until((rounds.distance)()).name())),
        // The signal has ended the turn.
        Err(_) if rounds.is_interrupted.load(Ordering::Relaxed) => {}
        Err(reason) => taken.failed = Some(reason),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use super::super::subject::{Author, Better, Quantity, SubjectGroup, TurnLength};
    use super::*;

    const SPEED: &[Quantity] = &[Quantity { name: "speed", unit: "m/s", better: Better::More }];
    const GROUP: SubjectGroup =
        SubjectGroup { name: "g", metrics: SPEED, turn: TurnLength::WindowMs(1) };

    #[test]
    fn cmp_1_failed_subject_takes_no_further_turns() {
        let asked = Cell::new(0);
        let fails = Subject::new(GROUP, Author::Peer, "fails", || {
            asked.set(asked.get() + 1);
            Err("it is not there".to_owned())
        });
        let works = Subject::new(GROUP, Author::Forebay, "works", || {
            Ok(TurnFigures::default().with("speed", 1.0))
        });
        let distance = &|| CacheClass::FarL3;
        let rounds = RoundPlan { count: 3, distance, is_interrupted: &AtomicBool::new(false) };
        let taken = take(&[fails, works], &rounds);
        assert_eq!((asked.get(), taken[0].samples.len(), taken[1].samples.len()), (1, 0, 3));
        assert_eq!(taken[0].failed.as_deref(), Some("it is not there"));
    }

    #[test]
    fn cmp_1_rounds_have_seeds_of_their_own() {
        let seeds = [const { RefCell::new(Vec::new()) }; 2];
        let subjects = seeds.each_ref().map(|seeds: &RefCell<Vec<u16>>| {
            Subject::seeded(GROUP, Author::Peer, "p", |RoundSeed(seed)| {
                seeds.borrow_mut().push(seed);
                Ok(TurnFigures::default())
            })
        });
        let distance = &|| CacheClass::FarL3;
        let rounds = RoundPlan { count: 3, distance, is_interrupted: &AtomicBool::new(false) };
        take(&subjects, &rounds);
        drop(subjects);
        assert_eq!(seeds.map(RefCell::into_inner), [[1, 2, 3], [1, 2, 3]]);
    }

    #[test]
    fn cmp_2_interrupted_turns_have_a_reason() {
        let subject = Subject::new(GROUP, Author::Peer, "p", || Ok(TurnFigures::default()));
        let is_interrupted = &AtomicBool::new(true);
        let rounds = RoundPlan { count: 3, distance: &|| CacheClass::FarL3, is_interrupted };
        let taken = take(&[subject], &rounds);
        assert_eq!(taken[0].failed.as_deref(), Some("interrupted before its first turn"));
    }

    #[test]
    fn cmp_2_turn_that_signal_ends_keeps_others() {
        let (is_interrupted, turns) = (&AtomicBool::new(false), Cell::new(0));
        let subject = Subject::new(GROUP, Author::Peer, "p", || {
            turns.set(turns.get() + 1);
            if turns.get() < 3 {
                return Ok(TurnFigures::default().with("speed", 1.0));
            }
            is_interrupted.store(true, Ordering::Relaxed);
            Err("its programs were ended".to_owned())
        });
        let rounds = RoundPlan { count: 5, distance: &|| CacheClass::FarL3, is_interrupted };
        let taken = take(&[subject], &rounds);
        assert_eq!((turns.get(), taken[0].samples.len(), &taken[0].failed), (3, 2, &None));
    }
}

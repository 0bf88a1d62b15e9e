use loom::sync::Arc;
use loom::thread;

use super::*;

/// Fences in effect.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fences {
    /// All fences, as in the shipped code.
    All,
    /// All but the sleeper's in `prepare_to_wait`.
    NotInLieDown,
    /// All but the one before the sleep state is read.
    NotInWake,
    /// All but the one before the CPU to wake is read.
    NotInNextToWake,
}

impl Fences {
    fn prepare_to_wait(self, state: &SleepState) {
        match self {
            Self::NotInLieDown => state.0.store(Sleep::Parked as u8, Ordering::Relaxed),
            _ => state.prepare_to_wait(Sleep::Parked),
        }
    }

    fn wakes(self, state: &SleepState) -> bool {
        match self {
            Self::NotInWake => state.wake_behind_fence().is_some(),
            _ => state.wake().is_some(),
        }
    }

    fn next_to_wake(self, poller: &Poller) -> u16 {
        match self {
            Self::NotInNextToWake => poller.cpu(),
            _ => poller.next_to_wake(),
        }
    }
}

/// Work for one CPU, published relaxed: only the fences order it.
fn one_sleeper(fences: Fences) {
    loom::model(move || {
        let state = Arc::new(SleepState::default());
        let work = Arc::new(AtomicU8::new(0));
        let waker = {
            let (state, work) = (Arc::clone(&state), Arc::clone(&work));
            thread::spawn(move || {
                work.store(1, Ordering::Relaxed);
                fences.wakes(&state)
            })
        };
        fences.prepare_to_wait(&state);
        let finds_work = work.load(Ordering::Relaxed) == 1;
        let is_woken = waker.join().unwrap();
        assert!(finds_work || is_woken, "left asleep with work");
    });
}

#[test]
fn sleeper_is_woken_for_work() {
    one_sleeper(Fences::All);
}

#[test]
#[should_panic(expected = "left asleep with work")]
fn sleeper_without_fence_stays_asleep() {
    one_sleeper(Fences::NotInLieDown);
}

#[test]
#[should_panic(expected = "left asleep with work")]
fn waker_without_fence_leaves_sleeper() {
    one_sleeper(Fences::NotInWake);
}

/// A queue moves from CPU 0, which is awake and has no work any more, to CPU 1, while another
/// thread publishes work in the queue and wakes the CPU that has it.
fn change_of_hands(fences: Fences) {
    loom::model(move || {
        let state = Arc::new(SleepState::default());
        let (poller, work) = (Arc::new(Poller::new(0)), Arc::new(AtomicU8::new(0)));
        let waker = {
            let (state, poller, work) =
                (Arc::clone(&state), Arc::clone(&poller), Arc::clone(&work));
            thread::spawn(move || {
                work.store(1, Ordering::Relaxed);
                fences.next_to_wake(&poller) == 1 && fences.wakes(&state)
            })
        };
        poller.take_over(1);
        fences.prepare_to_wait(&state);
        let finds_work = work.load(Ordering::Relaxed) == 1;
        let is_woken = waker.join().unwrap();
        assert!(finds_work || is_woken, "left asleep with work");
    });
}

#[test]
fn handed_over_queue_keeps_no_work() {
    change_of_hands(Fences::All);
}

#[test]
#[should_panic(expected = "left asleep with work")]
fn early_waker_leaves_handed_queue() {
    change_of_hands(Fences::NotInNextToWake);
}

#[test]
#[should_panic(expected = "left asleep with work")]
fn fenceless_sleeper_leaves_handed_queue() {
    change_of_hands(Fences::NotInLieDown);
}

//! CPU that polls each queue, of those that run.
//!
//! Every queue has a CPU of its own, round-robin. While that one does not run, another polls the queue: the one with the
//! fewest queues. Every CPU computes the same from the same change, so they agree without asking each other.

use forebay_sys::cpu_list::CpuList;

/// Index in `cpus` of the CPU that polls each of this many queues, if only `running` run.
pub(super) fn pollers(cpus: &CpuList, queues: usize, running: &CpuList) -> Vec<usize> {
    let runs: Vec<bool> = cpus.cpus().iter().map(|cpu| running.contains(*cpu)).collect();
    let mut pollers: Vec<usize> = (0..queues).map(|queue| queue % runs.len()).collect();
    let mut polled = vec![0_usize; runs.len()];
    pollers.iter().for_each(|&cpu| polled[cpu] += 1);
    for poller in pollers.iter_mut().filter(|poller| !runs[**poller]) {
        let left = (0..runs.len()).filter(|&cpu| runs[cpu]);
        if let Some(cpu) = left.min_by_key(|&cpu| polled[cpu]) {
            polled[cpu] += 1;
            *poller = cpu;
        }
    }
    pollers
}

#[cfg(test)]
mod tests {
    use forebay_rx::CpuId;
    use proptest::prelude::*;

    use super::*;

    fn list(cpus: impl IntoIterator<Item = u16>) -> CpuList {
        CpuList::new(cpus.into_iter().map(CpuId))
    }

    #[test]
    fn rps_9_stopped_cpus_queues_are_shared() {
        let cpus = list([2, 3, 4, 5]);
        let of = |running: &[u16]| pollers(&cpus, 6, &list(running.iter().copied()));
        assert_eq!(of(&[2, 3, 4, 5]), [0, 1, 2, 3, 0, 1]);
        assert_eq!(of(&[2, 3]), [0, 1, 0, 1, 0, 1]);
        assert_eq!(of(&[3, 4, 5]), [2, 1, 2, 3, 3, 1]);
        assert_eq!(of(&[5]), [3; 6]);
    }

    proptest! {
        #[test]
        fn rps_9_queues_stay_or_spread_evenly(
            count in 1_u16..9,
            queues in 0_usize..40,
            mask in 1_u16..=u16::MAX,
        ) {
            let cpus = list(0..count);
            let running = list((0..count).filter(|cpu| mask >> cpu & 1 == 1));
            prop_assume!(!running.is_empty());
            let pollers = pollers(&cpus, queues, &running);
            let mut polled = vec![0_usize; count.into()];
            for (queue, &poller) in pollers.iter().enumerate() {
                let own = queue % usize::from(count);
                prop_assert!(running.contains(cpus.cpus()[poller]));
                prop_assert!(poller == own || !running.contains(cpus.cpus()[own]));
                polled[poller] += 1;
            }
            let of_running = || running.cpus().iter().map(|cpu| polled[usize::from(cpu.0)]);
            let (most, least) = (of_running().max().unwrap(), of_running().min().unwrap());
            prop_assert!(most - least <= 1, "{:?}", polled);
        }
    }
}

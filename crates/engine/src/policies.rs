//! Policies that follow the load of the CPUs, and so need the time of delivery.

use forebay_rx::steer::{BalancePolicy, SpreadPolicy};

use crate::knobs::{BalanceChange, Change, SpreadChange};

/// Policies in force.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Policies {
    /// Assignment of hash ranges to CPUs.
    pub(super) balance: BalancePolicy,
    /// Condition on which packets leave the polling CPU.
    pub(super) spread: SpreadPolicy,
}

impl Policies {
    /// True if the time of delivery is measured, for at most one more read of the clock a turn: the balance needs the cost of
    /// a packet, and the spread each queue's part of a CPU's work.
    pub(super) fn need_delivery_time(self) -> bool {
        self.balance != BalancePolicy::Off || self.spread == SpreadPolicy::WhenBusy
    }

    /// The policies after a change.
    #[must_use]
    pub(super) fn after(self, change: &Change) -> Self {
        match change {
            Change::Balance(BalanceChange::Policy(balance)) => Self { balance: *balance, ..self },
            Change::Spread(SpreadChange::Policy(spread)) => Self { spread: *spread, ..self },
            _ => self,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use forebay_device::Rate;
    use forebay_device::synthetic::{SyntheticPlan, SyntheticSource};
    use forebay_rx::delivery::Batch;
    use forebay_rx::hash::Hasher;
    use forebay_rx::{CpuId, Handler};
    use forebay_sys::clock::Clock;
    use forebay_sys::cpu_list::CpuList;

    use super::*;
    use crate::{Config, Engine, VirtualCosts};

    /// Handler that takes its time, and notes how much.
    #[derive(Default)]
    struct Slow(Duration);

    impl Handler for Slow {
        fn handle(&mut self, batch: &mut Batch<'_>) {
            let began = Instant::now();
            let work = Duration::from_nanos(500) * u32::try_from(batch.packets.len()).unwrap();
            while began.elapsed() < work {}
            self.0 += began.elapsed();
        }
    }

    struct Quick;

    impl Handler for Quick {
        fn handle(&mut self, _: &mut Batch<'_>) {}
    }

    fn config(cpus: u16) -> Config {
        let cpus = CpuList::new((0..cpus).map(CpuId));
        Config::new(cpus, Arc::new(Hasher::keyed(&[1; 16], false)))
    }

    fn engine<H: Handler + 'static>(
        config: &Config,
        (frames, rate): (u64, Rate),
        clock: Clock,
        handler: impl FnMut(CpuId) -> H,
    ) -> Engine<H> {
        let plan = SyntheticPlan { frames, flows: 512, rate, ..SyntheticPlan::default() };
        let source = Box::new(SyntheticSource::new(plan, None));
        Engine::build(config, vec![source], clock, handler).unwrap()
    }

    #[test]
    fn rps_s1_either_policy_needs_the_time() {
        let off = Policies { balance: BalancePolicy::Off, spread: SpreadPolicy::Always };
        assert!(!off.need_delivery_time());
        for (on, off) in
            [("rps_spread=auto", "rps_spread=always"), ("rps_balance=load", "rps_balance=off")]
        {
            let policies = Policies::after(
                Policies { balance: BalancePolicy::Off, spread: SpreadPolicy::Always },
                &on.parse().unwrap(),
            );
            assert!(policies.need_delivery_time(), "{on}");
            assert!(!policies.after(&off.parse().unwrap()).need_delivery_time(), "{off}");
            assert_eq!(policies.after(&"rps_cpus=1".parse().unwrap()), policies);
        }
    }

    /// On threads, the time of delivery covers the handler's, and is part of the busy time.
    #[test]
    fn rps_s1_threads_tell_delivery_from_polling() {
        for spread in [SpreadPolicy::WhenBusy, SpreadPolicy::Always] {
            let config = Config { spread, ..config(2) };
            let from = (20_000, Rate::Max);
            let engine = engine(&config, from, Clock::machine(), |_| Slow::default());
            let state = engine.state();
            let outcome = engine.run().unwrap();
            let mut loads = Vec::new();
            state.cpu_loads(&mut loads);
            assert_eq!(loads.iter().map(|load| load.packets).sum::<u64>(), 20_000);
            assert_eq!(loads.iter().map(|load| load.frames).sum::<u64>(), 20_000);
            for (load, Slow(spent)) in loads.iter().zip(&outcome.handlers) {
                let times = [spent.as_nanos(), load.delivering_ns.into(), load.busy_ns.into()];
                let is_timed = spread == SpreadPolicy::WhenBusy;
                assert_eq!(load.delivering_ns > 0, is_timed && load.packets > 0, "{load:?}");
                assert!(!is_timed || times.is_sorted(), "{times:?}");
            }
        }
    }

    /// Four CPUs, each busy for a third of the time, are all needed.
    #[test]
    fn rps_s1_even_load_keeps_its_cpus() {
        let from = (100_000, Rate::PerSecond(900_000));
        let engine = engine(&config(4), from, Clock::virtual_at_zero(), |_| Quick);
        let outcome =
            engine.run_stepped(1, VirtualCosts { work_ns: 1_000, ..VirtualCosts::default() });
        let queue = &outcome.queues[0];
        assert_eq!((queue.resized.get(), queue.active_cpus.get()), (0, 4));
        let busy = outcome.cpus.iter().map(|cpu| cpu.busy_ns * 100 / outcome.elapsed_ns);
        assert!(busy.clone().all(|percent| percent < 50), "{:?}", busy.collect::<Vec<_>>());
    }
}

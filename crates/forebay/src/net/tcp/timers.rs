//! Timers of the shards: each CPU looks after an equal part of them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use forebay_rx::arrive::Waker;

use super::super::shared::{CpuIndex, NetState};
use super::shards::{MEMORY_CPU, ShardIndex};

/// Interval between two looks of a CPU at its shards, in ns: the tick of the timers.
const LOOK_NS: u64 = 1_000_000;
/// Value for no timer.
const NEVER: u64 = u64::MAX;

/// Next timers of all shards, and the sleep of the CPUs that look after them.
pub(super) struct TcpTimers {
    shards_per_cpu: usize,
    /// Time of each shard's next timer, in µs.
    due_us: Box<[AtomicU64]>,
    /// Time until which each CPU sleeps, in µs.
    asleep_until_us: Box<[AtomicU64]>,
    wakers: OnceLock<Vec<Waker>>,
}

impl TcpTimers {
    pub(super) fn new(cpus: usize, shards_per_cpu: usize) -> Self {
        let never = |count: usize| (0..count).map(|_| AtomicU64::new(NEVER)).collect();
        Self {
            shards_per_cpu,
            due_us: never(cpus * shards_per_cpu),
            asleep_until_us: never(cpus),
            wakers: OnceLock::new(),
        }
    }

    /// Sets the wakers of all CPUs, once the engine is built.
    pub(super) fn set_wakers(&self, wakers: Vec<Waker>) {
        let set = self.wakers.set(wakers);
        debug_assert!(set.is_ok(), "an engine is built once");
    }

    /// Shards that a CPU looks after.
    fn shards_of(&self, CpuIndex(cpu): CpuIndex) -> impl Iterator<Item = ShardIndex> + use<> {
        (cpu * self.shards_per_cpu..(cpu + 1) * self.shards_per_cpu).map(ShardIndex)
    }

    /// Records the next timer of a shard. A CPU that would sleep longer is woken.
    pub(super) fn set(&self, ShardIndex(shard): ShardIndex, due_us: Option<u64>) {
        let due_us = due_us.unwrap_or(NEVER);
        if self.due_us[shard].load(Ordering::Relaxed) == due_us {
            return;
        }
        self.due_us[shard].store(due_us, Ordering::SeqCst);
        self.wake_before(CpuIndex(shard / self.shards_per_cpu), due_us);
    }

    /// Wakes a CPU for its next look, as segments wait there for their next hop, or writes for memory.
    pub(super) fn wake_to_look(&self, cpu: CpuIndex, now_us: u64) {
        self.wake_before(cpu, now_us + LOOK_NS / 1000);
    }

    /// Wakes a CPU that would sleep longer.
    fn wake_before(&self, CpuIndex(cpu): CpuIndex, due_us: u64) {
        let asleep_until_us = &self.asleep_until_us[cpu];
        if due_us < asleep_until_us.load(Ordering::SeqCst)
            && due_us < asleep_until_us.fetch_min(due_us, Ordering::SeqCst)
            && let Some(wake) = self.wakers.get().and_then(|wakers| wakers.get(cpu))
        {
            wake();
        }
    }

    fn earliest_us(&self, cpu: CpuIndex) -> u64 {
        let due_us = self.shards_of(cpu).map(|shard| self.due_us[shard.0].load(Ordering::SeqCst));
        due_us.min().unwrap_or(NEVER)
    }
}

/// One CPU's part in the timers.
pub(in crate::net) struct TcpTicks {
    cpu: CpuIndex,
    shared: Arc<NetState>,
    /// Time of the last look, in ns of the engine.
    looked_ns: u64,
    /// Time of the next one, in µs of TCP: timers that are due before wait for it.
    next_look_us: u64,
    /// Time until which the CPU meant to sleep, in µs. It wakes then even if that timer was
    /// cancelled, so that a connection that is used now and then does not wake it each time.
    planned_us: u64,
}

impl TcpTicks {
    pub(in crate::net) fn new(cpu: CpuIndex, shared: Arc<NetState>) -> Self {
        Self { cpu, shared, looked_ns: 0, next_look_us: 0, planned_us: 0 }
    }

    /// Runs the timers that are due.
    pub(in crate::net) fn tick(&mut self, now_ns: u64) {
        if now_ns.saturating_sub(self.looked_ns) < LOOK_NS {
            return;
        }
        self.looked_ns = now_ns;
        let tcp = &self.shared.tcp;
        let now_us = tcp.now_us();
        self.next_look_us = now_us + LOOK_NS / 1000;
        for shard in tcp.timers.shards_of(self.cpu) {
            if tcp.timers.due_us[shard.0].load(Ordering::Relaxed) <= now_us {
                self.shared.call_tcp(shard, |tcp, out| tcp.advance(out));
            }
        }
        self.shared.transmitter_of(self.cpu).retry_unresolved(&self.shared);
        // Ignored: a device that is gone ends its source.
        let _ = self.shared.flush_all(self.cpu);
        if self.cpu == MEMORY_CPU && tcp.is_short_of_memory() {
            tcp.release_writes(now_us);
        }
    }

    /// Time that the CPU may sleep, in ns. Called when it can be woken already.
    pub(in crate::net) fn sleep_max_ns(&mut self) -> Option<u64> {
        let tcp = &self.shared.tcp;
        let asleep_until_us = &tcp.timers.asleep_until_us[self.cpu.0];
        // First: a timer that is set from here on is seen below, or wakes the CPU.
        asleep_until_us.store(NEVER, Ordering::SeqCst);
        let now_us = tcp.now_us();
        let mut due_us = tcp.timers.earliest_us(self.cpu);
        if self.planned_us > now_us {
            due_us = due_us.min(self.planned_us);
        }
        let awaits_memory = self.cpu == MEMORY_CPU && tcp.is_short_of_memory();
        let transmitter = self.shared.transmitter_of(self.cpu);
        // A CPU that is awake does not hear that a flush has left something.
        if awaits_memory || transmitter.has_unresolved() || transmitter.has_gathered() {
            due_us = due_us.min(now_us + LOOK_NS / 1000);
        }
        drop(transmitter);
        due_us = due_us.max(self.next_look_us);
        asleep_until_us.fetch_min(due_us, Ordering::SeqCst);
        self.planned_us = due_us;
        (due_us != NEVER).then(|| due_us.saturating_sub(now_us).saturating_mul(1000))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::sync::{Mutex, Weak};

    use forebay_rx::Packet;
    use forebay_rx::sink::{Sink, SinkCounters, SinkError};

    use super::super::super::NetConfig;
    use super::super::super::rig::{Recording, gather_to, host};
    use super::*;

    #[test]
    fn tcp_36_what_is_left_wakes_cpu() {
        let sink = Recording::default();
        let lens = Arc::clone(&sink.lens);
        let state = host(vec![vec![Box::new(sink)]], NetConfig::TCP);
        let mut ticks = TcpTicks::new(CpuIndex(0), Arc::clone(&state));
        assert_eq!(ticks.sleep_max_ns(), None);
        gather_to(&state, (0, 0), 100);
        let sleep_ns = ticks.sleep_max_ns();
        assert!(sleep_ns.is_some_and(|ns| ns <= LOOK_NS), "{sleep_ns:?}");
        ticks.tick(LOOK_NS);
        assert_eq!(*lens.lock().unwrap(), [100]);
    }

    /// Sink of a device that is gone.
    #[derive(Default)]
    struct Gone(Arc<SinkCounters>);

    impl Sink for Gone {
        fn send(&mut self, _: &mut Vec<Packet>) -> Result<(), SinkError> {
            Err("gone".into())
        }

        fn counters(&self) -> &Arc<SinkCounters> {
            &self.0
        }
    }

    /// Sink during each of whose calls another thread gathers for its device.
    #[derive(Default)]
    struct Refilled {
        state: Arc<Mutex<Weak<NetState>>>,
        counters: Arc<SinkCounters>,
    }

    impl Sink for Refilled {
        fn send(&mut self, _: &mut Vec<Packet>) -> Result<(), SinkError> {
            let state = self.state.lock().unwrap().upgrade();
            gather_to(&state.unwrap(), (0, 1), 100);
            Ok(())
        }

        fn counters(&self) -> &Arc<SinkCounters> {
            &self.counters
        }
    }

    #[test]
    fn tcp_36_lost_device_hides_nothing_left() {
        let (refilled, rings) = (Refilled::default(), Arc::new(AtomicUsize::new(0)));
        let of_sink = Arc::clone(&refilled.state);
        let state = host(vec![vec![Box::<Gone>::default(), Box::new(refilled)]], NetConfig::TCP);
        *of_sink.lock().unwrap() = Arc::downgrade(&state);
        let counted = Arc::clone(&rings);
        let ring = move || {
            counted.fetch_add(1, Ordering::Relaxed);
        };
        state.tcp.set_wakers(vec![Arc::new(ring)]);
        (0..2).for_each(|device| gather_to(&state, (0, device), 100));
        assert!(state.flush_all(CpuIndex(0)).is_err());
        assert_eq!(rings.load(Ordering::Relaxed), 1, "the CPU goes on with the other device");
    }
}

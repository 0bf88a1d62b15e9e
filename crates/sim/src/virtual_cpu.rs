//! Virtual CPUs, which do one thing at a time.

use forebay_rx::CpuId;
use forebay_rx::intake::DEV_WEIGHT;
use forebay_sys::random::Random;

use crate::costs::{COMPLETE_NS, Cost, INTAKE_NS, SERVICE_NS, WAKE_NS, at_most};

/// Activity of a CPU until it is free.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Doing {
    /// Idle, or an activity without an end of its own: intake.
    Nothing,
    /// Processing a batch.
    Batch,
    /// A batch was handed over but is not complete.
    Handled,
}

/// One CPU.
#[derive(Clone, Debug)]
pub(crate) struct VirtualCpu {
    /// Time when it is free; `u64::MAX` if it sleeps until it is woken.
    pub(crate) free_at_ns: u64,
    pub(crate) doing: Doing,
    /// True if the last activity was intake with frames; the backlogs are next.
    pub(crate) took_in: bool,
    /// True if the last poll returned nothing.
    pub(crate) polled_in_vain: bool,
    asleep: bool,
    /// Number of pauses in effect.
    pub(crate) paused: u32,
    /// Number of slowdowns in effect.
    pub(crate) slowed: u32,
    pub(crate) dead: bool,
    pub(crate) busy_ns: u64,
    /// Time lost to pauses, stalls and slowness, which bounds on the CPU's progress do not include.
    lost_ns: u64,
    /// Part of it at the end of the current activity.
    excess_ns: u64,
    stopped: u32,
    stopped_at_ns: u64,
}

impl VirtualCpu {
    pub(crate) fn new() -> Self {
        Self {
            free_at_ns: 0,
            doing: Doing::Nothing,
            took_in: false,
            polled_in_vain: false,
            asleep: false,
            paused: 0,
            slowed: 0,
            dead: false,
            busy_ns: 0,
            lost_ns: 0,
            excess_ns: 0,
            stopped: 0,
            stopped_at_ns: 0,
        }
    }

    /// Starts an activity of this cost.
    pub(crate) fn spend(&mut self, now_ns: u64, cost: Cost) {
        self.asleep = false;
        self.free_at_ns = now_ns + cost.ns;
        self.busy_ns += cost.ns;
        self.lost_ns += cost.excess_ns;
        self.excess_ns = cost.excess_ns;
    }

    /// Extends the current activity.
    pub(crate) fn linger(&mut self, ns: u64) {
        self.free_at_ns += ns;
        self.excess_ns = 0;
    }

    /// Aborts the current activity, until the CPU is resumed.
    pub(crate) fn die(&mut self, now_ns: u64) {
        self.lost_ns = self.lost_until(now_ns);
        self.dead = true;
        self.sleep(None);
    }

    /// Sleeps until the given time, or until woken.
    pub(crate) fn sleep(&mut self, until_ns: Option<u64>) {
        self.asleep = true;
        self.excess_ns = 0;
        self.free_at_ns = until_ns.unwrap_or(u64::MAX);
    }

    /// Wakes the CPU after a short delay, if it sleeps.
    pub(crate) fn wake(&mut self, now_ns: u64, random: &mut Random) {
        if self.asleep && !self.dead {
            let awake_ns = now_ns + random.between(1, WAKE_NS);
            self.free_at_ns = self.free_at_ns.min(awake_ns);
        }
    }

    /// Starts a pause, or the time without a thread.
    pub(crate) fn stop(&mut self, now_ns: u64) {
        if self.stopped == 0 {
            self.stopped_at_ns = now_ns;
        }
        self.stopped += 1;
    }

    /// Ends a pause, or starts a new thread.
    pub(crate) fn resume(&mut self, now_ns: u64) {
        self.stopped -= 1;
        if self.stopped == 0 {
            self.lost_ns += now_ns - self.stopped_at_ns;
        }
    }

    /// Time lost until now.
    pub(crate) fn lost_ns(&self, now_ns: u64) -> u64 {
        let pause_ns = if self.stopped > 0 { now_ns - self.stopped_at_ns } else { 0 };
        self.lost_until(now_ns) + pause_ns
    }

    /// Time lost until now to stalls and slowness, which are at the end of an activity; and to
    /// pauses that have ended.
    fn lost_until(&self, now_ns: u64) -> u64 {
        let to_come_ns = self.excess_ns.min(self.free_at_ns.saturating_sub(now_ns));
        self.lost_ns - to_come_ns
    }
}

/// Parameters of the time bounds of a run: the longest durations of CPU activities, without lost
/// time.
#[derive(Clone, Debug)]
pub(crate) struct CpuPace {
    pub(crate) batch_max: u64,
    pub(crate) queues: u64,
    /// Polling CPU of each queue.
    pub(crate) polling: Vec<CpuId>,
    /// Factor of all costs.
    pub(crate) factor: u64,
}

impl CpuPace {
    /// Time until a CPU has delivered this many packets of one queue.
    pub(crate) fn drain_ns(&self, cpu: CpuId, packets: u64) -> u64 {
        let batches = packets / self.batch_max + 2;
        let own_ns = (packets + self.batch_max) * self.service_ns();
        own_ns + batches * self.between_batches_ns(cpu) + WAKE_NS
    }

    /// Time from one poll of a queue to the next.
    pub(crate) fn turn_ns(&self, cpu: CpuId) -> u64 {
        self.batch_max * self.service_ns() + self.between_batches_ns(cpu) + WAKE_NS
    }

    /// Longest delivery of one packet.
    fn service_ns(&self) -> u64 {
        at_most(SERVICE_NS * self.factor)
    }

    /// Time that a CPU spends between two batches of one queue.
    fn between_batches_ns(&self, cpu: CpuId) -> u64 {
        let polls = self.polling.iter().filter(|polling| **polling == cpu).count() as u64;
        let intake_ns = polls * at_most(DEV_WEIGHT as u64 * INTAKE_NS * self.factor);
        let others_ns = (self.queues - 1) * self.batch_max * self.service_ns();
        // A poll of each queue may come after each batch, of whichever queue.
        intake_ns * self.queues + others_ns + self.queues * COMPLETE_NS
    }
}

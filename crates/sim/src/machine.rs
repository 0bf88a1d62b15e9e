//! Interface between a run and the rules it runs under: Forebay's, or the kernel's.

use std::fmt;

use forebay_rx::hash::FlowHash;
use forebay_rx::steer::CpuLoad;
use forebay_rx::{CpuId, RxQueue};

use crate::action::SimChange;
use crate::census::Census;
use crate::laws::Laws;
use crate::scenario::Scenario;
use crate::traffic::{FlowId, Traffic};

/// A set of rules in operation: everything between arriving frames and the applications that get
/// them. It has no notion of time; the world decides when each CPU does what.
pub(crate) trait SimMachine: Sized {
    /// True if a CPU that was taken offline continues until its backlogs are empty. Otherwise it
    /// stops, which is noticed later. Only CPUs that continue have threads that can die.
    const DRAINS: bool;

    fn new(scenario: &Scenario, traffic: &Traffic) -> Self;

    /// Takes in a burst, which may be empty, so that waiting packets can proceed.
    fn take_in(&mut self, poll: Poll<'_>, laws: &mut Laws) -> TakenIn;

    /// Time from which an empty burst is worthwhile because something waits at a queue; `None` if
    /// nothing waits.
    fn waits_until_ns(&self, queue: RxQueue) -> Option<u64>;

    /// Lets a CPU dequeue a batch; returns its number of packets.
    fn take(&mut self, cpu: CpuId, now: Now) -> usize;

    /// Lets a CPU hand its batch to the application.
    fn handle(&mut self, cpu: CpuId, now_ns: u64, laws: &mut Laws, handed: &mut Vec<Handed>);

    /// Completes a CPU's batch.
    fn complete(&mut self, cpu: CpuId);

    /// Loses the packets of a CPU's current batch.
    fn lose(&mut self, cpu: CpuId, laws: &mut Laws);

    /// Applies a live change. CPUs that got packets because of it are added to `wake`.
    fn change(&mut self, change: &SimChange, now: Now, laws: &mut Laws, wake: &mut Vec<CpuId>);

    /// Records an event that does not change the rules, for the trace of the run.
    fn note(&mut self, what: &'static str, value: &dyn fmt::Display, now_ns: u64);

    /// Records that an application read packets of this hash on this CPU.
    fn record(&mut self, hash: FlowHash, cpu: CpuId);

    /// Current and desired CPU of a flow.
    fn standing(&self, queue: RxQueue, hash: FlowHash) -> Option<FlowStanding>;

    /// True if packets of a queue wait for all packets from before a change.
    fn has_fence(&self, queue: RxQueue) -> bool;

    /// Takes a census of all packets.
    fn census(&mut self, census: &mut Census);

    /// Takes the part of a census that the moves of a queue's flows are judged by.
    fn census_of(&mut self, _: RxQueue, census: &mut Census) {
        self.census(census);
    }

    /// Number of times that a flow, or the flows of one slot, changed CPU.
    fn moves(&self) -> u64;

    /// Number of CPUs that the packets of a queue go to, as the load needs. `None` if all have their part always.
    fn active_cpus(&self, _: RxQueue) -> Option<usize> {
        None
    }

    /// Checks the additional laws for the end of a run, when nothing is in progress.
    fn check_rest(&mut self, laws: &mut Laws);
}

/// A poll of a queue by a CPU.
pub(crate) struct Poll<'a> {
    pub(crate) queue: RxQueue,
    pub(crate) cpu: CpuId,
    /// Flow of each frame that has arrived.
    pub(crate) flows: &'a [FlowId],
    pub(crate) traffic: &'a mut Traffic,
    pub(crate) now: Now,
    /// Work of all CPUs so far.
    pub(crate) loads: &'a [CpuLoad],
    /// CPUs that got new packets (out).
    pub(crate) wake: &'a mut Vec<CpuId>,
    /// Packets handed to an application on the spot (out).
    pub(crate) handed: &'a mut Vec<Handed>,
}

/// The current time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Now {
    pub(crate) ns: u64,
}

/// Result of a poll.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TakenIn {
    /// Number of packets handed to an application on the spot, which takes time.
    pub(crate) handled: usize,
}

/// A packet handed to an application.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Handed {
    pub(crate) flow: FlowId,
    pub(crate) hash: FlowHash,
}

/// Current and desired CPU of a flow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FlowStanding {
    /// Slot or hash that it shares with others: flows of one key move together.
    pub(crate) key: u32,
    /// CPU of its last packet; `None` if there was none.
    pub(crate) at: Option<CpuId>,
    /// CPU that the next packet should go to.
    pub(crate) desired_cpu: CpuId,
    /// True if packets of the flow are held.
    pub(crate) is_held: bool,
}

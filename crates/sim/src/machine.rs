//! What a run asks of the rules it runs under: ours, or the kernel's.

use std::fmt;

use path::hash::FlowHash;
use path::{CpuId, RxQueue};

use crate::action::Change;
use crate::census::Census;
use crate::laws::Laws;
use crate::scenario::Scenario;
use crate::traffic::{FlowId, Traffic};

/// Rules at work: what stands between frames that arrive and applications that get them. It has
/// no time of its own; who does what and when is the world's business.
pub(crate) trait Machine: Sized {
    /// True if a CPU that was taken out goes on until its backlogs are empty. Else it stops, and
    /// somebody notices later. Only CPUs that go on have threads that can die.
    const DRAINS: bool;

    fn new(scenario: &Scenario, traffic: &Traffic) -> Self;

    /// Takes a burst in, which may be empty: for what waits here.
    fn take_in(&mut self, poll: Poll<'_>, laws: &mut Laws) -> TakenIn;

    /// Whether something waits at a queue for an empty burst to let it go, and since when there is
    /// reason to try.
    fn waits_until_ns(&self, queue: RxQueue) -> Option<u64>;

    /// A CPU takes a batch in hand: this many packets.
    fn take(&mut self, cpu: CpuId) -> usize;

    /// A CPU hands its batch to the application.
    fn handle(&mut self, cpu: CpuId, now_ns: u64, laws: &mut Laws, handed: &mut Vec<Handed>);

    /// A CPU is done with its batch.
    fn complete(&mut self, cpu: CpuId);

    /// What a CPU has in hand is lost.
    fn lose(&mut self, cpu: CpuId, laws: &mut Laws);

    /// A live change. CPUs that have packets because of it are added to `wake`.
    fn change(&mut self, change: &Change, now: Now, laws: &mut Laws, wake: &mut Vec<CpuId>);

    /// Something happened that is no change of the rules, for those who look at a trace of the run.
    fn note(&mut self, what: &'static str, value: &dyn fmt::Display, now_ns: u64);

    /// An application read packets of this hash on this CPU.
    fn record(&mut self, hash: FlowHash, cpu: CpuId);

    /// Where the packets of a flow go, and where they should.
    fn standing(&self, queue: RxQueue, hash: FlowHash) -> Option<Standing>;

    /// True if packets of a queue wait for all that came before a change.
    fn has_fence(&self, queue: RxQueue) -> bool;

    /// Where all packets are.
    fn census(&mut self, census: &mut Census);

    /// Number of times a flow, or the flows of one slot, changed their CPU.
    fn moves(&self) -> u64;

    /// What must hold when all has come to rest, besides what always must.
    fn check_rest(&mut self, laws: &mut Laws);
}

/// A CPU polls a queue.
pub(crate) struct Poll<'a> {
    pub(crate) queue: RxQueue,
    pub(crate) cpu: CpuId,
    /// Whose frames have come.
    pub(crate) flows: &'a [FlowId],
    pub(crate) traffic: &'a mut Traffic,
    pub(crate) now: Now,
    /// CPUs that have new packets are added.
    pub(crate) wake: &'a mut Vec<CpuId>,
    /// What an application was handed on the spot is added.
    pub(crate) handed: &'a mut Vec<Handed>,
}

/// The time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Now {
    pub(crate) ns: u64,
    /// How long all CPUs have been busy, together.
    pub(crate) busy_ns: u64,
}

/// What a poll came to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TakenIn {
    /// Packets that were handed to an application on the spot, which takes time.
    pub(crate) handled: usize,
}

/// A packet that an application was handed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Handed {
    pub(crate) flow: FlowId,
    pub(crate) hash: FlowHash,
}

/// Where a flow is and should be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Standing {
    /// What it shares its place with: flows of one key move together.
    pub(crate) key: u32,
    /// Where its last packet went; `None` if there was none.
    pub(crate) at: Option<CpuId>,
    /// Where the next one should go.
    pub(crate) wish: CpuId,
    /// True if packets wait for it.
    pub(crate) is_held: bool,
}

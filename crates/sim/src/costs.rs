//! Costs of activities in virtual time.

use forebay_sys::random::Random;

/// Intake of one frame.
pub(crate) const INTAKE_NS: u64 = 100;

/// Delivery of one packet, including the application's work: a CPU handles a million packets a
/// second.
pub(crate) const SERVICE_NS: u64 = 1_000;

/// Longest delay of a wake-up, or until a CPU notices work from another CPU.
pub(crate) const WAKE_NS: u64 = 2_000;

/// Longest completion of a batch, if it takes time at all.
pub(crate) const COMPLETE_NS: u64 = 500;

/// One batch in this many takes time to complete after its packets were handled.
const COMPLETE_ONE_IN: u64 = 8;

/// Factor by which a stalled turn takes longer, because of an interrupt or a neighbour.
const STALL_FACTOR: u64 = 20;

/// Cost of a turn, and the part of it beyond the bound.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cost {
    pub(crate) ns: u64,
    /// The part beyond [`at_most`]: stalls and slowness.
    pub(crate) excess_ns: u64,
}

/// Variation of costs in a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Costs {
    /// One turn in this many stalls; 0: none does.
    pub(crate) stall_one_in: u64,
    /// Factor of all costs: a run of seconds would have too many packets otherwise.
    pub(crate) factor: u64,
}

impl Costs {
    /// Draws a cost of 0.5 to 1.5 times `base_ns`, multiplied by `slowed`, and occasionally by the
    /// stall factor.
    pub(crate) fn draw(self, base_ns: u64, slowed: u64, random: &mut Random) -> Cost {
        let mut ns = random.between(base_ns / 2, at_most(base_ns)).max(1) * slowed;
        if self.stall_one_in > 0 && random.below(self.stall_one_in) == 0 {
            ns *= STALL_FACTOR;
        }
        Cost { ns, excess_ns: ns.saturating_sub(at_most(base_ns)) }
    }

    /// Duration of a batch's completion after its packets were handled; `None` if it takes no time.
    pub(crate) fn draw_completion(random: &mut Random) -> Option<u64> {
        (random.below(COMPLETE_ONE_IN) == 0).then(|| random.between(1, COMPLETE_NS))
    }
}

/// Upper bound on the cost of a turn, without stalls and slowness.
pub(crate) fn at_most(base_ns: u64) -> u64 {
    base_ns + base_ns / 2
}

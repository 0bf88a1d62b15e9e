//! What things cost in virtual time.

use forebay::random::Random;

/// Taking in one frame.
pub(crate) const INTAKE_NS: u64 = 100;

/// Delivering one packet, the application's work included: a CPU takes a million packets a second.
pub(crate) const SERVICE_NS: u64 = 1_000;

/// How long it takes to wake up, or to look again for what another CPU is to do: at most.
pub(crate) const WAKE_NS: u64 = 2_000;

/// The end of a batch, where it is long enough to be seen: at most.
pub(crate) const COMPLETE_NS: u64 = 500;

/// One batch in this many is not over at once when its packets are handled.
const COMPLETE_ONE_IN: u64 = 8;

/// How much longer a turn takes when it stalls: an interrupt, or a neighbour.
const STALL_FACTOR: u64 = 20;

/// What a turn costs, and how much of that no turn should.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cost {
    pub(crate) ns: u64,
    /// The part beyond [`at_most`]: stalls and slowness.
    pub(crate) excess_ns: u64,
}

/// How costs vary in a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Costs {
    /// One turn in this many stalls; 0: none does.
    pub(crate) stall_one_in: u64,
}

impl Costs {
    /// Half to one and a half times as long, `slowed` times that, and now and then much longer.
    pub(crate) fn draw(self, base_ns: u64, slowed: u64, random: &mut Random) -> Cost {
        let mut ns = random.between(base_ns / 2, at_most(base_ns)).max(1) * slowed;
        if self.stall_one_in > 0 && random.below(self.stall_one_in) == 0 {
            ns *= STALL_FACTOR;
        }
        Cost { ns, excess_ns: ns.saturating_sub(at_most(base_ns)) }
    }

    /// How long a batch lasts after its packets were handled, if that is to be seen.
    pub(crate) fn draw_completion(random: &mut Random) -> Option<u64> {
        (random.below(COMPLETE_ONE_IN) == 0).then(|| random.between(1, COMPLETE_NS))
    }
}

/// What a turn costs at most, stalls and slowness apart.
pub(crate) fn at_most(base_ns: u64) -> u64 {
    base_ns + base_ns / 2
}

//! Shifts of the load in the course of a run, in four phases of equally many packets.

use crate::traffic::FlowId;

/// Change of the load in the course of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Shift {
    /// No change; flow 0 has `elephant_percent` throughout.
    None,
    /// Flow 0 has `elephant_percent` in the second phase, and flow 1 in the third.
    HeavyFlow,
    /// The load falls to two fifths and rises again, and all flows change their ranks.
    Diurnal,
    /// [`AIMED_FLOWS`] have `elephant_percent` in the second and third phase, all with hashes in the map's range of one CPU.
    Aimed { cpus: u16 },
    /// The load is 15 % of one CPU, the plan's, 15 % again, and 150 %.
    Waves,
    /// All flows change their ranks whenever this many packets have come.
    Shuffled { packets: u64 },
}

/// Number of phases of a run.
pub(crate) const PHASES: u64 = 4;

/// Number of flows aimed at one CPU: the first ones.
pub(crate) const AIMED_FLOWS: u32 = 256;

/// CPU at which the aimed flows are directed.
const AIMED_CPU: u32 = 1;

/// Number of ranks that flows rise in a run.
const RANKS: u64 = 16;

/// Odd number with bits everywhere: the golden ratio's.
const MIXER: u64 = 0x9e37_79b9_7f4a_7c15;

/// Thousandths of a whole.
const MILLE: u64 = 1_000;

/// Millionths of a whole.
pub(crate) const PPM: u64 = 1_000_000;

impl Shift {
    /// Phase of a run after this many of `all` packets. A run without change is in its last phase.
    pub(crate) fn phase(self, came: u64, all: u64) -> u64 {
        let phase = (came * PHASES / all.max(1)).min(PHASES - 1);
        match self {
            Self::None | Self::Shuffled { .. } => PHASES - 1,
            _ => phase,
        }
    }

    /// Flows that share `elephant_percent` of a CPU in a phase.
    pub(crate) fn heavy(self, phase: u64) -> std::ops::Range<u32> {
        match (self, phase) {
            (Self::None, _) | (Self::HeavyFlow, 1) => 0..1,
            (Self::HeavyFlow, 2) => 1..2,
            (Self::Aimed { .. }, 1 | 2) => 0..AIMED_FLOWS,
            _ => 0..0,
        }
    }

    /// Load in millionths of the plan's, of which the heavy flows are `heavy_mille` thousandths.
    pub(crate) fn load_ppm(self, came: u64, all: u64, heavy_mille: u64, load_percent: u64) -> u64 {
        if self == Self::Waves {
            let percent = [15, load_percent, 15, 150.min(load_percent)];
            let phase = usize::try_from(self.phase(came, all)).unwrap_or(0);
            return percent[phase] * PPM / load_percent.max(1);
        }
        let mille = if self == Self::Diurnal {
            let from_midday = (came * 2 * MILLE / all.max(1)).abs_diff(MILLE);
            400 + from_midday * 600 / MILLE
        } else if self.heavy(self.phase(came, all)).is_empty() {
            MILLE - heavy_mille
        } else {
            MILLE
        };
        mille * (PPM / MILLE)
    }

    /// Number of the flow, of `flows`, that has a rank after `came` of `all` packets.
    pub(crate) fn place(self, rank: u64, (came, all): (u64, u64), flows: u64) -> u64 {
        match self {
            Self::Diurnal => (rank + came * RANKS / all.max(1)) % flows,
            Self::Shuffled { packets } => {
                debug_assert!(flows.is_power_of_two(), "an odd factor permutes only these");
                let mixed = (came / packets.max(1) + 1).wrapping_mul(MIXER);
                (rank.wrapping_mul(mixed >> 32 | 1).wrapping_add(mixed >> 16)) & (flows - 1)
            }
            _ => rank,
        }
    }

    /// Hash of a flow instead of the drawn one.
    pub(crate) fn hash(self, flow: FlowId, drawn: u32) -> u32 {
        match self {
            Self::Aimed { cpus } if flow.0 < AIMED_FLOWS => {
                let range = u32::MAX / u32::from(cpus);
                range * AIMED_CPU + 1 + drawn % range
            }
            _ => drawn,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waves_are_parts_of_one_cpu() {
        for cpus in [4, 48, 128] {
            let load_percent = 60 * cpus;
            for (came, percent) in [(0, 15), (1, load_percent), (2, 15), (3, 150)] {
                let ppm = Shift::Waves.load_ppm(came, 4, 0, load_percent);
                assert_eq!((load_percent * ppm).div_ceil(PPM), percent, "{cpus} CPUs");
            }
        }
    }
}

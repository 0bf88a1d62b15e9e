//! The RPS map: CPUs that a queue's packets may go to (RPS-3, RPS-4, RPS-9).

use crate::cpu::CpuId;
use crate::hash::FlowHash;

/// Effective CPUs of `rps_cpus`, in ascending order; RPS is off if there are none.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RpsMap(Box<[CpuId]>);

impl RpsMap {
    /// Creates a map over these CPUs.
    #[must_use]
    pub fn new(cpus: impl IntoIterator<Item = CpuId>) -> Self {
        let mut cpus: Vec<_> = cpus.into_iter().collect();
        cpus.sort_unstable();
        cpus.dedup();
        Self(cpus.into())
    }

    /// CPU for a hash, selected as in the kernel (`reciprocal_scale` in net/core/dev.c): equal
    /// ranges of hash values, one for each CPU in order.
    #[must_use]
    pub fn select(&self, hash: FlowHash) -> Option<CpuId> {
        let len = u64::try_from(self.0.len()).unwrap_or(u64::MAX);
        let index = (u64::from(hash.0) * len) >> 32;
        self.0.get(usize::try_from(index).unwrap_or(usize::MAX)).copied()
    }

    /// True if packets may go to `cpu`.
    #[must_use]
    pub fn contains(&self, cpu: CpuId) -> bool {
        self.0.binary_search(&cpu).is_ok()
    }

    /// CPUs of the map, in ascending order.
    #[must_use]
    pub fn cpus(&self) -> &[CpuId] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rps_4_the_kernels_selection() {
        // From the kernel's selftest toeplitz.c: cpu = map[hash * len >> 32].
        let cases = [
            (0x51cc_c178, 4, 1),
            (0xc626_b0ea, 64, 49),
            (0xafc7_327f, 7, 4),
            (0x02d1_feef, 64, 0),
            (0xffff_ffff, 3, 2),
            (0x8000_0000, 2, 1),
            (0x7fff_ffff, 2, 0),
        ];
        for (hash, len, index) in cases {
            let map = RpsMap::new((0..len).map(CpuId));
            assert_eq!(map.select(FlowHash(hash)), Some(CpuId(index)), "{hash:#x} of {len}");
        }
    }

    #[test]
    fn rps_9_no_cpu_left_is_rps_off() {
        assert_eq!(RpsMap::new([]).select(FlowHash(5)), None);
    }
}

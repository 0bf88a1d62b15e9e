//! A set of CPUs.

use forebay_rx::CpuId;
use forebay_sys::random::Random;

/// Largest number of CPUs in a run: the bits of a set.
pub(crate) const CPUS_MAX: u16 = 128;

/// CPUs below [`CPUS_MAX`], one bit each.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct CpuSet(u128);

impl CpuSet {
    /// CPUs from `first` to `end`, exclusive.
    pub(crate) fn range(first: u16, end: u16) -> Self {
        (first..end).map(CpuId).collect()
    }

    /// A random subset of `all`, each CPU with probability one half, but at least `least` of them.
    pub(crate) fn draw(all: Self, least: usize, random: &mut Random) -> Self {
        let mut bits = u128::from(random.bits());
        if all.0 > u64::MAX.into() {
            bits |= u128::from(random.bits()) << u64::BITS;
        }
        let mut drawn = Self(all.0 & bits);
        while drawn.len() < least.min(all.len()) {
            drawn.0 |= 1 << all.pick(random).0;
        }
        drawn
    }

    /// A random CPU of the set, by one draw; CPU 0 if the set is empty.
    pub(crate) fn pick(self, random: &mut Random) -> CpuId {
        let index = random.below(self.len() as u64);
        self.iter().nth(usize::try_from(index).unwrap_or(0)).unwrap_or(CpuId(0))
    }

    pub(crate) fn contains(self, cpu: CpuId) -> bool {
        self.0 >> cpu.0 & 1 == 1
    }

    pub(crate) fn with(self, cpu: CpuId) -> Self {
        Self(self.0 | 1 << cpu.0)
    }

    pub(crate) fn without(self, cpu: CpuId) -> Self {
        Self(self.0 & !(1 << cpu.0))
    }

    pub(crate) fn without_all(self, others: Self) -> Self {
        Self(self.0 & !others.0)
    }

    pub(crate) fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    pub(crate) fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// CPUs in ascending order.
    pub(crate) fn iter(self) -> impl Iterator<Item = CpuId> {
        (0..CPUS_MAX).map(CpuId).filter(move |cpu| self.contains(*cpu))
    }

    /// The mask in the format of `rps_cpus`.
    pub(crate) fn mask(self) -> String {
        let words = [96, 64, 32, 0].map(|shift| self.0 >> shift & u128::from(u32::MAX));
        let first = words.iter().position(|word| *word > 0).unwrap_or(3);
        let rest = words[first + 1..].iter().map(|word| format!(",{word:08x}"));
        format!("{:x}", words[first]) + &rest.collect::<String>()
    }
}

impl FromIterator<CpuId> for CpuSet {
    fn from_iter<T: IntoIterator<Item = CpuId>>(cpus: T) -> Self {
        cpus.into_iter().fold(Self::default(), Self::with)
    }
}

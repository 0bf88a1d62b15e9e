//! Average length of received packets, which determines the size of receive buffers (VIO-2).

/// Number of packets that the average covers, about: `RECEIVE_AVG_WEIGHT` in the kernel's
/// `virtio_net.c`. A whole ring may be filled at once, so the average must not follow every burst.
pub(super) const WEIGHT: u32 = 64;

/// Number of fraction bits. Without fractions, as in the kernel, a rise of less than [`WEIGHT`]
/// bytes would never move the average.
const FRACTION_BITS: u32 = 16;

/// Exponentially weighted moving average of packet lengths in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Average {
    /// Average in units of 2^-[`FRACTION_BITS`] bytes; 0 before the first packet.
    scaled: u64,
}

impl Average {
    /// Adds one whole packet, in any number of buffers (VIO-4). The first packet sets the average;
    /// a length of 0 is ignored.
    #[inline]
    pub fn add(&mut self, len_bytes: u32) {
        let new = u64::from(len_bytes) << FRACTION_BITS;
        self.scaled = match (self.scaled, new) {
            (_, 0) => return,
            (0, new) => new,
            (old, new) => old - old / u64::from(WEIGHT) + new / u64::from(WEIGHT),
        };
    }

    /// Returns the average, rounded to whole bytes; 0 before the first packet.
    #[must_use]
    pub fn bytes(self) -> u32 {
        let half = 1 << (FRACTION_BITS - 1);
        u32::try_from((self.scaled + half) >> FRACTION_BITS).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn fed(lens: impl IntoIterator<Item = u32>) -> Average {
        let mut average = Average::default();
        lens.into_iter().for_each(|len| average.add(len));
        average
    }

    fn steps(before: u32, after: u32, count: usize) -> u32 {
        fed([before; 300].into_iter().chain(std::iter::repeat_n(after, count))).bytes()
    }

    #[test]
    fn vio_2_first_packet_sets_average() {
        assert_eq!(fed([]).bytes(), 0);
        assert_eq!(fed([0, 0, 1514]).bytes(), 1514);
        assert_eq!(fed([65_549]).bytes(), 65_549);
        assert_eq!(fed([1514, 0]).bytes(), 1514);
    }

    #[test]
    fn vio_2_no_dead_zone_either_side() {
        for (before, after) in
            [(1500, 1560), (1500, 1501), (1514, 1570), (1500, 4096), (3000, 2999)]
        {
            assert_eq!(steps(before, after, 1500), after, "from {before}");
        }
        let alternating = fed((0..4000).map(|number| 1500 + number % 2 * 120)).bytes();
        assert!((1559..=1561).contains(&alternating), "{alternating} for a mean of 1560");
    }

    #[test]
    fn vio_2_step_settles_in_64_to_210() {
        for (before, after) in
            [(1500, 4096), (1514, 9000), (65_549, 60), (60, 65_549), (1500, 1540)]
        {
            let goal = (f64::from(after) - f64::from(before)).mul_add(0.95, f64::from(before));
            let is_there = |count| {
                let now = f64::from(steps(before, after, count));
                if after > before { now >= goal - 0.5 } else { now <= goal + 0.5 }
            };
            assert!(is_there(210), "{before} to {after}");
            assert!(!is_there(64), "{before} to {after}: it follows every whim");
        }
    }

    proptest! {
        /// The average is between the least and greatest length, and within a byte of the result in
        /// real arithmetic.
        #[test]
        fn vio_2_average_equals_real_arithmetic(
            lens in proptest::collection::vec(1u32..70_000, 1..400),
        ) {
            let average = f64::from(fed(lens.iter().copied()).bytes());
            let weight = f64::from(WEIGHT);
            let exact = lens.iter().skip(1).fold(f64::from(lens[0]), |average, &len| {
                average + (f64::from(len) - average) / weight
            });
            prop_assert!((average - exact).abs() <= 1.0, "{} for {}", average, exact);
        }
    }
}

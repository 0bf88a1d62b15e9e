//! CPUs that are drawn, and their colors.

use forebay_engine::timeline::{CpuSample, Timeline, TimelineSample};
use plotters::style::RGBColor;

/// Colors that people with any color vision can tell apart (Okabe and Ito).
pub(super) const COLORS: [RGBColor; CPUS_DRAWN_MAX] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(213, 94, 0),
    RGBColor(240, 228, 66),
    RGBColor(90, 90, 90),
];

/// Upper bound of the CPUs with colors of their own: those with most packets. All others are drawn
/// together.
const CPUS_DRAWN_MAX: usize = 8;

const OTHERS: RGBColor = RGBColor(190, 190, 190);

/// CPU that is drawn, or all that have no color of their own.
pub(super) struct DrawnCpu {
    pub(super) name: String,
    pub(super) color: RGBColor,
    /// Indices of its CPUs.
    members: Vec<usize>,
    /// Number of packets that it delivered.
    pub(super) packets: u64,
}

impl DrawnCpu {
    /// Counters between two samples.
    pub(super) fn between(&self, [from, to]: [&TimelineSample; 2]) -> CpuSample {
        let sum = |of: fn(&CpuSample) -> u64| {
            let each = self.members.iter().filter_map(|&index| {
                let (from, to) = (from.cpus.get(index)?, to.cpus.get(index)?);
                Some(of(to).saturating_sub(of(from)))
            });
            each.sum()
        };
        CpuSample {
            packets: sum(|cpu| cpu.packets),
            waited: sum(|cpu| cpu.waited),
            waited_ns: sum(|cpu| cpu.waited_ns),
        }
    }
}

/// CPUs of a timeline, in their order.
pub(super) fn drawn(timeline: &Timeline) -> Vec<DrawnCpu> {
    let packets = |index: usize| {
        let last = timeline.samples.last().and_then(|last| last.cpus.get(index));
        last.map_or(0, |cpu| cpu.packets)
    };
    let mut by_packets: Vec<_> = (0..timeline.cpus.len()).collect();
    by_packets.sort_by_key(|&index| std::cmp::Reverse(packets(index)));
    let others = by_packets.split_off(by_packets.len().min(CPUS_DRAWN_MAX));
    by_packets.sort_unstable();
    let own = by_packets.into_iter().zip(COLORS).map(|(index, color)| DrawnCpu {
        name: format!("CPU {}", timeline.cpus[index]),
        color,
        members: vec![index],
        packets: packets(index),
    });
    let others = (!others.is_empty()).then(|| DrawnCpu {
        name: format!("{} other CPUs", others.len()),
        color: OTHERS,
        packets: others.iter().map(|&index| packets(index)).sum(),
        members: others,
    });
    own.chain(others).collect()
}

/// Samples before and after each interval that took time.
pub(super) fn intervals(timeline: &Timeline) -> impl Iterator<Item = [&TimelineSample; 2]> {
    let pairs = timeline.samples.windows(2).map(|pair| [&pair[0], &pair[1]]);
    pairs.filter(|[from, to]| from.at_ns < to.at_ns)
}

/// Duration of a run.
pub(super) fn elapsed_ns(timeline: &Timeline) -> u64 {
    timeline.samples.last().map_or(0, |last| last.at_ns)
}

#[cfg(test)]
mod tests {
    use forebay_rx::CpuId;

    use super::*;

    #[test]
    fn plt_1_excess_cpus_share_a_color() {
        let mut timeline = super::super::made_up();
        timeline.cpus = (0..20).map(CpuId).collect();
        for sample in &mut timeline.samples {
            let packets = |cpu: u64| if cpu == 7 { 0 } else { sample.at_ns * cpu };
            let cpu = |cpu| CpuSample { packets: packets(cpu), ..CpuSample::default() };
            sample.cpus = (0..20).map(cpu).collect();
        }
        let drawn = drawn(&timeline);
        let names: Vec<_> = drawn.iter().map(|cpu| cpu.name.as_str()).collect();
        let [.., first, last, others] = names.as_slice() else { panic!("too few: {names:?}") };
        assert_eq!([*first, *last, *others], ["CPU 18", "CPU 19", "12 other CPUs"]);
        let sum = |packets: &mut dyn Iterator<Item = u64>| packets.sum::<u64>();
        let packets = sum(&mut drawn.iter().map(|cpu| cpu.packets));
        let whole = [&timeline.samples[0], &timeline.samples[timeline.samples.len() - 1]];
        assert_eq!(packets, sum(&mut whole[1].cpus.iter().map(|cpu| cpu.packets)));
        assert_eq!(packets, sum(&mut drawn.iter().map(|cpu| cpu.between(whole).packets)));
    }
}

//! Mean waits of packets in the backlogs of each CPU, over time.

use forebay_engine::timeline::{CpuSample, Timeline};
use plotters::prelude::*;

use super::chart::{DrawError, Legend, TimeUnit, framed, picture};
use super::cpus::{DrawnCpu, drawn, elapsed_ns, intervals};
use crate::table::figures::{as_f64, nanoseconds};

/// Draws the waits.
pub(super) fn draw(timeline: &Timeline) -> Result<String, DrawError> {
    let (cpus, elapsed_ns) = (drawn(timeline), elapsed_ns(timeline));
    let means = |cpu: &DrawnCpu| {
        intervals(timeline).filter_map(|pair| mean_ns(cpu.between(pair))).collect::<Vec<_>>()
    };
    let longest_ns = cpus.iter().flat_map(means).max().unwrap_or(1).max(1);
    let unit = TimeUnit::of(elapsed_ns);
    let title = "Mean waits of packets in the backlog".to_owned();
    let whole = timeline.samples.first().zip(timeline.samples.last());
    let legend = |cpu: &DrawnCpu| {
        let mean_ns = whole.and_then(|(first, last)| mean_ns(cpu.between([first, last])));
        let mean = mean_ns.map_or_else(|| "no packet".to_owned(), nanoseconds);
        (Some(cpu.color), format!("{}: {mean}", cpu.name))
    };
    let legend: Legend = cpus.iter().map(legend).collect();
    let unit_of_waits = TimeUnit::of(longest_ns);
    let (x, y) = (unit.axis(elapsed_ns), unit_of_waits.axis_of("wait", as_f64(longest_ns)));
    picture(|area| {
        framed(area, &title, &x, &y, &legend, |plane| {
            for cpu in &cpus {
                for line in lines(timeline, cpu, unit, unit_of_waits) {
                    plane.draw_series([PathElement::new(line, cpu.color.stroke_width(2))])?;
                }
            }
            Ok(())
        })
    })
}

/// Lines of a CPU. There is a gap while it took no packet.
fn lines(
    timeline: &Timeline,
    cpu: &DrawnCpu,
    unit: TimeUnit,
    unit_of_waits: TimeUnit,
) -> Vec<Vec<(f64, f64)>> {
    let mut lines: Vec<Vec<_>> = Vec::new();
    let mut is_gap = true;
    for [from, to] in intervals(timeline) {
        let mean_ns = mean_ns(cpu.between([from, to]));
        let was_gap = std::mem::replace(&mut is_gap, mean_ns.is_none());
        let Some(mean_ns) = mean_ns else { continue };
        if was_gap {
            lines.push(Vec::new());
        }
        let wait = unit_of_waits.of_ns(mean_ns);
        let points = [from.at_ns, to.at_ns].map(|ns| (unit.of_ns(ns), wait));
        lines.last_mut().into_iter().for_each(|line| line.extend(points));
    }
    lines
}

/// Mean wait; `None` without packets.
fn mean_ns(cpu: CpuSample) -> Option<u64> {
    cpu.waited_ns.checked_div(cpu.waited)
}

#[cfg(test)]
mod tests {
    use super::super::made_up;
    use super::*;

    #[test]
    fn plt_2_waits_are_means_of_intervals() {
        let timeline = made_up();
        let svg = draw(&timeline).unwrap();
        assert!(svg.contains("CPU 0: 1.5 µs") && svg.contains("wait in ns"), "{svg}");
        let lines = lines(&timeline, &drawn(&timeline)[1], TimeUnit::of(1), TimeUnit::of(1));
        let wait = 1_500.0;
        let first = [(0.0, wait), (1_000.0, wait), (1_000.0, wait), (2_000.0, wait)];
        assert_eq!(lines, [first.to_vec(), vec![(3_000.0, wait), (4_000.0, wait)]]);
    }
}

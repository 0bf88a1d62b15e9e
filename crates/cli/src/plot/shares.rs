//! Share of packets by CPU, over time: areas on top of each other.

use forebay_engine::timeline::Timeline;
use plotters::prelude::*;

use super::chart::{Axis, DrawError, Legend, TimeUnit, framed, picture, plain};
use super::cpus::{DrawnCpu, drawn, elapsed_ns, intervals};
use crate::table::figures::as_f64;
use crate::table::{counted, figures::percent};

/// Outline of a CPU's area over a time without gaps: points of its lower and of its upper border.
#[derive(Default)]
struct Outline {
    lower: Vec<(f64, f64)>,
    upper: Vec<(f64, f64)>,
}

/// Draws the shares.
pub(super) fn draw(timeline: &Timeline) -> Result<String, DrawError> {
    let (cpus, elapsed_ns) = (drawn(timeline), elapsed_ns(timeline));
    let delivered: u64 = cpus.iter().map(|cpu| cpu.packets).sum();
    let unit = TimeUnit::of(elapsed_ns);
    let title = format!("{} delivered, by CPU", counted(delivered, "packet"));
    let legend = |cpu: &DrawnCpu| {
        let (name, packets) = (&cpu.name, counted(cpu.packets, "packet"));
        let share = percent(as_f64(cpu.packets), as_f64(delivered));
        (Some(cpu.color), format!("{name}: {packets} ({share})"))
    };
    let legend: Legend = cpus.iter().map(legend).collect();
    let y = Axis { name: "share of packets in %".to_owned(), max: 100.0, labels: 6, label: &plain };
    let x = unit.axis(elapsed_ns);
    picture(|area| {
        framed(area, &title, &x, &y, &legend, |plane| {
            for (cpu, outlines) in cpus.iter().zip(outlines(timeline, &cpus, unit)) {
                for Outline { mut lower, upper } in outlines {
                    lower.extend(upper.into_iter().rev());
                    plane.draw_series([Polygon::new(lower, cpu.color.filled())])?;
                }
            }
            Ok(())
        })
    })
}

/// Outlines of each CPU. There is a gap while no packet was delivered.
fn outlines(timeline: &Timeline, cpus: &[DrawnCpu], unit: TimeUnit) -> Vec<Vec<Outline>> {
    let mut outlines: Vec<Vec<Outline>> = cpus.iter().map(|_| Vec::new()).collect();
    let mut is_gap = true;
    for [from, to] in intervals(timeline) {
        let packets: Vec<_> = cpus.iter().map(|cpu| cpu.between([from, to]).packets).collect();
        let all: u64 = packets.iter().sum();
        let was_gap = std::mem::replace(&mut is_gap, all == 0);
        if is_gap {
            continue;
        }
        let times = [from.at_ns, to.at_ns].map(|ns| unit.of_ns(ns));
        let mut below = 0;
        for (packets, outlines) in packets.into_iter().zip(&mut outlines) {
            if was_gap {
                outlines.push(Outline::default());
            }
            let height = |packets| as_f64(packets) / as_f64(all) * 100.0;
            let (low, high) = (height(below), height(below + packets));
            if let Some(outline) = outlines.last_mut() {
                outline.lower.extend(times.map(|time| (time, low)));
                outline.upper.extend(times.map(|time| (time, high)));
            }
            below += packets;
        }
    }
    outlines
}

#[cfg(test)]
mod tests {
    use super::super::made_up;
    use super::*;

    #[test]
    fn plt_2_legend_has_packets_and_shares() {
        let svg = draw(&made_up()).unwrap();
        for part in ["120 packets delivered", "CPU 0: 45 packets (37.5 %)", "CPU 3: 75 packets"] {
            assert!(svg.contains(part), "{part}: {svg}");
        }
        // Before and after the gap, for each CPU.
        assert_eq!(svg.matches("<polygon ").count(), 4, "{svg}");
    }

    #[test]
    fn plt_2_areas_fill_the_whole() {
        let timeline = made_up();
        let outlines = outlines(&timeline, &drawn(&timeline), TimeUnit::of(1));
        let [first, second] = outlines.as_slice() else { panic!("two CPUs") };
        assert_eq!((first.len(), second.len()), (2, 2));
        for (below, above) in first.iter().zip(second) {
            assert!(below.lower.iter().all(|(_, share)| *share == 0.0));
            assert_eq!(below.upper, above.lower);
            assert!(above.upper.iter().all(|(_, share)| *share == 100.0));
        }
        assert_eq!(first[0].upper[..2], [(0.0, 75.0), (1_000.0, 75.0)]);
    }
}

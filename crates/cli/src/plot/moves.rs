//! Moves of flows between CPUs, and held moves, over time.

use forebay_engine::timeline::{Timeline, TimelineSample};
use plotters::prelude::*;

use super::chart::{DrawError, Legend, TimeUnit, count_axis, framed, picture};
use super::cpus::{COLORS, elapsed_ns, intervals};
use crate::table::counted;
use crate::table::figures::as_f64;

/// Draws the moves.
pub(super) fn draw(timeline: &Timeline) -> Result<String, DrawError> {
    let elapsed_ns = elapsed_ns(timeline);
    let unit = TimeUnit::of(elapsed_ns);
    let [moves, holds] = [moves, holds].map(|of| bars(timeline, of));
    let most = |bars: &[Bar]| bars.iter().map(|bar| bar.count).max().unwrap_or(0);
    let all = |bars: &[Bar]| bars.iter().map(|bar| bar.count).sum();
    let legend: Legend = vec![
        (Some(COLORS[0]), counted(all(&moves), "move")),
        (Some(COLORS[1]), counted(all(&holds), "held move")),
        (None, "held: packets waited for it".to_owned()),
    ];
    let y = count_axis("number in an interval", most(&moves).max(most(&holds)));
    let x = unit.axis(elapsed_ns);
    picture(|area| {
        framed(area, "Moves of flows between CPUs", &x, &y, &legend, |plane| {
            for (bars, color, part) in [(&moves, COLORS[0], 1.0), (&holds, COLORS[1], 0.5)] {
                plane.draw_series(bars.iter().map(|Bar { from_ns, to_ns, count }| {
                    let (from, to) = (unit.of_ns(*from_ns), unit.of_ns(*to_ns));
                    let corners = [(from, 0.0), (from + (to - from) * part, as_f64(*count))];
                    Rectangle::new(corners, color.filled())
                }))?;
            }
            Ok(())
        })
    })
}

/// Number of events in an interval.
struct Bar {
    from_ns: u64,
    to_ns: u64,
    count: u64,
}

/// Intervals with any event.
fn bars(timeline: &Timeline, of: fn(&TimelineSample) -> u64) -> Vec<Bar> {
    let bars = intervals(timeline).map(|[from, to]| Bar {
        from_ns: from.at_ns,
        to_ns: to.at_ns,
        count: of(to).saturating_sub(of(from)),
    });
    bars.filter(|bar| bar.count > 0).collect()
}

fn moves(sample: &TimelineSample) -> u64 {
    sample.moves
}

fn holds(sample: &TimelineSample) -> u64 {
    sample.holds
}

#[cfg(test)]
mod tests {
    use super::super::made_up;
    use super::*;

    #[test]
    fn plt_2_each_move_is_drawn_once() {
        let svg = draw(&made_up()).unwrap();
        assert!(svg.contains("5 moves") && svg.contains("1 held move"), "{svg}");
        let bars = bars(&made_up(), moves);
        let bars: Vec<_> = bars.iter().map(|bar| (bar.from_ns, bar.to_ns, bar.count)).collect();
        assert_eq!(bars, [(1_000, 2_000, 4), (3_000, 4_000, 1)]);
        // The background, two marks, two bars of moves and one of a held move.
        assert_eq!(svg.matches("<rect ").count(), 6, "{svg}");
    }
}

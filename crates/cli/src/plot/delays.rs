//! Histograms of the waits in backlogs and of held moves, over the whole run.

use forebay_engine::timeline::Timeline;
use plotters::prelude::*;

use super::chart::{Area, Axis, DrawError, Legend, count_axis, framed, picture};
use super::cpus::COLORS;
use crate::table::counted;
use crate::table::figures::{as_f64, nanoseconds};

/// Part of a bucket's width that its bar has.
const BAR_WIDTH: f64 = 0.9;

/// Least number of buckets that are shown.
const BUCKETS_MIN: usize = 8;

/// Draws the histograms, one above the other.
pub(super) fn draw(timeline: &Timeline) -> Result<String, DrawError> {
    picture(|area| {
        let (_, height) = area.dim_in_pixel();
        let (above, below) = area.split_vertically(height / 2);
        let waits = Drawn { of: &timeline.waits, what: "packet", color: COLORS[0] };
        waits.draw(&above, "Waits of packets in the backlog")?;
        let holds = Drawn { of: &timeline.holds, what: "held move", color: COLORS[1] };
        holds.draw(&below, "Durations of held moves")
    })
}

/// Histogram that is drawn.
struct Drawn<'a> {
    of: &'a [(Option<u64>, u64)],
    what: &'static str,
    color: RGBColor,
}

impl Drawn<'_> {
    fn draw(&self, area: &Area<'_>, title: &str) -> Result<(), DrawError> {
        let filled = self.filled();
        let count = filled.iter().map(|(_, count)| count).sum();
        let mut legend: Legend = vec![(Some(self.color), counted(count, self.what))];
        for (part, name) in [(0.5, "half"), (0.99, "99 %"), (1.0, "all")] {
            let bound = within(filled, part);
            legend.extend(bound.map(|bound| (None, format!("{name} within {bound}"))));
        }
        let label = |place: &f64| {
            // Labels stand at the borders between buckets.
            let border = filled.iter().map(|(bound, _)| *bound).zip(1_u32..);
            let bound = border.filter(|(_, index)| f64::from(*index) == *place).find_map(|it| it.0);
            bound.map_or_else(String::new, nanoseconds)
        };
        let x = Axis {
            name: "at most".to_owned(),
            max: as_f64(filled.len().max(1) as u64),
            labels: 10,
            label: &label,
        };
        let most = filled.iter().map(|(_, count)| *count).max().unwrap_or(0);
        let y = count_axis(&format!("{}s", self.what), most);
        framed(area, title, &x, &y, &legend, |plane| {
            let bars = (0_u32..).zip(filled).filter(|(_, (_, count))| *count > 0);
            plane.draw_series(bars.map(|(index, (_, count))| {
                let right = f64::from(index) + 1.0;
                let corners = [(right - BAR_WIDTH, 0.0), (right, as_f64(*count))];
                Rectangle::new(corners, self.color.filled())
            }))?;
            Ok(())
        })
    }

    /// Buckets from the first to the last that has a value, and some above so that few are not wide.
    fn filled(&self) -> &[(Option<u64>, u64)] {
        let has_values = |(_, count): &(Option<u64>, u64)| *count > 0;
        let first = self.of.iter().position(has_values).unwrap_or(0);
        let end = self.of.iter().rposition(has_values).map_or(first, |last| last + 1);
        let end = end.max(first + BUCKETS_MIN).min(self.of.len());
        &self.of[first..end]
    }
}

/// Bound within which this part of the values is; `None` without values, or without a bound.
fn within(buckets: &[(Option<u64>, u64)], part: f64) -> Option<String> {
    let all: u64 = buckets.iter().map(|(_, count)| count).sum();
    let mut below = 0;
    let bucket = buckets.iter().find(|(_, count)| {
        below += count;
        as_f64(below) >= as_f64(all) * part
    });
    bucket.filter(|_| all > 0).and_then(|(bound, _)| *bound).map(nanoseconds)
}

#[cfg(test)]
mod tests {
    use super::super::made_up;
    use super::*;

    #[test]
    fn plt_2_histograms_count_every_wait() {
        let svg = draw(&made_up()).unwrap();
        for part in ["120 packets", "1 held move", "half within 2.0 µs"] {
            assert!(svg.contains(part), "{part}: {svg}");
        }
        // The background, two marks, two buckets of waits and one of held moves.
        assert_eq!(svg.matches("<rect ").count(), 6, "{svg}");
    }

    #[test]
    fn plt_2_quantiles_are_bounds_of_buckets() {
        let buckets = [(Some(1), 50), (Some(2), 49), (Some(4), 1), (None, 0)];
        let of = |part| within(&buckets, part);
        assert_eq!(
            [0.5, 0.99, 1.0].map(of),
            ["1 ns", "2 ns", "4 ns"].map(|it| Some(it.to_owned()))
        );
        assert_eq!(within(&[(Some(1), 0)], 0.5), None);
        assert_eq!(within(&[(None, 1)], 0.5), None, "the last bucket has no bound");
    }
}

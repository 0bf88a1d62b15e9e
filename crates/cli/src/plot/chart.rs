//! Frame of a picture: title, axes and legend.

use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::table::figures::as_f64;

/// Size of a picture.
const WIDTH: u32 = 960;
const HEIGHT: u32 = 400;

/// Place of the legend, and the height of one of its lines.
const LEGEND_WIDTH: u32 = 250;
const LEGEND_TOP: i32 = 48;
const LEGEND_LINE: i32 = 20;

/// Part of the plane that stays free above the highest value.
const HEADROOM: f64 = 1.05;

pub(super) type DrawError = Box<dyn std::error::Error>;
pub(super) type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;
pub(super) type Plane<'a> =
    ChartContext<'a, SVGBackend<'a>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

/// Lines of a legend: a color and its meaning; without a color a remark.
pub(super) type Legend = Vec<(Option<RGBColor>, String)>;

/// Axis of a picture, from zero.
pub(super) struct Axis<'a> {
    pub(super) name: String,
    /// Largest value.
    pub(super) max: f64,
    /// Number of labels, at most.
    pub(super) labels: usize,
    pub(super) label: &'a dyn Fn(&f64) -> String,
}

/// Unit in which a picture shows times.
#[derive(Clone, Copy)]
pub(super) struct TimeUnit {
    name: &'static str,
    ns: f64,
}

impl TimeUnit {
    /// Unit for times up to `max_ns`.
    pub(super) fn of(max_ns: u64) -> Self {
        match max_ns {
            10_000_000_000.. => Self { name: "s", ns: 1e9 },
            10_000_000.. => Self { name: "ms", ns: 1e6 },
            10_000.. => Self { name: "µs", ns: 1e3 },
            _ => Self { name: "ns", ns: 1.0 },
        }
    }

    /// Time in this unit.
    pub(super) fn of_ns(self, ns: u64) -> f64 {
        as_f64(ns) / self.ns
    }

    /// Axis of the time of a run that took `elapsed_ns`.
    pub(super) fn axis(self, elapsed_ns: u64) -> Axis<'static> {
        let name = format!("time in {}", self.name);
        Axis { name, max: self.of_ns(elapsed_ns.max(1)), labels: 10, label: &plain }
    }

    /// Axis of durations up to `max_ns`, with some space above.
    pub(super) fn axis_of(self, what: &str, max_ns: f64) -> Axis<'static> {
        let name = format!("{what} in {}", self.name);
        Axis { name, max: max_ns / self.ns * HEADROOM, labels: 8, label: &plain }
    }
}

/// Axis of numbers up to `max`, with some space above.
pub(super) fn count_axis(name: &str, max: u64) -> Axis<'static> {
    Axis { name: name.to_owned(), max: as_f64(max.max(1)) * HEADROOM, labels: 8, label: &plain }
}

/// Number without more digits than it needs.
pub(super) fn plain(number: &f64) -> String {
    let text = format!("{number:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Draws a picture on an area of its own.
pub(super) fn picture(
    draw: impl FnOnce(&Area<'_>) -> Result<(), DrawError>,
) -> Result<String, DrawError> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (WIDTH, HEIGHT)).into_drawing_area();
        area.fill(&WHITE)?;
        draw(&area)?;
        area.present()?;
    }
    Ok(svg)
}

/// Draws the frame of a picture, and then its data on the plane.
pub(super) fn framed<'a>(
    area: &Area<'a>,
    title: &str,
    x: &Axis<'_>,
    y: &Axis<'_>,
    legend: &Legend,
    draw: impl FnOnce(&mut Plane<'a>) -> Result<(), DrawError>,
) -> Result<(), DrawError> {
    let (width, height) = area.dim_in_pixel();
    let left = i32::try_from(width - LEGEND_WIDTH)?;
    area.draw(&Text::new(title.to_owned(), (14, 18), text(16)))?;
    for (index, (color, meaning)) in (0..).zip(legend) {
        let middle = LEGEND_TOP + LEGEND_LINE * index;
        if let Some(color) = color {
            let mark = [(left + 12, middle - 6), (left + 24, middle + 6)];
            area.draw(&Rectangle::new(mark, color.filled()))?;
        }
        area.draw(&Text::new(meaning.clone(), (left + 32, middle), text(12)))?;
    }
    let inside = area.clone().shrink((0, 30), (width - LEGEND_WIDTH, height - 34));
    let mut plane = ChartBuilder::on(&inside)
        .margin_left(14)
        .margin_right(18)
        .x_label_area_size(40)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..x.max, 0.0..y.max)?;
    let lines = RGBColor(225, 225, 225);
    plane
        .configure_mesh()
        .disable_x_mesh()
        .bold_line_style(lines)
        .light_line_style(TRANSPARENT)
        .x_desc(x.name.as_str())
        .y_desc(y.name.as_str())
        .x_labels(x.labels)
        .y_labels(y.labels)
        .x_label_formatter(x.label)
        .y_label_formatter(y.label)
        .draw()?;
    draw(&mut plane)
}

fn text(size: i32) -> TextStyle<'static> {
    ("sans-serif", size).into_font().color(&BLACK).pos(Pos::new(HPos::Left, VPos::Center))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plt_1_axis_labels_are_short() {
        for (number, label) in [(0.0, "0"), (10.0, "10"), (2.5, "2.5"), (0.126, "0.13")] {
            assert_eq!(plain(&number), label);
        }
        assert_eq!(TimeUnit::of(2_500_000_000).of_ns(2_500_000_000), 2500.0);
        assert_eq!(TimeUnit::of(25_000_000_000).axis(25_000_000_000).name, "time in s");
        assert_eq!(TimeUnit::of(9_999).name, "ns");
    }
}

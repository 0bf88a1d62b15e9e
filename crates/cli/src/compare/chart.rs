//! The report as a drawing: a bar for each row, from zero, with its minimum and maximum.

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::report::{CompareReport, CompareRow, Comparison};
use super::subject::{Author, Better};
use super::text::figure;

const WIDTH: u32 = 960;
const ROW_HEIGHT: u32 = 22;
/// Height of a comparison's title, and of the space behind its rows.
const TITLE_HEIGHT: u32 = 46;
/// Space for the names of programs, and behind the longest bar.
const NAMES_WIDTH: i32 = 330;
const FIGURES_WIDTH: i32 = 110;

const OURS: RGBColor = RGBColor(0, 114, 178);
const PEERS: RGBColor = RGBColor(150, 150, 150);

type Drawn<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;
type DrawError = Box<dyn std::error::Error>;

/// Draws the report as SVG.
pub(super) fn draw(report: &CompareReport) -> Result<String, DrawError> {
    let rows = |comparison: &Comparison| u32::try_from(comparison.rows.len()).unwrap_or(0);
    let height = |comparison: &Comparison| TITLE_HEIGHT + ROW_HEIGHT * rows(comparison);
    let whole: u32 = report.comparisons.iter().map(height).sum();
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (WIDTH, whole.max(1))).into_drawing_area();
        area.fill(&WHITE)?;
        let mut top = 0;
        for comparison in &report.comparisons {
            let own = area.clone().shrink((0, top), (WIDTH, height(comparison)));
            draw_comparison(&own, comparison)?;
            top += i32::try_from(height(comparison))?;
        }
        area.present()?;
    }
    Ok(svg)
}

fn draw_comparison(area: &Drawn<'_>, comparison: &Comparison) -> Result<(), DrawError> {
    let Comparison { group, metric, unit, better, rows, .. } = comparison;
    let better = if *better == Better::More { "more" } else { "less" };
    let title = format!("{group}: {metric} ({unit}, {better} is better)");
    area.draw(&Text::new(title, (8, 12), text(15, HPos::Left)))?;
    let longest = rows.iter().filter_map(|row| row.spread).map(|spread| spread.max);
    let longest = longest.fold(f64::MIN_POSITIVE, f64::max);
    for (index, row) in (0..).zip(rows) {
        draw_row(area, row, 34 + index * i32::try_from(ROW_HEIGHT)?, longest)?;
    }
    Ok(())
}

fn draw_row(area: &Drawn<'_>, row: &CompareRow, top: i32, longest: f64) -> Result<(), DrawError> {
    let middle = top + 8;
    area.draw(&Text::new(row.program.clone(), (NAMES_WIDTH - 8, middle), text(12, HPos::Right)))?;
    let Some(spread) = row.spread else {
        return Ok(area.draw(&Text::new(
            "not measured",
            (NAMES_WIDTH, middle),
            text(12, HPos::Left),
        ))?);
    };
    let room = i32::try_from(WIDTH)? - NAMES_WIDTH - FIGURES_WIDTH;
    let at = |value: f64| NAMES_WIDTH + whole(value / longest * f64::from(room));
    let color = if row.author == Author::Forebay { OURS } else { PEERS };
    let bar = [(NAMES_WIDTH, top), (at(spread.median()), top + 16)];
    area.draw(&Rectangle::new(bar, color.filled()))?;
    let ends = vec![(at(spread.min), middle), (at(spread.max), middle)];
    area.draw(&PathElement::new(ends, BLACK.stroke_width(1)))?;
    let label = figure(spread.median());
    Ok(area.draw(&Text::new(label, (at(spread.max) + 6, middle), text(12, HPos::Left)))?)
}

fn text(size: i32, at: HPos) -> TextStyle<'static> {
    ("sans-serif", size).into_font().color(&BLACK).pos(Pos::new(at, VPos::Center))
}

#[expect(clippy::cast_possible_truncation, reason = "a position on a drawing")]
fn whole(position: f64) -> i32 {
    position as i32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::report;

    #[test]
    fn cmp_3_drawing_has_every_row() {
        let svg = draw(&report::made_up()).unwrap();
        assert!(svg.starts_with("<svg "), "{svg}");
        for part in ["kernel", "cpumap", "not measured", "forebay, af_xdp", "forebay, af_packet"] {
            assert!(svg.contains(part), "{part}: {svg}");
        }
        // A bar for each row with figures, on the background.
        assert_eq!(svg.matches("<rect ").count(), 1 + 3, "{svg}");
    }
}

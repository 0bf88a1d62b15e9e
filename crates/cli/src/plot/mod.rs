//! Pictures of a run as SVG files, drawn from its timeline.

mod chart; //     frame, axes and legend of a picture
mod cpus; //      CPUs that are drawn, and their colors
mod shares; //    share of packets by CPU, over time
mod waits; //     waits in backlogs, over time
mod moves; //     moves and held moves, over time
mod delays; //    histograms of waits and of held moves

use std::fs;
use std::path::{Path, PathBuf};

use forebay_engine::timeline::Timeline;
use forebay_sys::error::Error;

use crate::failure::Failure;
use crate::result_file;

/// Draws one picture of a timeline.
type Draw = fn(&Timeline) -> Result<String, chart::DrawError>;

/// All pictures: the name of each file, and the function that draws it.
const PICTURES: [(&str, Draw); 4] = [
    ("shares.svg", shares::draw),
    ("waits.svg", waits::draw),
    ("moves.svg", moves::draw),
    ("delays.svg", delays::draw),
];

/// Paths of the pictures in a directory.
pub(crate) fn paths(directory: &Path) -> Vec<PathBuf> {
    PICTURES.iter().map(|(name, _)| directory.join(name)).collect()
}

/// Files that the pictures of a run are drawn into. They are checked before the run, so that one that
/// cannot be written is reported before any packet is handled.
pub(crate) struct PlotFiles {
    paths: Vec<PathBuf>,
}

impl PlotFiles {
    /// Creates the directory, and checks that its files can be written.
    pub(crate) fn create(directory: &Path) -> Result<Self, Failure> {
        fs::create_dir_all(directory).map_err(Error::file("create", directory))?;
        let paths = paths(directory);
        for path in &paths {
            result_file::check(path).map_err(Error::file("create", path))?;
        }
        Ok(Self { paths })
    }

    /// Draws all pictures.
    pub(crate) fn draw(self, timeline: &Timeline) -> Result<(), Failure> {
        for (path, (name, draw)) in self.paths.iter().zip(PICTURES) {
            let svg = draw(timeline).map_err(|error| {
                let problem = format!("{name} cannot be drawn: {error}");
                Failure::usage(problem, "this is a bug: please report it with the command")
            })?;
            result_file::write(path, svg.as_bytes()).map_err(Error::file("write", path))?;
        }
        Ok(())
    }
}

/// Made-up timeline of two CPUs, for tests.
#[cfg(test)]
fn made_up() -> Timeline {
    use forebay_engine::timeline::{CpuSample, TimelineSample};
    use forebay_rx::CpuId;

    let cpu = |packets: u64| CpuSample { packets, waited: packets, waited_ns: packets * 1_500 };
    let sample = |at_ns, [first, second]: [u64; 2], moves, holds| TimelineSample {
        at_ns,
        cpus: vec![cpu(first), cpu(second)],
        moves,
        holds,
    };
    Timeline {
        cpus: vec![CpuId(0), CpuId(3)],
        samples: vec![
            sample(0, [0, 0], 0, 0),
            sample(1_000, [30, 10], 0, 0),
            sample(2_000, [40, 40], 4, 1),
            // Nothing came.
            sample(3_000, [40, 40], 4, 1),
            sample(4_000, [45, 75], 5, 1),
        ],
        waits: vec![(Some(1024), 20), (Some(2048), 100), (None, 0)],
        holds: vec![(Some(1024), 0), (Some(2048), 1), (None, 0)],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plt_1_pictures_are_complete_documents() {
        for (name, draw) in PICTURES {
            let svg = draw(&made_up()).unwrap();
            assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"), "{name}: {svg}");
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{name}: {svg}");
            assert!(!svg.contains("href") && !svg.contains("url("), "{name}: {svg}");
        }
    }

    #[test]
    fn plt_1_empty_run_has_pictures() {
        let mut timeline = made_up();
        timeline.samples.truncate(1);
        timeline.samples.push(timeline.samples[0].clone());
        let none =
            |buckets: &mut Vec<(Option<u64>, u64)>| buckets.iter_mut().for_each(|it| it.1 = 0);
        none(&mut timeline.waits);
        none(&mut timeline.holds);
        for cpus in [2, 0] {
            timeline.cpus.truncate(cpus);
            timeline.samples.iter_mut().for_each(|sample| sample.cpus.truncate(cpus));
            for (name, draw) in PICTURES {
                let svg = draw(&timeline).unwrap();
                assert!(!svg.contains("NaN") && !svg.contains("inf"), "{name}: {svg}");
            }
        }
    }
}

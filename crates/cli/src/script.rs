//! Scripts: scheduled changes, one on each line of a file.

use std::path::Path;
use std::sync::Arc;

use forebay_engine::knobs::{Machine, ScriptedChange, ScriptedText};
use forebay_sys::cpu_list::CpuList;
use forebay_sys::text_file::read_text;

use crate::failure::Failure;
use crate::options::cpus::check_cpus;

/// Maximum length of a script, in bytes.
const SCRIPT_BYTES_MAX: usize = 16 << 20;

/// A scripted change, and its place if it stands in a file.
#[derive(Clone, Debug)]
pub(crate) struct PlacedChange {
    text: ScriptedText,
    /// File and line.
    place: Option<(Arc<str>, usize)>,
}

impl From<ScriptedText> for PlacedChange {
    fn from(text: ScriptedText) -> Self {
        Self { text, place: None }
    }
}

impl PlacedChange {
    /// The change that this makes on a machine, for a run on `cpus`. A failure names the place.
    pub(crate) fn on(&self, machine: &Machine, cpus: &CpuList) -> Result<ScriptedChange, Failure> {
        let read = self.text.on(machine).map_err(|error| {
            let help = "give a value that `echo` could write to the knob's file; a mask names CPUs \
                        that there can be";
            Failure::usage(error.to_string(), help)
        });
        let checked = read.and_then(|change| check_cpus(&change.change, cpus).map(|()| change));
        checked.map_err(|failure| match &self.place {
            Some((path, line)) => failure.at(&place(path, *line)),
            None => failure,
        })
    }
}

/// Name of a place in a script.
fn place(path: &str, line: usize) -> String {
    format!("--script {path}, line {line}")
}

/// Reads a script.
pub(crate) fn read(path: &Path) -> Result<Vec<PlacedChange>, Failure> {
    let shown: Arc<str> = path.display().to_string().into();
    let text = read_text(path, SCRIPT_BYTES_MAX).map_err(|error| {
        let help = "give a text file with changes such as 10000:rps_cpus=3";
        Failure::usage(format!("--script {shown}: {error}"), help)
    })?;
    let changes = changes(&text).map_err(|(line, problem)| {
        let help = "each line is FRAME:KNOB=VALUE, as in 10000:rps_cpus=3";
        Failure::usage(problem, help).at(&place(&shown, line))
    })?;
    let placed = |(line, text)| PlacedChange { text, place: Some((Arc::clone(&shown), line)) };
    Ok(changes.into_iter().map(placed).collect())
}

/// Parses the changes of a script, with their line numbers. The error is a line number and the problem.
fn changes(text: &str) -> Result<Vec<(usize, ScriptedText)>, (usize, String)> {
    // Some editors begin a text with a byte-order mark.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let changes = (1..).zip(text.lines()).filter_map(|(line, text)| {
        let text = text.split('#').next().unwrap_or_default().trim();
        let change = || match text.parse() {
            Ok(change) => Ok((line, change)),
            Err(error) => Err((line, forebay_sys::Error::to_string(&error))),
        };
        (!text.is_empty()).then(change)
    });
    changes.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn script_errors_name_their_line() {
        let script = changes("# flips\n\n500:pause=1 # for a while\n 900:resume=1\n").unwrap();
        let frames: Vec<_> = script.iter().map(|(line, text)| (*line, text.frame)).collect();
        assert_eq!(frames, [(3, 500), (4, 900)]);
        let (line, problem) = changes("500:pause=1\n900:resume\n").unwrap_err();
        assert!(line == 2 && problem.contains("KNOB=VALUE"), "{line}: {problem}");
    }
}

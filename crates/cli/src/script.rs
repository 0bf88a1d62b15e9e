//! Scripts: scheduled changes, one on each line of a file.

use std::path::Path;

use forebay_engine::knobs::ScriptedText;
use forebay_sys::text_file::read_text;

use crate::failure::Failure;

/// Maximum length of a script, in bytes.
const SCRIPT_BYTES_MAX: usize = 16 << 20;

/// Reads a script.
pub(crate) fn read(path: &Path) -> Result<Vec<ScriptedText>, Failure> {
    let shown = path.display();
    let text = read_text(path, SCRIPT_BYTES_MAX).map_err(|error| {
        let help = "give a text file with changes such as 10000:rps_cpus=3";
        Failure::usage(format!("--script {shown}: {error}"), help)
    })?;
    changes(&text).map_err(|(line, problem)| {
        let help = "each line is FRAME:KNOB=VALUE, as in 10000:rps_cpus=3";
        Failure::usage(format!("--script {shown}, line {line}: {problem}"), help)
    })
}

/// Parses the changes of a script. The error is a line number and the problem.
fn changes(text: &str) -> Result<Vec<ScriptedText>, (usize, String)> {
    let changes = (1..).zip(text.lines()).filter_map(|(line, text)| {
        let text = text.split('#').next().unwrap_or_default().trim();
        let change = || text.parse().map_err(|error: forebay_sys::Error| (line, error.to_string()));
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
        let frames: Vec<_> = script.iter().map(|scripted| scripted.frame).collect();
        assert_eq!(frames, [500, 900]);
        let (line, problem) = changes("500:pause=1\n900:resume\n").unwrap_err();
        assert!(line == 2 && problem.contains("KNOB=VALUE"), "{line}: {problem}");
    }
}

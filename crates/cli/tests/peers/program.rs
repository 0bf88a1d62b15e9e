//! The program under test.

use std::path::Path;
use std::process::{Command, Output};

/// Runs `forebay replay` in a directory.
pub(crate) fn replay<'a>(directory: &Path, args: impl IntoIterator<Item = &'a str>) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.arg("replay").args(args).current_dir(directory).output().unwrap()
}

/// Text on standard error, without the frame and line breaks around it.
pub(crate) fn told(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    text.split([' ', '\n', '│']).filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
}

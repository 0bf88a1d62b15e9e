//! Started programs.
//!
//! A program prints `ready`, then its result as one line of JSON. It ends when its standard input
//! is closed, so that none outlives the comparison.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdout, Command, Stdio};

use serde_json::Value;

/// A started program, killed when dropped.
pub(super) struct StartedProgram {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl StartedProgram {
    /// Starts a program, and waits until it is ready.
    pub(super) fn start(command: &mut Command) -> Result<Self, String> {
        let mut started = Self::spawn(command)?;
        match started.line()?.trim() {
            "ready" => Ok(started),
            other => Err(format!("{command:?} said {other:?} rather than that it is ready")),
        }
    }

    /// Starts a program that does not say when it is ready.
    pub(super) fn spawn(command: &mut Command) -> Result<Self, String> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // A terminal's signals are for the comparison, which ends its programs.
        command.process_group(0);
        let mut child = command.spawn().map_err(|error| format!("{command:?}: {error}"))?;
        let lines = child.stdout.take().ok_or("a pipe is missing")?;
        Ok(Self { child, lines: BufReader::new(lines) })
    }

    /// The next line. A program that ends instead has failed.
    fn line(&mut self) -> Result<String, String> {
        let mut line = String::new();
        match self.lines.read_line(&mut line) {
            Ok(1..) => Ok(line),
            Ok(0) | Err(_) => Err(self.failure()),
        }
    }

    /// Result of the program.
    pub(super) fn result(&mut self) -> Result<Value, String> {
        let line = self.line()?;
        serde_json::from_str(&line).map_err(|error| format!("{line:?} is no result: {error}"))
    }

    /// CPU time of all threads so far, in nanoseconds.
    pub(super) fn cpu_ns(&self) -> u64 {
        let threads = fs::read_dir(format!("/proc/{}/task", self.child.id()));
        let threads = threads.into_iter().flatten().flatten();
        let time = |path: std::path::PathBuf| {
            let text = fs::read_to_string(path.join("schedstat")).ok()?;
            text.split_whitespace().next()?.parse::<u64>().ok()
        };
        threads.filter_map(|thread| time(thread.path())).sum()
    }

    /// Reason for an early end, in the program's words.
    fn failure(&mut self) -> String {
        // Killed first: its standard error ends with it.
        let _ = self.child.kill();
        let mut told = String::new();
        if let Some(stderr) = &mut self.child.stderr {
            let _ = stderr.read_to_string(&mut told);
        }
        match told.trim() {
            "" => "it ended without a word".to_owned(),
            told => {
                let words = told.split_whitespace().filter(|word| !["×", "│"].contains(word));
                words.collect::<Vec<_>>().join(" ")
            }
        }
    }
}

impl Drop for StartedProgram {
    fn drop(&mut self) {
        // Ignored: it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn program_says_ready_then_result() {
        let mut program =
            StartedProgram::start(&mut shell(r#"echo ready; echo '{"packets":3}'; cat"#)).unwrap();
        assert_eq!(program.result().unwrap()["packets"], 3);
    }

    #[test]
    fn cmp_2_early_end_has_a_reason() {
        let failed = StartedProgram::start(&mut shell("echo no such device >&2; exit 1"));
        assert_eq!(failed.err().unwrap(), "no such device");
        let mut silent = StartedProgram::start(&mut shell("echo ready")).unwrap();
        assert_eq!(silent.result().unwrap_err(), "it ended without a word");
    }
}

//! Started programs.
//!
//! A program prints `ready`, then its result as one line of JSON. It ends when its standard input
//! is closed, so that none outlives the comparison.

use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::IS_INTERRUPTED;

/// Longest wait for a line: of several windows, each of a minute at most.
const LINE_WAIT_MAX: Duration = Duration::from_secs(600);

/// Interval between two looks for a signal.
const LOOK_PERIOD: Duration = Duration::from_millis(100);

/// Number of lines that a program may be ahead.
const LINES_AHEAD_MAX: usize = 4;

/// A started program, killed when dropped.
pub(super) struct StartedProgram {
    child: Child,
    /// Lines of its standard output, read by a thread so that a wait can end.
    lines: Receiver<io::Result<String>>,
}

impl StartedProgram {
    /// Starts a program, and waits until it is ready.
    pub(super) fn start(command: &mut Command) -> Result<Self, String> {
        let mut started = Self::spawn(command)?;
        match started.line(LINE_WAIT_MAX)?.trim() {
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
        let stdout = child.stdout.take().ok_or("a pipe is missing")?;
        let (sender, lines) = sync_channel(LINES_AHEAD_MAX);
        let started = Self { child, lines };
        let read = move || {
            let mut lines = BufReader::new(stdout).lines();
            // Ends with the program, or when nobody waits for its lines.
            while lines.next().is_some_and(|line| sender.send(line).is_ok()) {}
        };
        let thread = thread::Builder::new().name("compare-lines".to_owned()).spawn(read);
        thread.map(|_| started).map_err(|error| format!("a thread for {command:?}: {error}"))
    }

    /// The next line. A program that ends or stays silent instead has failed.
    fn line(&mut self, wait_max: Duration) -> Result<String, String> {
        self.line_unless(&IS_INTERRUPTED, wait_max)
    }

    fn line_unless(
        &mut self,
        is_interrupted: &AtomicBool,
        wait_max: Duration,
    ) -> Result<String, String> {
        let began = Instant::now();
        loop {
            let left = wait_max.saturating_sub(began.elapsed());
            match self.lines.recv_timeout(left.min(LOOK_PERIOD)) {
                Ok(Ok(line)) => return Ok(line),
                Ok(Err(_)) | Err(RecvTimeoutError::Disconnected) => return Err(self.failure()),
                Err(RecvTimeoutError::Timeout) if is_interrupted.load(Ordering::Relaxed) => {
                    return Err("interrupted".to_owned());
                }
                Err(RecvTimeoutError::Timeout) if left > LOOK_PERIOD => {}
                Err(RecvTimeoutError::Timeout) => {
                    let (told, waited_s) = (self.failure(), wait_max.as_secs());
                    return Err(format!("it said nothing for {waited_s} s, and was ended: {told}"));
                }
            }
        }
    }

    /// Result of the program.
    pub(super) fn result(&mut self) -> Result<Value, String> {
        let line = self.line(LINE_WAIT_MAX)?;
        serde_json::from_str(&line).map_err(|error| format!("{line:?} is not a result: {error}"))
    }

    /// CPU time of all threads so far, in nanoseconds, with those that have ended: a result may be
    /// the last thing that a program's peer waits for.
    pub(super) fn cpu_ns(&self) -> Result<u64, String> {
        let id = self.child.id();
        forebay_sys::cpu_ns_of(id).map_err(|error| format!("CPU time of process {id}: {error}"))
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

    #[test]
    fn cmp_4_ended_threads_had_cpu_time() {
        const BURNT_NS: u64 = 20_000_000;
        let cpu_ns = || forebay_sys::cpu_ns_of(std::process::id()).unwrap();
        let before_ns = cpu_ns();
        let thread = thread::spawn(|| while forebay_sys::thread_cpu_ns() < BURNT_NS {});
        thread.join().unwrap();
        assert!(cpu_ns() - before_ns >= BURNT_NS);
    }

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
    fn cmp_4_ended_program_had_cpu_time() {
        let mut program = StartedProgram::start(&mut shell("echo ready; echo 1")).unwrap();
        program.result().unwrap();
        // The end of its output is its own end.
        program.line(LINE_WAIT_MAX).unwrap_err();
        assert!(program.cpu_ns().unwrap() > 0);
    }

    #[test]
    fn cmp_2_early_end_has_a_reason() {
        let failed = StartedProgram::start(&mut shell("echo no such device >&2; exit 1"));
        assert_eq!(failed.err().unwrap(), "no such device");
        let mut silent = StartedProgram::start(&mut shell("echo ready")).unwrap();
        assert_eq!(silent.result().unwrap_err(), "it ended without a word");
    }

    #[test]
    fn cmp_2_silent_program_is_ended() {
        let mut stuck = StartedProgram::start(&mut shell("echo ready; exec cat")).unwrap();
        let reason = stuck.line(Duration::ZERO).unwrap_err();
        assert_eq!(reason, "it said nothing for 0 s, and was ended: it ended without a word");
    }

    #[test]
    fn cmp_2_signal_ends_the_wait() {
        let mut program = StartedProgram::start(&mut shell("echo ready; exec cat")).unwrap();
        let waited = program.line_unless(&AtomicBool::new(true), LINE_WAIT_MAX);
        assert_eq!(waited.unwrap_err(), "interrupted");
    }
}

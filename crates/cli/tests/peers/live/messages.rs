//! Messages of a run with `--log json`, read as they come.

use std::io::{BufRead, BufReader, Lines};
use std::process::{Child, ChildStderr, Command, Stdio};

use libtest_mimic::Failed;
use serde_json::Value;

use crate::Judgement;

/// A run whose messages are read. Drop kills it.
pub(super) struct Messages {
    child: Child,
    lines: Lines<BufReader<ChildStderr>>,
}

impl Messages {
    /// Starts a command that prints messages as JSON.
    pub(super) fn of(mut command: Command) -> Result<Self, Failed> {
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
        let stderr = child.stderr.take().ok_or("it has no standard error")?;
        Ok(Self { child, lines: BufReader::new(stderr).lines() })
    }

    /// Next message that has this field. Fails if the run ends before.
    pub(super) fn wait_for(&mut self, field: &str) -> Result<Value, Failed> {
        let mut before = Vec::new();
        for line in &mut self.lines {
            let line = line?;
            let message: Value = serde_json::from_str(&line).map_err(|_| line.clone())?;
            if !message[field].is_null() {
                return Ok(message);
            }
            before.push(line);
        }
        Err(format!("no message has {field}: {before:?}").into())
    }

    /// Fails if the run has ended.
    pub(super) fn judge_alive(&mut self) -> Judgement {
        match self.child.try_wait()? {
            None => Ok(()),
            Some(status) => Err(format!("it has ended: {status}").into()),
        }
    }

    /// Waits for the end of the run, and returns its exit code.
    pub(super) fn ends(&mut self) -> Result<Option<i32>, Failed> {
        Ok(self.child.wait()?.code())
    }
}

impl Drop for Messages {
    fn drop(&mut self) {
        // Ignored: it may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

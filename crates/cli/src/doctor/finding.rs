//! Findings, and what each costs.

use serde::Serialize;

/// Weight of a finding, the lightest first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Severity {
    /// Worth knowing; nothing is wrong.
    Note,
    /// Costs packets or time.
    Costs,
    /// Stops a run.
    Stops,
}

/// Something to change or to know.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(super) struct Finding {
    pub(super) severity: Severity,
    /// Subject, as in `governor`.
    pub(super) about: &'static str,
    /// Fact that was found.
    pub(super) found: String,
    /// Commands that change it, each sufficient unless the text says otherwise.
    pub(super) commands: Vec<String>,
    /// Expected gain.
    pub(super) gain: String,
}

impl Finding {
    pub(super) fn new(severity: Severity, about: &'static str, found: impl Into<String>) -> Self {
        Self { severity, about, found: found.into(), commands: Vec::new(), gain: String::new() }
    }

    /// Adds a command.
    pub(super) fn command(mut self, command: impl Into<String>) -> Self {
        self.commands.push(command.into());
        self
    }

    /// Sets the gain to be expected.
    pub(super) fn gain(mut self, gain: impl Into<String>) -> Self {
        self.gain = gain.into();
        self
    }
}

//! Changes during a run, scripted before it: each with a frame, a knob and a value.

use std::str::FromStr;

use forebay_sys::error::Error;

use super::change::{Change, refused};
use super::machine::Machine;
use super::text::ChangeText;

/// A change and the frame before which it takes effect.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ScriptedChange {
    /// Number of the first frame after the change.
    pub frame: u64,
    /// The change.
    pub change: Change,
}

/// Changes in the order in which they take effect.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Script(Vec<ScriptedChange>);

impl Script {
    /// Sorts changes by their frames; those for the same frame stay in the given order.
    #[must_use]
    pub fn new(mut changes: Vec<ScriptedChange>) -> Self {
        changes.sort_by_key(|change| change.frame);
        Self(changes)
    }

    /// All changes, in order.
    #[must_use]
    pub fn changes(&self) -> &[ScriptedChange] {
        &self.0
    }
}

/// A scripted change as text: its value can be read only once the machine is known.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ScriptedText {
    /// Number of the first frame after the change.
    pub frame: u64,
    /// The change.
    pub change: ChangeText,
}

impl ScriptedText {
    /// The change that this makes on a machine.
    ///
    /// # Errors
    /// As [`ChangeText::on`].
    pub fn on(&self, machine: &Machine) -> Result<ScriptedChange, Error> {
        Ok(ScriptedChange { frame: self.frame, change: self.change.on(machine)? })
    }
}

impl FromStr for ScriptedText {
    type Err = Error;

    /// Reads `frame:knob=value`.
    fn from_str(text: &str) -> Result<Self, Error> {
        let split = text.split_once(':');
        let frame = split.and_then(|(frame, _)| frame.trim().parse().ok());
        let (Some(frame), Some((_, change))) = (frame, split) else {
            return Err(refused(
                "a scripted change",
                text,
                "it has the form FRAME:KNOB=VALUE, as in 10000:rps_cpus=3",
            ));
        };
        Ok(Self { frame, change: change.parse()? })
    }
}

impl FromStr for ScriptedChange {
    type Err = Error;

    /// Reads `frame:knob=value`, as on the [largest machine](Machine::largest).
    fn from_str(text: &str) -> Result<Self, Error> {
        text.parse::<ScriptedText>()?.on(&Machine::largest())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scripted(text: &str) -> Result<ScriptedChange, String> {
        text.parse().map_err(|error: Error| error.to_string())
    }

    #[test]
    fn changes_are_parsed_in_order() {
        let texts = ["10000:rps_cpus=3", "500:pause=1", "10000:netdev_max_backlog=50"];
        let script = Script::new(texts.map(|text| scripted(text).unwrap()).into());
        let changes = script.changes().iter();
        let knobs: Vec<_> = changes.map(|change| (change.frame, change.change.knob())).collect();
        let ordered = [(500, "pause"), (10000, "rps_cpus"), (10000, "netdev_max_backlog")];
        assert_eq!(knobs, ordered);
    }

    #[test]
    fn impossible_script_value_has_reason() {
        for text in ["rps_cpus=3", "x:rps_cpus=3", "1:rps_cpus", "1:rps_cpu=3", "1:pause=x"] {
            assert!(scripted(text).unwrap_err().contains("cannot be"), "{text}");
        }
    }
}

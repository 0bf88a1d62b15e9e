//! The program's trace of coalescing: `lro.jsonl`, one line per packet that leaves it.

use std::fs;
use std::path::Path;
use std::time::Duration;

use libtest_mimic::Failed;
use serde_json::Value;

use crate::frames::Frame;
use crate::{captures, program};

/// A packet that left coalescing.
pub(crate) struct Left {
    /// Indexes of the frames in the capture.
    pub(crate) inputs: Vec<usize>,
    /// Drop reason; if set, the other fields are empty.
    pub(crate) drop: Option<String>,
    pub(crate) payload_len: usize,
    pub(crate) gso_size: usize,
    pub(crate) flags: String,
    pub(crate) bytes: Vec<u8>,
}

/// Coalesces frames in a replay.
pub(crate) fn coalesce(frames: &[(Duration, Frame)], args: &[&str]) -> Result<Vec<Left>, Failed> {
    let directory = tempfile::tempdir()?;
    captures::write_pcap_at(&directory.path().join("f.pcap"), frames);
    let fixed = ["f.pcap", "--coalesce", "gro", "--trace", "t", "--json"];
    let output = program::replay(directory.path(), fixed.iter().chain(args).copied());
    if !output.status.success() {
        return Err(program::told(&output).into());
    }
    read(&directory.path().join("t/lro.jsonl"))
}

fn read(path: &Path) -> Result<Vec<Left>, Failed> {
    let text = fs::read_to_string(path).map_err(|error| format!("lro.jsonl: {error}"))?;
    let line = |line: &str| {
        Left::of(&serde_json::from_str(line)?).ok_or_else(|| format!("lro.jsonl: {line}").into())
    };
    text.lines().map(line).collect()
}

impl Left {
    fn of(line: &Value) -> Option<Self> {
        let number = |name: &str| usize::try_from(line[name].as_u64()?).ok();
        let inputs =
            line["in"].as_array()?.iter().map(|index| usize::try_from(index.as_u64()?).ok());
        let inputs = inputs.collect::<Option<_>>()?;
        if let Some(reason) = line["drop"].as_str() {
            let drop = Some(reason.to_owned());
            return Some(Self { inputs, drop, ..Self::nothing() });
        }
        Some(Self {
            inputs,
            drop: None,
            payload_len: number("payload_len")?,
            gso_size: number("gso_size")?,
            flags: line["flags"].as_str()?.to_owned(),
            bytes: hex::decode(line["hex"].as_str()?).ok()?,
        })
    }

    fn nothing() -> Self {
        Self {
            inputs: Vec::new(),
            drop: None,
            payload_len: 0,
            gso_size: 0,
            flags: String::new(),
            bytes: Vec::new(),
        }
    }
}

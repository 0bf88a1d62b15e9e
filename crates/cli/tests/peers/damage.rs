//! Captures with seeded damage: the program reports the damage, or reads what it can, but never
//! crashes.

use std::fs;
use std::path::Path;

use forebay_sys::random::Random;
use serde_json::Value;

use crate::captures::FORMATS;
use crate::{Judgement, frames, program};

const FRAMES: usize = 12;
const MUTATIONS: u64 = 200;
/// Minimum number of captures refused, and of captures replayed.
const OUTCOMES_MIN: u64 = 20;

/// Values that lengths, magic numbers and counts are overwritten with.
const EXTREMES: [u32; 8] = [0, 1, 3, 0x7fff_ffff, 0x8000_0000, u32::MAX, 262_145, 0x0a0d_0d0a];

pub(crate) fn judge() -> Judgement {
    let directory = tempfile::tempdir()?;
    let mut outcomes = [0u64; 2];
    for seed in 0..MUTATIONS {
        let mut random = Random::new(seed);
        let format = FORMATS[index(&mut random, FORMATS.len())];
        let drawn: Vec<_> = (0..FRAMES).map(|_| frames::draw(&mut random)).collect();
        let mut bytes = format.write(&drawn);
        for _ in 0..random.between(1, 3) {
            damage(&mut random, &mut bytes);
        }
        let outcome = run(directory.path(), &bytes)
            .map_err(|problem| format!("seed {seed}, {format:?}: {problem}"))?;
        outcomes[usize::from(outcome == Outcome::Refused)] += 1;
    }
    // Damage that is always refused, or never, would test only half of the readers.
    if outcomes.iter().any(|count| *count < OUTCOMES_MIN) {
        return Err(format!("replayed, refused: {outcomes:?}").into());
    }
    Ok(())
}

fn damage(random: &mut Random, bytes: &mut Vec<u8>) {
    if bytes.is_empty() {
        return;
    }
    let at = index(random, bytes.len());
    match random.below(6) {
        0 => bytes[at] ^= 1 << random.below(8),
        1 => bytes[at] = random.bits().to_le_bytes()[0],
        2 => bytes.truncate(at),
        3 => {
            let extra = bytes[..at.min(64)].to_vec();
            bytes.splice(at..at, extra);
        }
        4 => drop(bytes.drain(at..(at + 1 + index(random, 40)).min(bytes.len()))),
        _ => {
            let field = at / 4 * 4..(at / 4 * 4 + 4).min(bytes.len());
            let extreme = EXTREMES[index(random, EXTREMES.len())].to_le_bytes();
            let len = field.len();
            bytes[field].copy_from_slice(&extreme[..len]);
        }
    }
}

#[derive(PartialEq)]
enum Outcome {
    Replayed,
    Refused,
}

fn run(directory: &Path, bytes: &[u8]) -> Result<Outcome, String> {
    fs::write(directory.join("damaged.cap"), bytes).map_err(|error| error.to_string())?;
    let args = ["damaged.cap", "--json", "--deterministic", "--cpus", "1"];
    let output = program::replay(directory, args);
    let told = program::told(&output);
    if told.contains("panicked") {
        return Err(told);
    }
    match output.status.code() {
        Some(0) => is_accounted_for(&output.stdout).map(|()| Outcome::Replayed),
        Some(2) if told.contains("damaged.cap") => Ok(Outcome::Refused),
        code => Err(format!("exit code {code:?}, told: {told:?}")),
    }
}

/// Checks that every received frame is in the report (promise 2).
fn is_accounted_for(stdout: &[u8]) -> Result<(), String> {
    let report: Value = serde_json::from_slice(stdout).map_err(|error| error.to_string())?;
    let dropped = report["dropped"].as_object().into_iter().flat_map(serde_json::Map::values);
    let losses: u64 = dropped.filter_map(Value::as_u64).sum();
    let accounted = report["delivered"].as_u64().map(|delivered| delivered + losses);
    if accounted.is_none() || report["packets_in"].as_u64() != accounted {
        return Err(format!("not accounted for: {report}"));
    }
    Ok(())
}

fn index(random: &mut Random, below: usize) -> usize {
    usize::try_from(random.below(below as u64)).unwrap()
}

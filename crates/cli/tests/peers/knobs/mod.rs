//! The knobs, judged by the running kernel: the same strings are written to its files, and its
//! errno, the bytes that it takes and the value that it reads back afterwards are ours.

mod kernel; //  its files
mod strings; // what is written to them

use std::fs;

use forebay_engine::knobs::{Knob, KnobRefusal, Machine, REFUSED_INVALID_INPUT, TakenValue, Value};
use forebay_sys::errno::Errno;
pub(crate) use kernel::missing;
use libtest_mimic::Failed;

use crate::Judgement;
use crate::knobs::kernel::{File, Kernel};

/// Queues of the device, so that masks can be wider than this machine has CPUs.
const QUEUES: u16 = 100;

/// Answer to one write.
#[derive(PartialEq, Eq, Debug)]
struct Answer {
    /// Bytes that were taken, or the errno.
    outcome: Result<usize, i32>,
    /// Text that is read afterwards.
    reads: String,
}

/// Verdict on one string.
enum Verdict {
    Same,
    /// The kernel takes it, and the table says why we do not.
    Refused(&'static KnobRefusal),
    /// Takes more memory than can be asked for here.
    NotAsked,
    Different,
}

pub(crate) fn judge() -> Judgement {
    let _turn = kernel::take_turn()?;
    let kernel = Kernel::new()?;
    let machine = Machine::here();
    let mut wrong = Vec::new();
    let mut refused = Vec::new();
    let files = Knob::ALL.map(|knob| (kernel.file(knob), machine));
    let wide = (kernel.wide_mask(), Machine { cpus: QUEUES, ..machine });
    for (file, machine) in files.into_iter().chain([wide]) {
        for written in strings::to_write(file.knob, &machine) {
            match compare(&file, &written, &machine)? {
                (Verdict::Same, ..) => {}
                (Verdict::Refused(row), ..) => refused.push(row),
                (Verdict::NotAsked, ..) => {
                    eprintln!("{}: not asked, for want of memory: {}", file.name, shown(&written));
                }
                (Verdict::Different, ours, theirs) => {
                    let written = shown(&written);
                    wrong.push(format!("{} {written}: {ours:?}, Linux {theirs:?}", file.name));
                }
            }
        }
    }
    let unseen = REFUSED_INVALID_INPUT.iter().filter(|row| !refused.contains(row));
    wrong.extend(unseen.map(|row| format!("Linux does not take it either: {row:?}")));
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n").into()) }
}

/// Ours, and the kernel's if it was asked.
fn compare(
    file: &File,
    written: &[u8],
    machine: &Machine,
) -> Result<(Verdict, Answer, Option<Answer>), Failed> {
    let answer = file.knob.answer(written, machine);
    let mut ours = our_answer(file, &answer, machine);
    match room(file.knob, &answer) {
        Room::Enough => {}
        Room::Unclear => return Ok((Verdict::NotAsked, ours, None)),
        Room::None => {
            let reads = file.before.clone();
            ours = Answer { outcome: Err(Errno::NoMem.code()), reads };
        }
    }
    let mut theirs = file.ask(written)?;
    // It works in place: what it read before it came upon an error stays.
    if file.knob == Knob::RpsDefaultMask && theirs.outcome.is_err() {
        theirs.reads.clone_from(&file.before);
    }
    let verdict = match file.knob.refuses(written, machine) {
        Some(row) if answer == Err(Errno::Inval) && theirs.outcome.is_ok() => Verdict::Refused(row),
        None if ours == theirs || is_list(written, &answer, &theirs) => Verdict::Same,
        _ => Verdict::Different,
    };
    Ok((verdict, ours, Some(theirs)))
}

fn our_answer(file: &File, answer: &Result<TakenValue, Errno>, machine: &Machine) -> Answer {
    let value = answer.as_ref().ok().and_then(|taken| taken.value.as_ref());
    Answer {
        outcome: answer.as_ref().map(|taken| taken.len_bytes).map_err(|errno| errno.code()),
        reads: value.map_or_else(|| file.before.clone(), |value| value.print(machine)),
    }
}

/// Lists are ours alone: Linux refuses a dash.
fn is_list(written: &[u8], ours: &Result<TakenValue, Errno>, theirs: &Answer) -> bool {
    let is_mask = match ours {
        Ok(taken) => matches!(taken.value, Some(Value::Cpus(_))),
        Err(errno) => *errno == Errno::Overflow,
    };
    is_mask && written.contains(&b'-') && theirs.outcome == Err(Errno::Inval.code())
}

/// Room in memory for a table.
enum Room {
    Enough,
    /// More than there is of it: the kernel does not even try.
    None,
    Unclear,
}

fn room(knob: Knob, answer: &Result<TakenValue, Errno>) -> Room {
    // At least and at most, as it differs between versions.
    let (least, most) = match knob {
        Knob::RpsFlowCnt => (8, 16),
        Knob::RpsSockFlowEntries => (4, 4),
        _ => return Room::Enough,
    };
    let Ok(TakenValue { value: Some(Value::Number(slots)), .. }) = *answer else {
        return Room::Enough;
    };
    if slots * least > memory_bytes("MemTotal:") {
        Room::None
    } else if slots * most > memory_bytes("MemAvailable:") / 8 {
        Room::Unclear
    } else {
        Room::Enough
    }
}

fn memory_bytes(what: &str) -> u64 {
    let all = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = all.lines().find_map(|line| line.strip_prefix(what));
    let kibibytes = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kibibytes.unwrap_or(0) << 10
}

/// A long string by its ends.
fn shown(written: &[u8]) -> String {
    let text = written.escape_ascii().to_string();
    match (text.get(..20), text.get(text.len().saturating_sub(20)..)) {
        (Some(first), Some(last)) if text.len() > 60 => {
            format!("\"{first}…{last}\" of {} bytes", written.len())
        }
        _ => format!("\"{text}\""),
    }
}

//! The knobs, judged by the running kernel: the same strings are written to its files, and the
//! errno, the number of bytes accepted and the value read back must agree with ours.

mod kernel; //  the kernel's files
mod strings; // strings written to them

use std::fs;

use forebay_engine::knobs::{Knob, KnobRefusal, Machine, REFUSED_INVALID_INPUT, TakenValue, Value};
use forebay_sys::errno::Errno;
pub(crate) use kernel::missing;
use libtest_mimic::Failed;

use crate::Judgement;
use crate::knobs::kernel::{File, Kernel};

/// Number of queues of the device, so that masks can be wider than this machine has CPUs.
const QUEUES: u16 = 100;

/// Result of one write.
#[derive(PartialEq, Eq, Debug)]
struct Answer {
    /// Number of bytes accepted, or the errno.
    outcome: Result<usize, i32>,
    /// Value read back afterwards.
    reads: String,
}

/// Verdict on one string.
enum Verdict {
    Same,
    /// Accepted by the kernel, and refused by us for the reason in the table.
    Refused(&'static KnobRefusal),
    /// Not tried: needs more memory than may be requested here.
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

/// Compares our result with the kernel's, if the kernel was tried.
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
    // The kernel parses in place: the part before the error has taken effect.
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

/// True for CPU lists, which only we accept: Linux refuses a dash.
fn is_list(written: &[u8], ours: &Result<TakenValue, Errno>, theirs: &Answer) -> bool {
    let is_mask = match ours {
        Ok(taken) => matches!(taken.value, Some(Value::Cpus(_))),
        Err(errno) => *errno == Errno::Overflow,
    };
    is_mask && written.contains(&b'-') && theirs.outcome == Err(Errno::Inval.code())
}

/// Memory for a table.
enum Room {
    Enough,
    /// More than exists: the kernel refuses without trying.
    None,
    Unclear,
}

fn room(knob: Knob, answer: &Result<TakenValue, Errno>) -> Room {
    // Bytes per entry, a minimum and a maximum, as kernel versions differ.
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

/// A long string, shortened to its ends.
fn shown(written: &[u8]) -> String {
    let text = written.escape_ascii().to_string();
    match (text.get(..20), text.get(text.len().saturating_sub(20)..)) {
        (Some(first), Some(last)) if text.len() > 60 => {
            format!("\"{first}…{last}\" of {} bytes", written.len())
        }
        _ => format!("\"{text}\""),
    }
}

//! Runs the commands in the documents: every `console` block is executed, and its output compared
//! with the document.
//!
//! A line that begins with `$ ` is typed into bash, with the following lines that begin with `> `;
//! all other lines are expected on standard output, and may be left out. Every command must
//! succeed. `^C` interrupts a command that runs on, once it has started. Numbers with their units,
//! and hashes, may differ. `…` stands for any text in a line, `...` for any number of lines. Fields
//! that appear only if their count is not zero (drops, moves), or that depend on timing, may be
//! missing, added, or different.
//!
//! Each block begins in an empty directory, in which `crates` is that of the repository. Blocks
//! that name devices run in a network namespace with veth pairs of these names. A block whose tool
//! or privilege is missing is reported as ignored, with the reason on standard error.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod block; //  console blocks of a document
mod shape; //  comparison of outputs
mod typist; // bash, with the files and devices that a block names

use std::path::{Path, PathBuf};

use block::Block;
use libtest_mimic::{Arguments, Failed, Trial};

/// Root of the repository.
const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// Documents, and the folder of the book.
const DOCUMENTS: [&str; 5] =
    ["README.md", "ARCHITECTURE.md", "SPECIFICATION.md", "CONTRIBUTING.md", "docs/src"];

/// Commands that are not executed, as this test is part of them.
const NOT_RUN: [&str; 1] = ["./ci.sh all"];

/// Document whose commands need systemd: `packaging/guest-test.sh` executes them.
const RUN_IN_GUEST: &str = "docs/src/guide/first-service.md";

/// Upper bound of its commands, which lead a new user to a service.
const GUEST_COMMANDS_MAX: usize = 10;

fn main() {
    let arguments = Arguments::from_args();
    let documents: Vec<_> = DOCUMENTS.iter().flat_map(|name| documents(Path::new(name))).collect();
    let (others, linked) = (documents.clone(), documents.clone());
    let mut trials = vec![
        Trial::test("what_is_not_run_is_listed", move || judge_others(&others)),
        Trial::test("outputs_differ_in_words", judge_shapes),
        Trial::test("links_lead_to_files", move || judge_links(&linked)),
    ];
    for (document, text) in documents {
        let document = document.display();
        for block in block::of_kind(&text, "console") {
            let name = format!("{document}:{}", block.line);
            let missing = typist::missing(&block);
            if let Some(missing) = &missing {
                eprintln!("{name} is ignored: {missing}");
            }
            let is_ignored = missing.is_some();
            trials.push(Trial::test(name, move || judge(&block)).with_ignored_flag(is_ignored));
        }
    }
    libtest_mimic::run(&arguments, trials).exit();
}

/// The document of this name, or all documents in the folder: names and texts.
fn documents(name: &Path) -> Vec<(PathBuf, String)> {
    let at = Path::new(ROOT).join(name);
    if !at.is_dir() {
        let is_document = name.extension().is_some_and(|extension| extension == "md");
        let read = || (name.to_owned(), std::fs::read_to_string(&at).unwrap());
        return is_document.then(read).into_iter().collect();
    }
    let mut within: Vec<_> =
        at.read_dir().unwrap().map(|entry| name.join(entry.unwrap().file_name())).collect();
    within.sort();
    within.iter().flat_map(|name| documents(name)).collect()
}

/// Checks that every link into the repository has a target.
fn judge_links(documents: &[(PathBuf, String)]) -> Result<(), Failed> {
    let mut wrong = Vec::new();
    for (document, text) in documents {
        let folder = Path::new(ROOT).join(document.parent().unwrap());
        let targets = text.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next());
        for target in targets.filter(|target| !target.is_empty() && !target.contains("://")) {
            if !folder.join(target).exists() {
                wrong.push(format!("{}: {target} is not there", document.display()));
            }
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n").into()) }
}

fn judge_others(documents: &[(PathBuf, String)]) -> Result<(), Failed> {
    let (in_guest, others): (Vec<_>, Vec<_>) =
        documents.iter().partition(|(document, _)| document == Path::new(RUN_IN_GUEST));
    let lines = |documents: Vec<&(PathBuf, String)>| -> Vec<String> {
        let blocks = documents.into_iter().flat_map(|(_, text)| block::of_kind(text, "sh"));
        blocks.flat_map(|block| block.lines).collect()
    };
    let count = lines(in_guest).len();
    if !(1..=GUEST_COMMANDS_MAX).contains(&count) {
        return Err(format!("{RUN_IN_GUEST} has {count} commands").into());
    }
    let lines = lines(others);
    let commands: Vec<_> =
        lines.iter().map(|line| line.split("  #").next().unwrap_or(line).trim()).collect();
    if commands == NOT_RUN {
        Ok(())
    } else {
        Err(format!("shown but not run: {commands:?}").into())
    }
}

/// Tests the comparison itself: permitted and forbidden differences.
fn judge_shapes() -> Result<(), Failed> {
    let shown =
        "1,234 packets in 5.1 ms, hash c2a44c8b\n\ndropped: 3 backlog_full\n a  12  4 rx_x\nend …!";
    let shown: Vec<_> = shown.lines().map(str::to_owned).collect();
    for (output, is_same) in [
        (
            "1,234 packets in 5.1 ms, hash c2a44c8b\ndropped: 3 backlog_full\na 12 4 rx_x\nend so!",
            true,
        ),
        ("1 packet in 77 µs, hash 00000000\n  a   9\nend !", true),
        ("1 frame in 77 µs, hash 00000000\n  a   9\nend !", false),
        ("1 packet in 77 µs, hash 00000000\n  b   9\nend !", false),
        ("1 packet in 77 µs, hash 00000000\n  a   9\nend", false),
        ("1 packet in 77 µs, hash 00000000\n  a   9\nend !\nmore", false),
        ("1 packet in 77 µs, hash 00000000\nend !", false),
        ("", false),
    ] {
        if shape::compare(&shown, output).is_ok() != is_same {
            return Err(format!("{output:?} is the same: {}", !is_same).into());
        }
    }
    let shown = ["a".to_owned(), "...".to_owned(), "z".to_owned()];
    let is_gap = shape::compare(&shown, "a\nb\nc\nz").is_ok();
    let is_all = shape::compare(&shown, "a\nb\nc").is_err();
    if is_gap && is_all { Ok(()) } else { Err("... is not any number of lines".into()) }
}

fn judge(block: &Block) -> Result<(), Failed> {
    let steps = block.steps()?;
    let said = typist::run(block, &steps)?;
    let mut wrong = Vec::new();
    for (step, said) in steps.iter().zip(said) {
        let verdict = match said.code {
            Some(0) => shape::compare(&step.shown, &said.stdout),
            code => Err(format!("exit code {code:?}")),
        };
        if let Err(problem) = verdict {
            let (command, stdout, stderr) = (&step.command, &said.stdout, &said.stderr);
            wrong.push(format!("$ {command}\n{problem}\n--- it said\n{stdout}{stderr}"));
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n").into()) }
}

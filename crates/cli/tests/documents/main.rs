//! The commands that the documents show: every block of the kind `console` is run, and says what
//! the document says.
//!
//! A line that begins with `$ ` is typed into bash, with the lines behind it that begin with `> `;
//! all others are what is printed to standard output, and need not be shown. Every command
//! succeeds. `^C` ends one that goes on, once it listens to that. Numbers with their units, and
//! hashes, may be others; `…` is any text in a line, `...` any number of lines. What is told only
//! if there was any (drops, moves), or of the moment, may be there or not, and be other.
//!
//! Each block begins in an empty directory in which `crates` is that of the repository. Blocks that
//! name devices are run in a network namespace with pairs of veth of these names. A block whose
//! tool or privilege is missing is reported as ignored, and why on standard error.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod block; //  what a document shows
mod shape; //  whether an output is what was shown
mod typist; // bash, with all that a block names

use std::path::{Path, PathBuf};

use block::Block;
use libtest_mimic::{Arguments, Failed, Trial};

/// The top of the repository.
const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// Documents, and the folder of the book.
const DOCUMENTS: [&str; 5] =
    ["README.md", "ARCHITECTURE.md", "SPECIFICATION.md", "CONTRIBUTING.md", "docs/src"];

/// All that is shown as commands and not run here, since this test is a part of it.
const NOT_RUN: [&str; 1] = ["./ci.sh all"];

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

/// A document of this name, or all in a folder of it: their names and texts.
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

/// True if every link to a place in the repository leads to one.
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
    let blocks = documents.iter().flat_map(|(_, text)| block::of_kind(text, "sh"));
    let lines: Vec<_> = blocks.flat_map(|block| block.lines).collect();
    let commands: Vec<_> =
        lines.iter().map(|line| line.split("  #").next().unwrap_or(line).trim()).collect();
    if commands == NOT_RUN {
        Ok(())
    } else {
        Err(format!("shown but not run: {commands:?}").into())
    }
}

/// The rule itself: what may differ, and what may not.
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

//! Scripts of packetdrill, which judge our TCP and the kernel's alike.
#![allow(clippy::disallowed_types, clippy::disallowed_methods, reason = "several judges at once")]

mod judge; //   packetdrill, run on one script
mod scripts; // the scripts of the folder `packetdrill`

use std::path::PathBuf;
use std::sync::Mutex;
use std::thread;

use forebay_testkit::namespaces::tun_missing;
use libtest_mimic::{Arguments, Failed, Trial};

use self::judge::{Family, Judge, Subject};
use self::scripts::Script;

/// Scripts that are run at once: the kernel's wait in real time.
const AT_ONCE: usize = 3;

fn main() {
    let mut arguments = Arguments::from_args();
    // The kernel's time is the machine's: nothing else shall run.
    arguments.test_threads = Some(1);
    let trials = [
        ("tcp_14_scripts_pass_on_ours", Subject::Ours, judge::shim_missing()),
        ("tcp_14_kernel_passes_the_scripts", Subject::Kernel, kernel_missing()),
    ]
    .map(|(name, subject, missing)| {
        let missing = judge::missing().or(missing);
        if let Some(missing) = &missing {
            eprintln!("{name} is ignored: {missing}");
        }
        let is_ignored = missing.is_some();
        Trial::test(name, move || judge_all(subject)).with_ignored_flag(is_ignored)
    });
    libtest_mimic::run(&arguments, trials.into()).exit();
}

/// Reason why the kernel cannot be judged here: scripts say what Linux 6.18 does.
fn kernel_missing() -> Option<String> {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split('.').map(|number| number.parse().unwrap_or(0));
    let version: (u32, u32) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version < (6, 18) {
        return Some(format!("the kernel {} is older than 6.18", release.trim()));
    }
    judge::namespace_missing().or_else(tun_missing)
}

/// Runs all scripts over both families, and tells all failures.
fn judge_all(subject: Subject) -> Result<(), Failed> {
    let judge = Judge::new().ok_or("packetdrill is missing")?;
    if subject == Subject::Ours
        && let Some(source) = judge::newer_than_shim()?
    {
        let source = source.display();
        return Err(format!("{source} is newer than the shim: build the crate's examples").into());
    }
    let scripts = scripts::all(&PathBuf::from(env!("CARGO_MANIFEST_DIR")))?;
    if scripts.len() < scripts::LEAST {
        return Err(format!("{} scripts were found only", scripts.len()).into());
    }
    let runs: Vec<(&Script, Family)> = scripts
        .iter()
        .flat_map(|script| script.families().map(move |family| (script, family)))
        .collect();
    let (left, failures) = (Mutex::new(runs.into_iter()), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some((script, family)) = next(&left) {
                    if let Err(told) = judge.run(script, subject, family) {
                        push(&failures, format!("{} over {family:?}: {told}", script.name()));
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap_or_default();
    if failures.is_empty() { Ok(()) } else { Err(failures.join("\n").into()) }
}

fn next<T>(left: &Mutex<impl Iterator<Item = T>>) -> Option<T> {
    left.lock().ok()?.next()
}

fn push(failures: &Mutex<Vec<String>>, failure: String) {
    if let Ok(mut failures) = failures.lock() {
        failures.push(failure);
    }
}

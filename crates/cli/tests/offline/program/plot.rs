//! Pictures of runs.

use std::os::unix::fs::symlink;

use super::*;

const PICTURES: [&str; 4] = ["shares.svg", "waits.svg", "moves.svg", "delays.svg"];

/// Texts of a picture, in the order in which they are drawn.
fn texts(svg: &str) -> Vec<String> {
    let texts = svg.split("<text ").skip(1).filter_map(|text| {
        let (_, text) = text.split_once('>')?;
        Some(text.split_once("</text>")?.0.trim().to_owned())
    });
    texts.collect()
}

/// Number at the beginning of the one text that continues with `what`, after `before`.
fn number(texts: &[String], before: &str, what: &str) -> u64 {
    let found = texts.iter().find_map(|text| {
        let (number, rest) = text.strip_prefix(before)?.split_once(' ')?;
        let number = number.replace(',', "").parse().ok()?;
        rest.trim_start_matches(' ').starts_with(what).then_some(number)
    });
    found.unwrap_or_else(|| panic!("{before}N {what} is not among {texts:?}"))
}

impl WorkDir {
    fn texts(&self, name: &str) -> Vec<String> {
        texts(&self.read(name))
    }
}

#[test]
fn plt_2_pictures_agree_with_report() {
    let dir = WorkDir::new();
    let changes = "--at 10000:rps_cpus=2 --at 20000:rps_cpus=3";
    for mode in ["--deterministic --work 2000", "--work 500"] {
        let report = dir.report(&format!("--cpus 2 {mode} {changes} --plot p"));
        let shares = dir.texts("p/shares.svg");
        assert_eq!(number(&shares, "", "packets delivered"), report["delivered"]);
        for cpu in report["per_cpu"].as_array().unwrap() {
            let name = format!("CPU {}: ", cpu["cpu"]);
            assert_eq!(number(&shares, &name, "packet"), cpu["packets"], "{mode}");
        }
        let moves = dir.texts("p/moves.svg");
        assert_eq!(number(&moves, "", "move"), report["steer"]["moves"], "{mode}");
        assert_eq!(number(&moves, "", "held move"), report["steer"]["held"], "{mode}");
        let delays = dir.texts("p/delays.svg");
        assert_eq!(number(&delays, "", "held move"), report["steer"]["held"], "{mode}");
        let waits = number(&delays, "", "packets");
        assert!(waits > 0 && waits <= report["delivered"].as_u64().unwrap(), "{mode}: {waits}");
        assert!(dir.read("p/waits.svg").contains("CPU 1: "), "{mode}");
    }
}

#[test]
fn plt_2_sim_pictures_agree_with_summary() {
    let dir = WorkDir::new();
    let run = dir.run("sim mask-change --seed 3 --rules forebay --json --plot p");
    assert_eq!((run.code, run.told.as_str()), (Some(0), ""));
    let summary: Value = serde_json::from_str(&run.stdout).unwrap();
    let delivered = number(&dir.texts("p/shares.svg"), "", "packets delivered");
    assert_eq!(delivered, summary["delivered"]);
    assert_eq!(number(&dir.texts("p/moves.svg"), "", "move"), summary["moves"]);
    assert!(number(&dir.texts("p/delays.svg"), "", "packets") > 0);
}

#[test]
fn plt_4_same_seed_same_pictures() {
    let dir = WorkDir::new();
    for command in [
        "sim everything --seed 7 --packets 3000",
        "replay --deterministic --cpus 3 --seed 7 --at 5000:rps_cpus=6",
    ] {
        for directory in ["a", "b"] {
            let run = dir.run(&format!("{command} --plot {directory}"));
            assert_eq!(run.code, Some(0), "{command}: {}", run.told);
        }
        for picture in PICTURES {
            let [a, b] = ["a", "b"].map(|directory| dir.read(&format!("{directory}/{picture}")));
            assert_eq!(a, b, "{command}: {picture}");
        }
    }
    // Neither a timeline nor its measurements change the run.
    let quiet = dir.run("sim everything --seed 7 --packets 3000");
    assert_eq!(quiet.stdout, dir.run("sim everything --seed 7 --packets 3000 --plot a").stdout);
}

/// A change of the simulator or of the drawing shows as a change of the book's figure.
#[test]
fn plt_4_book_has_current_picture() {
    let dir = WorkDir::new();
    let run = dir.run("sim waves --seed 1 --rules forebay --plot p");
    assert_eq!(run.code, Some(0), "{}", run.told);
    let book = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/src/pictures/waves.svg");
    let is_current = fs::read_to_string(book).is_ok_and(|text| text == dir.read("p/shares.svg"));
    assert!(
        is_current,
        "`forebay sim waves --seed 1 --plot p && cp p/shares.svg docs/src/pictures/waves.svg` renews it"
    );
}

#[test]
fn plt_5_unwritable_pictures_are_named() {
    let dir = WorkDir::new();
    fs::write(dir.path("f"), "").unwrap();
    fs::create_dir_all(dir.path("p/waits.svg")).unwrap();
    for command in ["replay", "sim waves --seed 1"] {
        let run = dir.run(&format!("{command} --plot f"));
        assert_eq!((run.code, run.stdout.as_str()), (Some(2), ""), "{}", run.told);
        assert!(run.told.contains("cannot create f: "), "{}", run.told);
        let run = dir.run(&format!("{command} --plot p"));
        assert_eq!((run.code, run.stdout.as_str()), (Some(2), ""), "{}", run.told);
        assert!(run.told.contains("cannot create p/waits.svg: "), "{}", run.told);
        assert!(run.told.contains("check that the path is right"), "{}", run.told);
    }
    let run = dir.run("sim waves --rules kernel --seed 1 --plot q");
    assert!(run.told.contains("--plot: pictures are of a run under our rules"), "{}", run.told);
    assert!(!dir.path("q").exists());
}

#[test]
fn plt_5_refused_run_keeps_pictures() {
    let dir = WorkDir::new();
    fs::create_dir(dir.path("p")).unwrap();
    fs::write(dir.path("f"), "").unwrap();
    fs::write(dir.path("p/shares.svg"), "of an earlier run").unwrap();
    for command in ["replay --control f/s.sock", "sim waves --seed 1 --trace f"] {
        let run = dir.run(&format!("{command} --plot p"));
        assert_ne!(run.code, Some(0), "{command}");
        assert_eq!(dir.read("p/shares.svg"), "of an earlier run", "{command}: {}", run.told);
        assert_eq!(fs::read_dir(dir.path("p")).unwrap().count(), 1, "{command}");
    }
}

#[test]
fn plt_5_full_disk_is_told_after_report() {
    let dir = WorkDir::new();
    fs::create_dir(dir.path("p")).unwrap();
    symlink("/dev/full", dir.path("p/moves.svg")).unwrap();
    let run = dir.run("replay --plot p");
    assert_eq!(run.code, Some(3), "{}", run.told);
    assert!(run.stdout.contains("32,000 packets in"), "{}", run.stdout);
    assert!(run.told.contains("cannot write p/moves.svg: No space left"), "{}", run.told);
    assert!(run.told.contains("check that there is room"), "{}", run.told);
    assert!(dir.read("p/shares.svg").ends_with("</svg>\n"), "the others are drawn");
    let run = dir.run("sim waves --seed 1 --plot p");
    assert_eq!(run.code, Some(3), "{}", run.told);
    assert!(run.stdout.contains("waves"), "{}", run.stdout);
    assert!(run.told.contains("cannot write p/moves.svg: No space left"), "{}", run.told);
}

#[test]
fn plt_5_replayed_file_is_not_overwritten() {
    let dir = WorkDir::new();
    dir.write_udp("waits.svg", [&MS_V4_0, &MS_V4_0_BACK]);
    let before = fs::read(dir.path("waits.svg")).unwrap();
    let run = dir.run("replay waits.svg --plot .");
    assert_eq!(run.code, Some(2), "{}", run.told);
    assert!(run.told.contains("is to be replayed and would be lost"), "{}", run.told);
    assert_eq!(fs::read(dir.path("waits.svg")).unwrap(), before);
    assert!(!dir.path("shares.svg").exists());
}

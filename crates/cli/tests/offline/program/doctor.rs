//! `forebay doctor` on the machine of the tests, whatever it is.

use serde_json::Value;

use super::WorkDir;

#[test]
fn doc_3_exit_code_is_the_worst_severity() {
    let dir = WorkDir::new();
    let run = dir.run("doctor lo --json");
    let document: Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!((run.stdout.lines().count(), run.told.as_str()), (1, ""));
    let findings = document["findings"].as_array().unwrap();
    let is_any = |severity| findings.iter().any(|finding| finding["severity"] == severity);
    let code = if is_any("stops") { 2 } else { i32::from(is_any("costs")) };
    assert_eq!(run.code, Some(code), "{document}");
    assert_eq!(document["device"], "lo");
    for finding in findings {
        let is_told = |field: &str| finding[field].as_str().is_some_and(|text| !text.is_empty());
        assert!(is_told("about") && is_told("found"), "{finding}");
    }

    let people = dir.run("doctor lo");
    assert_eq!(people.code, Some(code));
    for part in ["privileges", "device", "lo", "to change"] {
        assert!(people.stdout.contains(part), "{part}: {}", people.stdout);
    }
    let run = dir.run("doctor no-such0 --json");
    assert_eq!(run.code, Some(3), "{}", run.told);
    assert!(run.stdout.contains("there is no interface"), "{}", run.stdout);
}

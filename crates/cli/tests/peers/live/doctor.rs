//! Findings of `forebay doctor` about devices in a namespace, before and after they are changed.

use forebay_testkit::namespaces::named::NamedNamespace;
use libtest_mimic::Failed;
use serde_json::Value;

use crate::Judgement;
use crate::live::{Judge, program};

pub(crate) const TRIALS: [Judge; 2] = [
    ("doc_2_veth_findings_end_when_mended", judge_veth),
    ("doc_2_tap_and_loopback_are_judged", judge_others),
];

/// Output about a device, and the exit code.
fn examine(namespace: &NamedNamespace, device: &str) -> Result<(Option<i32>, Value), Failed> {
    let output = program::command(namespace).args(["doctor", device, "--json"]).output()?;
    Ok((output.status.code(), serde_json::from_slice(&output.stdout)?))
}

/// Subjects of the findings that are more than notes.
fn to_change(document: &Value) -> Vec<&str> {
    let findings = document["findings"].as_array().map(Vec::as_slice).unwrap_or_default();
    let findings = findings.iter().filter(|finding| finding["severity"] != "note");
    findings.filter_map(|finding| finding["about"].as_str()).collect()
}

/// Compares the exit code, and the findings about the device; those about the machine may be any.
fn expect(namespace: &NamedNamespace, device: &str, wanted: &[&str]) -> Judgement {
    const OF_DEVICE: [&str; 4] = ["link", "queues", "kernel rps", "xdp"];
    let (code, document) = examine(namespace, device)?;
    let about: Vec<_> =
        to_change(&document).into_iter().filter(|about| OF_DEVICE.contains(about)).collect();
    let is_code = match wanted {
        [] => code < Some(2),
        ["link", ..] => code == Some(2),
        _ => code >= Some(1),
    };
    if about == wanted && is_code {
        return Ok(());
    }
    Err(format!("{device}: {code:?}, {about:?} instead of {wanted:?}: {document}").into())
}

fn judge_veth() -> Judgement {
    let namespace = NamedNamespace::new()?;
    let run = |line: &str| namespace.run(&line.split(' ').collect::<Vec<_>>());
    run("ip link add dr0 numrxqueues 2 numtxqueues 2 type veth peer name dr1 numrxqueues 2 \
         numtxqueues 2")?;
    expect(&namespace, "dr0", &["link", "queues"])?;
    run("ip link set up dev dr0")?;
    run("ip link set up dev dr1")?;
    expect(&namespace, "dr0", &["queues"])?;
    run("ethtool -L dr0 rx 1")?;
    run("ethtool -L dr1 tx 1")?;
    expect(&namespace, "dr0", &[])?;
    // A note only: native XDP takes packets before the kernel spreads them.
    namespace.run(&["sh", "-c", "echo 3 > /sys/class/net/dr0/queues/rx-0/rps_cpus"])?;
    expect(&namespace, "dr0", &[])?;
    let (_, document) = examine(&namespace, "dr0")?;
    if document.to_string().contains("the kernel spreads packets of rx-0 to CPUs 0-1") {
        return Ok(());
    }
    Err(format!("RPS of the kernel is not seen: {document}").into())
}

fn judge_others() -> Judgement {
    let namespace = NamedNamespace::new()?;
    expect(&namespace, "lo", &["link"])?;
    namespace.run(&["ip", "link", "set", "up", "dev", "lo"])?;
    expect(&namespace, "lo", &[])?;
    // Generic XDP comes behind the kernel's RPS.
    namespace.run(&["sh", "-c", "echo 3 > /sys/class/net/lo/queues/rx-0/rps_cpus"])?;
    expect(&namespace, "lo", &["kernel rps"])?;
    namespace.run(&["ip", "tuntap", "add", "dt0", "mode", "tap"])?;
    expect(&namespace, "dt0", &["link"])?;
    namespace.run(&["ip", "link", "set", "up", "dev", "dt0"])?;
    expect(&namespace, "dt0", &[])
}

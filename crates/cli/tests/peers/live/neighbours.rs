//! While a run takes some packets from an interface, all other traffic continues: knotd answers,
//! and so does the kernel.

use std::fs;
use std::io::ErrorKind;
use std::net::UdpSocket;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use forebay_testkit::namespaces::named::NamedNamespace;
use libtest_mimic::Failed;
use tempfile::TempDir;

use crate::Judgement;
use crate::live::Judge;
use crate::live::forwarding::{DEVICE, Link, PEER, Way};
use crate::live::program::{Run, wait_until};

pub(crate) const TRIALS: [Judge; 2] = [
    ("knotd_answers_beside_native_xdp", || judge(Way::AfXdpNative)),
    ("knotd_answers_beside_generic_xdp", || judge(Way::AfXdpGeneric)),
];

const NEAR: &str = "10.7.0.1";
const FAR: &str = "10.7.0.2";

/// Port that the run takes, without a socket.
const TAKEN_PORT: u16 = 9;
const CLOSED_PORT: u16 = 10;

const DATAGRAMS: u64 = 100;
const QUERIES: usize = 20;

/// Time within which a refusal must arrive.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(10);

fn judge(way: Way) -> Judgement {
    let link = Link::new(way)?;
    let (far, _) = link.sender();
    link.near.run(&["ip", "address", "add", &format!("{NEAR}/24"), "dev", DEVICE])?;
    far.run(&["ip", "address", "add", &format!("{FAR}/24"), "dev", PEER])?;
    let _server = NameServer::start(&link.near)?;
    wait_until("knotd answers", || Ok(query(far, &[]).is_ok()))?;

    let mode = if way == Way::AfXdpNative { "native" } else { "generic" };
    let args = [DEVICE, "--via", "af_xdp", "--xdp-mode", mode, "--take", "udp:9", "--cpus", "2"];
    let mut run = Run::start(&link.near, args)?;
    for _ in 0..QUERIES {
        // The neighbours must resolve each other again.
        for (namespace, device) in [(&link.near, DEVICE), (far, PEER)] {
            namespace.run(&["ip", "neighbour", "flush", "dev", device])?;
        }
        query(far, &[])?;
    }
    query(far, &["+tcp"])?;
    let taken = far.within(|| Ok(UdpSocket::bind((FAR, 0))?))?;
    for _ in 0..DATAGRAMS {
        taken.send_to(b"taken", (NEAR, TAKEN_PORT))?;
    }
    // The kernel reports a closed port by ICMP: one message is sent and one received here.
    judge_refusal(far, NEAR)?;
    judge_refusal(&link.near, FAR)?;
    query(far, &[])?;
    let report = run.stop()?;
    if report.number("packets_in")? != DATAGRAMS || report.number("delivered")? != DATAGRAMS {
        return Err(format!("{DATAGRAMS} were to be taken: {}", report.value()).into());
    }
    // After the run, the kernel receives datagrams to that port again.
    judge_refusal_at(far, NEAR, TAKEN_PORT)?;
    query(far, &[])
}

fn query(namespace: &NamedNamespace, more: &[&str]) -> Judgement {
    let server = format!("@{NEAR}");
    let query = ["kdig", &server, "ns.test", "+short", "+timeout=5", "+retry=1"];
    let told = namespace.output_of(&[&query[..], more].concat())?;
    if told == "192.0.2.1\n" { Ok(()) } else { Err(format!("knotd answers {told:?}").into()) }
}

fn judge_refusal(namespace: &NamedNamespace, address: &str) -> Judgement {
    judge_refusal_at(namespace, address, CLOSED_PORT)
}

/// Checks that a sender to a closed port gets port unreachable.
fn judge_refusal_at(namespace: &NamedNamespace, address: &str, port: u16) -> Judgement {
    let socket = namespace.within(|| {
        let socket = UdpSocket::bind(("0.0.0.0", 0))?;
        socket.connect((address, port))?;
        Ok(socket)
    })?;
    socket.set_read_timeout(Some(REFUSAL_TIMEOUT))?;
    socket.send(b"closed")?;
    match socket.recv(&mut [0; 8]) {
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => Ok(()),
        other => Err(format!("{address}:{port} does not refuse: {other:?}").into()),
    }
}

/// knotd with one zone, and its files.
struct NameServer {
    knotd: Child,
    _directory: TempDir,
}

impl NameServer {
    fn start(namespace: &NamedNamespace) -> Result<Self, Failed> {
        let directory = tempfile::tempdir()?;
        let config = write_config(directory.path())?;
        let mut knotd = namespace.command("knotd");
        knotd.arg("-c").arg(config).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Self { knotd: knotd.spawn()?, _directory: directory })
    }
}

impl Drop for NameServer {
    fn drop(&mut self) {
        // Ignored: nothing can be done about a failure here.
        let _ = self.knotd.kill();
        let _ = self.knotd.wait();
    }
}

fn write_config(directory: &Path) -> Result<PathBuf, Failed> {
    let path = directory.to_str().ok_or("a path that is not UTF-8")?;
    let zone = "$ORIGIN test.\n@ 60 SOA ns. host. 1 60 60 60 60\n@ 60 NS ns\nns 60 A 192.0.2.1\n";
    fs::write(directory.join("test.zone"), zone)?;
    let config = format!(
        "server:\n    rundir: \"{path}\"\n    listen: [ {NEAR}@53 ]\n\
         database:\n    storage: \"{path}\"\n\
         zone:\n  - domain: test\n    storage: \"{path}\"\n    file: \"test.zone\"\n"
    );
    let file = directory.join("knot.conf");
    fs::write(&file, config)?;
    Ok(file)
}

//! tcpreplay and its captures.

use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::Duration;
use std::{fs, thread};

use libtest_mimic::Failed;
use tempfile::TempDir;

use crate::Judgement;
use crate::live::forwarding::{Link, Way};
use crate::live::program::Report;
use crate::order::Stamped;

/// Time within which packets between two kernel interfaces arrive.
const SETTLE: Duration = Duration::from_millis(200);

/// Frame specification for trafgen.
const TRAFGEN: &str = "{ eth(da=02:00:00:00:00:02, sa=02:00:00:00:00:01), \
    ipv4(sa=10.1.0.1, da=10.9.0.1), udp(sp=drnd(1024, 2047), dp=9000), fill('A', 18) }";

const FRAMES: usize = 20_000;
const FLOWS: u32 = 64;

/// A capture to be sent.
pub(super) struct Capture {
    directory: TempDir,
    /// Number of frames of each flow.
    pub(super) flows: Vec<u64>,
}

impl Capture {
    /// Writes stamped frames, with this many bytes after each stamp.
    pub(super) fn write(way: Way, padding_bytes: usize) -> Result<Self, Failed> {
        let has_ethernet = way.has_ethernet();
        Self::of(&Stamped { flows: FLOWS, frames: FRAMES, padding_bytes, has_ethernet })
    }

    /// Writes about `frames` stamped frames.
    pub(super) fn of_few(way: Way, frames: usize) -> Result<Self, Failed> {
        let has_ethernet = way.has_ethernet();
        Self::of(&Stamped { flows: FLOWS, frames, padding_bytes: 0, has_ethernet })
    }

    pub(super) fn of(stamped: &Stamped) -> Result<Self, Failed> {
        let directory = tempfile::tempdir()?;
        let flows = stamped.write(&directory.path().join("f.pcap"));
        Ok(Self { directory, flows })
    }

    pub(super) fn path(&self) -> PathBuf {
        self.directory.path().join("f.pcap")
    }
}

/// Sending rate.
#[derive(Clone, Copy, Debug)]
pub(super) enum Pace {
    /// Rate in packets per second.
    Packets(u32),
    TopSpeed,
}

/// Sends a capture `loops` times. Returns the number of frames that tcpreplay reports, which must
/// agree with the kernel's.
pub(super) fn play(link: &Link, capture: &Capture, pace: Pace, loops: u32) -> Result<u64, Failed> {
    let (namespace, device) = link.sender();
    let path = capture.path();
    let path = path.to_str().ok_or("a path that is not UTF-8")?;
    let pace = match pace {
        Pace::Packets(pps) => format!("--pps={pps}"),
        Pace::TopSpeed => "--topspeed".to_owned(),
    };
    let loops = format!("--loop={loops}");
    let command = ["tcpreplay", "-q", "-K", &pace, &loops, "-i", device, path];
    counted(link, || {
        let told = namespace.output_of(&command)?;
        if number(&told, "Failed packets:")? + number(&told, "Truncated packets:")? > 0 {
            return Err(format!("tcpreplay could not send all: {told}").into());
        }
        // Frames that tcpreplay had to retry were counted as dropped by the kernel.
        let again = number(&told, "Retried packets (ENOBUFS):")?;
        Ok(number(&told, "Successful packets:")? + again)
    })
}

/// Sends `frames` frames of many flows with trafgen, from all CPUs.
pub(super) fn generate(link: &Link, frames: u64) -> Result<u64, Failed> {
    let (namespace, device) = link.sender();
    let directory = tempfile::tempdir()?;
    let config = directory.path().join("f.cfg");
    fs::write(&config, TRAFGEN)?;
    let config = config.to_str().ok_or("a path that is not UTF-8")?;
    let frames = frames.to_string();
    let command = ["trafgen", "--qdisc-path", "--dev", device, "--conf", config, "--num", &frames];
    counted(link, || {
        let told = namespace.output_of(&command)?;
        let line = told.lines().find_map(|line| line.trim().strip_suffix(" packets outgoing"));
        let sent = line.and_then(|sent| sent.trim().parse().ok());
        sent.ok_or_else(|| format!("trafgen does not say how many it sent: {told}").into())
    })
}

/// Number of frames sent by `send`, which must agree with the kernel's.
fn counted(link: &Link, send: impl FnOnce() -> Result<u64, Failed>) -> Result<u64, Failed> {
    let before = link.sender_counts()?;
    let sent = send()?;
    // Frames sent into a TAP are counted when they are read.
    if !link.is_own() {
        let after = link.sender_counts()?;
        let counted = after.tx_packets + after.tx_dropped - before.tx_packets - before.tx_dropped;
        if counted != sent {
            return Err(format!("{sent} frames were sent, the kernel says {counted}").into());
        }
    }
    Ok(sent)
}

/// Sends a capture repeatedly.
pub(super) fn flood(link: &Link, capture: &Capture) -> Result<Child, Failed> {
    let (namespace, device) = link.sender();
    let mut tcpreplay = namespace.command("tcpreplay");
    tcpreplay.args(["-q", "-K", "--topspeed", "--loop=0", "-i", device]).arg(capture.path());
    Ok(tcpreplay.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?)
}

/// Waits until the last frames sent by tcpreplay have arrived.
pub(super) fn settle() {
    thread::sleep(SETTLE);
}

/// Checks that a report adds up: frames received equal those delivered and dropped.
pub(super) fn judge_sum(link: &Link, report: &Report, sent: u64) -> Judgement {
    let came_in = report.number("packets_in")?;
    let lost = link.lost(report.number("kernel_dropped")?)?;
    if sent == came_in + lost {
        return Ok(());
    }
    let report = report.value();
    Err(format!("{sent} were sent, {came_in} came in, the kernel dropped {lost}: {report}").into())
}

fn number(told: &str, name: &str) -> Result<u64, Failed> {
    let line = told.lines().find_map(|line| line.trim().strip_prefix(name));
    let number = line.and_then(|rest| rest.trim().parse().ok());
    number.ok_or_else(|| format!("tcpreplay does not say {name} {told}").into())
}

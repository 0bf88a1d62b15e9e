//! The running kernel's files: those of a device in a namespace, and the machine's in
//! /proc/sys/net/core, which are restored afterwards.

use std::fs::{self, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use forebay_engine::knobs::{Knob, KnobPlace, Machine};
use forebay_rx::RxQueue;
use forebay_testkit::namespaces::named::{NamedNamespace, run};
use libtest_mimic::Failed;

use crate::knobs::{Answer, QUEUES};

const DEVICE: &str = "knobs";
const QUEUE: RxQueue = RxQueue(0);

const NET_CORE: &str = "/proc/sys/net/core";
const CPUS: &str = "/sys/devices/system/cpu";

/// Reason why the kernel cannot be judged against.
pub(crate) fn missing() -> Option<String> {
    let cpus = |which| fs::read_to_string(format!("{CPUS}/{which}")).unwrap_or_default();
    if cpus("online") != cpus("possible") || !cpus("isolated").trim().is_empty() {
        return Some("masks read back what was written only where every CPU runs".to_owned());
    }
    for (knob, path) in net_core() {
        if let Err(error) = OpenOptions::new().write(true).open(path) {
            return Some(format!("this needs root on the machine itself: {knob}: {error}"));
        }
    }
    let refused = Kernel::new().err()?;
    let reason = refused.message().unwrap_or_default().to_owned();
    Some(format!("this needs root, network namespaces and veth: {reason}"))
}

/// Takes the lock on the machine's files, so that one judge at a time writes them.
pub(super) fn take_turn() -> Result<fs::File, Failed> {
    let directory = fs::File::open(NET_CORE)?;
    directory.lock()?;
    Ok(directory)
}

/// All files that are compared. Drop restores the machine's values.
pub(super) struct Kernel {
    was: Vec<(PathBuf, String)>,
    /// A process in the namespace, with the namespace's sysfs mounted.
    inside: Child,
    _namespace: NamedNamespace,
}

/// One of the kernel's files.
pub(super) struct File {
    pub(super) knob: Knob,
    pub(super) name: String,
    /// Value written before each string.
    pub(super) before: String,
    path: PathBuf,
}

impl Kernel {
    pub(super) fn new() -> Result<Self, Failed> {
        let namespace = NamedNamespace::new()?;
        let queues = QUEUES.to_string();
        let link = ["link", "add", "name", DEVICE, "numrxqueues", &queues];
        let kind = ["type", "veth", "peer", "name", "peer"];
        run("ip", &[&["-n", namespace.name()], &link[..], &kind[..]].concat())?;
        let mut inside = Command::new("ip")
            .args(["netns", "exec", namespace.name(), "sh", "-c", "echo mounted; exec cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdout = inside.stdout.take().ok_or("no output")?;
        let mut kernel = Self { was: Vec::new(), inside, _namespace: namespace };
        BufReader::new(stdout).read_line(&mut String::new())?;
        for (_, path) in net_core() {
            let value = fs::read_to_string(&path)?;
            kernel.was.push((path, value));
        }
        Ok(kernel)
    }

    pub(super) fn file(&self, knob: Knob) -> File {
        let root = match knob.place() {
            KnobPlace::NetCore => "/".to_owned(),
            KnobPlace::Queue | KnobPlace::Device => self.root(),
        };
        let path = format!("{root}{}/{knob}", knob.place().directory(DEVICE, QUEUE));
        File { knob, name: knob.to_string(), before: before(knob), path: path.into() }
    }

    /// A file that accepts the same masks as `rps_cpus`, with a bit for each queue of the device.
    pub(super) fn wide_mask(&self) -> File {
        let path = format!("{}sys/class/net/{DEVICE}/queues/tx-0/xps_rxqs", self.root());
        let before = "0,00000000,00000000,00000001\n".to_owned();
        File { knob: Knob::RpsCpus, name: "xps_rxqs".to_owned(), before, path: path.into() }
    }

    /// Root directory of the process in the namespace.
    fn root(&self) -> String {
        format!("/proc/{}/root/", self.inside.id())
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        for (path, was) in &self.was {
            let is_same = fs::read_to_string(path).is_ok_and(|is| is == *was);
            if !is_same && let Err(error) = fs::write(path, was) {
                eprintln!("{} was {was:?} and could not be restored: {error}", path.display());
            }
        }
        // Ignored: the process may have ended. The namespace is deleted next.
        let _ = self.inside.kill();
        let _ = self.inside.wait();
    }
}

impl File {
    /// Result of writing a string.
    pub(super) fn ask(&self, written: &[u8]) -> Result<Answer, Failed> {
        let before = self.write(self.before.as_bytes())?;
        if before.reads != self.before {
            let (name, wanted) = (&self.name, &self.before);
            return Err(format!("{name} does not begin with {wanted:?}: {before:?}").into());
        }
        self.write(written)
    }

    fn write(&self, written: &[u8]) -> Result<Answer, Failed> {
        let named = |error| format!("{}: {error}", self.path.display());
        let mut file = OpenOptions::new().write(true).open(&self.path).map_err(named)?;
        let outcome = match file.write(written) {
            Ok(len_bytes) => Ok(len_bytes),
            Err(error) => Err(error.raw_os_error().ok_or("no errno")?),
        };
        Ok(Answer { outcome, reads: fs::read_to_string(&self.path).map_err(named)? })
    }
}

/// A value that suits any machine, and that few strings equal.
fn before(knob: Knob) -> String {
    let value = match knob {
        Knob::RpsCpus | Knob::RpsDefaultMask | Knob::FlowLimitCpuBitmap => {
            let machine = Machine::here();
            return knob.parse("1", &machine).map_or_else(|_| String::new(), |v| v.print(&machine));
        }
        Knob::RpsFlowCnt => 32,
        Knob::GroFlushTimeout => 77,
        Knob::NapiDeferHardIrqs => 5,
        Knob::Mtu => 1400,
        Knob::RpsSockFlowEntries => 128,
        Knob::FlowLimitTableLen => 2048,
        Knob::NetdevMaxBacklog => 999,
        Knob::NetdevBudget => 301,
        Knob::NetdevBudgetUsecs => 30_000,
        Knob::DevWeight => 65,
        Knob::DevWeightRxBias => 3,
        Knob::SkbDeferMax => 65,
    };
    format!("{value}\n")
}

fn net_core() -> impl Iterator<Item = (Knob, PathBuf)> {
    let knobs = Knob::ALL.into_iter().filter(|knob| knob.place() == KnobPlace::NetCore);
    knobs.map(|knob| (knob, PathBuf::from(format!("{NET_CORE}/{knob}"))))
}

//! `forebay doctor`: what this machine and a device can do for a run, and what to change.

mod finding; //   findings, and what each costs
mod machine; //   from facts about the machine to findings
mod device; //    from facts about a device to findings
mod abilities; // what there is, in rows
mod print; //     the report, for people
#[cfg(test)]
mod tests;

use std::path::Path;
use std::process::ExitCode;

use clap::Args;
use finding::{Finding, Severity};
use forebay_rx::backlog::{NETDEV_MAX_BACKLOG, capacity_for};
use forebay_rx::steer::HOLD_MAX;
use forebay_sys::device_facts::DeviceFacts;
use forebay_sys::interface::Interface;
use forebay_sys::machine_facts::{MachineFacts, Unseen};
use forebay_sys::topology::{SYSFS, Topology};
use serde::Serialize;

use crate::failure::Failure;
use crate::output;

/// Root of /proc and /sys.
const ROOT: &str = "/";

/// Frames that the rings of an AF_XDP queue hold: received, to receive into, and to send.
const RING_FRAMES: u32 = 2048 + 4096 + 1024;

/// Bytes of an ordinary frame's chunk of packet memory.
const CHUNK_BYTES: u64 = 2 << 10;

#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct DoctorArgs {
    /// The interface that a run is to take packets from; without it, only the machine is examined
    #[arg(value_name = "DEV")]
    device: Option<String>,

    /// Print one JSON document and nothing else on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

const EXIT_CODES: &str = "\
Exit codes: 0 nothing to change; 1 something costs packets or time; 2 something stops a run;
3 there is no such interface. Nothing is changed: each command is for you to type.";

/// Examines the machine and the device, and prints what there is to change. The exit code tells
/// the worst of it.
pub(crate) fn run(args: &DoctorArgs) -> Result<ExitCode, Failure> {
    let machine = MachineFacts::read(Path::new(ROOT));
    let interface = args.device.as_deref().map(Interface::named).transpose()?;
    let device = interface.map(|interface| DeviceFacts::read(interface, Path::new(ROOT)));
    let topology = Topology::read(Path::new(SYSFS), &machine.allowed);
    let examined = Examined::of(&machine, device.as_ref(), &topology);
    output::print(&if args.json {
        serde_json::to_string(&examined).unwrap_or_default() + "\n"
    } else {
        examined.render()
    })?;
    Ok(ExitCode::from(examined.exit_code()))
}

/// Document that `--json` prints.
#[derive(Debug, Serialize)]
struct Examined {
    /// Name of the device, if one was given.
    device: Option<String>,
    /// Abilities, by name.
    abilities: Vec<abilities::Ability>,
    /// Findings, the worst first.
    findings: Vec<Finding>,
    /// Facts that could not be read, with the reason.
    unseen: Vec<UnseenFact>,
}

#[derive(Debug, Serialize)]
struct UnseenFact {
    what: String,
    why: String,
}

impl Examined {
    fn of(machine: &MachineFacts, device: Option<&DeviceFacts>, topology: &Topology) -> Self {
        let mut findings = machine::judge(machine, device);
        findings.extend(device.into_iter().flat_map(|device| device::judge(device, machine)));
        let queues = device.map_or(1, |device| device.interface.rx_queues);
        findings.extend(machine::judge_masks(machine, topology, queues));
        findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
        let unseen = machine.unseen.iter().chain(device.into_iter().flat_map(|it| &it.unseen));
        let unseen =
            unseen.map(|Unseen { what, why }| UnseenFact { what: what.clone(), why: why.clone() });
        Self {
            device: device.map(|device| device.interface.name.clone()),
            abilities: abilities::of(machine, device),
            findings,
            unseen: unseen.collect(),
        }
    }

    /// Exit code by the worst finding.
    fn exit_code(&self) -> u8 {
        match self.findings.iter().map(|finding| finding.severity).max() {
            None | Some(Severity::Note) => 0,
            Some(Severity::Costs) => 1,
            Some(Severity::Stops) => 2,
        }
    }
}

/// Packet memory that a run on so many CPUs locks for the AF_XDP queues of a device with an
/// ordinary MTU and without options, in bytes.
fn locked_memory_bytes(cpus: usize, queues: u16) -> u64 {
    let backlogs = u64::from(capacity_for(NETDEV_MAX_BACKLOG)) * u64::try_from(cpus).unwrap_or(1);
    let frames = backlogs + u64::from(HOLD_MAX) + u64::from(RING_FRAMES);
    frames * CHUNK_BYTES * u64::from(queues)
}

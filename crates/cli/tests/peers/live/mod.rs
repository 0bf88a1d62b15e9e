//! Live devices, judged by the kernel and by senders that everybody knows: tcpreplay, iperf3, UDP
//! and TCP sockets, knotd. All of it in network namespaces of our own.

mod forwarding; //   how a run takes packets, and the link that they come by
mod program; //      a run of the program
mod sender; //       tcpreplay, and what it sends
mod conservation; // everything that was sent is accounted for
mod restarts; //     nothing is left of a run
mod changes; //      order, while everything changes
mod transfer; //     content, through a run
mod neighbours; //   who else uses the interface
mod faults; //       what can go wrong with a device
mod cleanup; //      what a run owes whoever started it

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::LazyLock;

use forebay_sys as sys;
use forwarding::{Link, Way};

use crate::Judgement;

/// A name, and who judges.
type Judge = (&'static str, fn() -> Judgement);

/// Judges, by the tools and files that it takes.
pub(crate) const TRIALS: [(&[&str], &[Judge]); 9] = [
    (&["tcpreplay"], &conservation::TRIALS),
    (&["trafgen"], &conservation::OF_QUEUES),
    (&["tcpreplay", "bpftool"], &restarts::TRIALS),
    (&["tcpreplay"], &changes::TRIALS),
    (&["iperf3"], &transfer::TRIALS),
    (&["knotd", "kdig"], &neighbours::TRIALS),
    (&["tcpreplay", "setpriv"], &faults::TRIALS),
    (&["tcpreplay", faults::FOREIGN_PROGRAM], &faults::FOREIGN),
    (&["tcpreplay"], &cleanup::TRIALS),
];

/// Reason why there is nothing to judge with these `tools`.
pub(crate) fn missing(tools: &[&str]) -> Option<String> {
    if !sys::user().is_root() {
        return Some("it takes root".to_owned());
    }
    if sys::allowed_cpus().len() < 2 {
        return Some("it takes two CPUs".to_owned());
    }
    if !Path::new("/dev/net/tun").exists() {
        return Some("there is no /dev/net/tun".to_owned());
    }
    let is_there = |tool: &str| {
        if tool.starts_with('/') {
            return Path::new(tool).exists();
        }
        let looked =
            Command::new("sh").args(["-c", "command -v $0", tool]).stdout(Stdio::null()).status();
        looked.is_ok_and(|status| status.success())
    };
    let tools = ["ip", "ethtool"].iter().chain(tools);
    if let Some(tool) = tools.copied().find(|tool| !is_there(tool)) {
        return Some(format!("{tool} is not installed"));
    }
    static REFUSED: LazyLock<Option<String>> = LazyLock::new(|| {
        let refused = Way::ALL.into_iter().find_map(|way| Link::new(way).err())?;
        let reason = refused.message().unwrap_or_default();
        Some(format!("it takes network namespaces, veth, TAP and TUN: {reason}"))
    });
    REFUSED.clone()
}

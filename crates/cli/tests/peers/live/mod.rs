//! Live devices, judged by the kernel and by well-known senders: tcpreplay, iperf3, UDP and TCP
//! sockets, knotd. Everything runs in network namespaces.

mod forwarding; //   ways in which a run takes packets, and the link
pub(crate) mod program; //      a run of the program
mod sender; //       tcpreplay and its captures
mod conservation; // every frame sent is accounted for
mod restarts; //     nothing is left of a run
mod changes; //      order, while settings change
mod transfer; //     file contents, through a run
mod neighbours; //   other users of the interface
mod faults; //       faults of a device
mod disk; //         a full disk, when it fills
mod messages; //     messages of a run, as they come
mod links; //        links that are lost and come back
mod cleanup; //      duties of a run towards its user
mod doctor; //       findings about devices
mod watchdog; //     a service manager that restarts a run
mod screen; //       `forebay top` on a live run
mod panels; //       queries of the dashboard
pub(crate) mod sockets; // sockets of a program, as they are shown
pub(crate) mod fleet; // machines behind a route

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::LazyLock;

use forebay_sys as sys;
use forwarding::{Link, Way};

use crate::Judgement;

/// Name and function of a judge.
type Judge = (&'static str, fn() -> Judgement);

/// Judges, with the tools and files that each needs.
pub(crate) const TRIALS: [(&[&str], &[Judge]); 18] = [
    (&["tcpreplay"], &conservation::TRIALS),
    (&["trafgen"], &conservation::OF_QUEUES),
    (&["tcpreplay", "bpftool"], &restarts::TRIALS),
    (&["tcpreplay"], &changes::TRIALS),
    (&["iperf3"], &transfer::TRIALS),
    (&["knotd", "kdig"], &neighbours::TRIALS),
    (&["tcpreplay", "setpriv"], &faults::TRIALS),
    (&["tcpreplay", faults::FOREIGN_PROGRAM], &faults::FOREIGN),
    (&["tcpreplay"], &cleanup::TRIALS),
    (&[], &doctor::TRIALS),
    (&[], &disk::TRIALS),
    (&[], &links::TRIALS),
    (&["mkfifo"], &watchdog::TRIALS),
    (&["tmux"], &screen::TRIALS),
    (&["tmux"], &sockets::IN_TERMINAL),
    (&["chromium"], &sockets::IN_BROWSER),
    (&["promtool"], &sockets::IN_METRICS),
    (&["prometheus"], &panels::TRIALS),
];

/// Reason why judges that need these `tools` cannot run.
pub(crate) fn missing(tools: &[&str]) -> Option<String> {
    if !sys::user().is_root() {
        return Some("this needs root".to_owned());
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

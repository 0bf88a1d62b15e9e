//! Many starts and stops under load, by signals that can be caught and by SIGKILL: nothing of a run
//! is left in the kernel.

use std::collections::BTreeSet;
use std::fs;
use std::process::{Child, Command, Stdio};

use libtest_mimic::Failed;

use crate::Judgement;
use crate::live::Judge;
use crate::live::forwarding::{Link, Way};
use crate::live::program::{Run, wait_until};
use crate::live::sender::{Capture, flood};

pub(crate) const TRIALS: [Judge; 5] = [
    ("promise_4_native_xdp_runs_leave_nothing", || judge(Way::AfXdpNative)),
    ("promise_4_generic_xdp_runs_leave_nothing", || judge(Way::AfXdpGeneric)),
    ("promise_4_packet_socket_runs_leave_nothing", || judge(Way::AfPacket)),
    ("promise_4_tap_runs_leave_nothing", || judge(Way::Tap)),
    ("promise_4_tun_runs_leave_nothing", || judge(Way::Tun)),
];

/// Starts per way, and the environment variable to have more.
const STARTS: u32 = 6;
const STARTS_VARIABLE: &str = "FOREBAY_STARTS";

/// Period, in starts, of runs ended by SIGKILL.
const KILL_PERIOD: u32 = 3;

fn judge(way: Way) -> Judgement {
    let starts = match std::env::var(STARTS_VARIABLE) {
        Ok(starts) => starts.parse().map_err(|error| format!("{STARTS_VARIABLE}: {error}"))?,
        Err(_) => STARTS,
    };
    let link = Link::new(way)?;
    let capture = Capture::write(way, 0)?;
    let load = Load(flood(&link, &capture)?);
    let mut objects = BTreeSet::new();
    for start in 0..starts {
        let mut run = Run::start(&link.near, link.args(&["--cpus", "2"]))
            .map_err(|failed| format!("start {start}: {}", failed.message().unwrap_or_default()))?;
        let held = Object::all_of(run.id()?)?;
        if way.is_xdp()
            && !["prog", "map"].iter().all(|kind| held.iter().any(|it| it.kind == *kind))
        {
            return Err(format!("it should have a program and a map: {held:?}").into());
        }
        objects.extend(held);
        if start % KILL_PERIOD == KILL_PERIOD - 1 {
            run.kill()?;
        } else {
            run.stop()?;
        }
    }
    drop(load);
    judge_silence(&link)?;
    // The kernel frees the objects with a delay.
    for object in objects {
        wait_until(&format!("{object:?} is gone"), || Ok(!object.is_there()?))?;
    }
    Ok(())
}

/// Checks that no XDP program, socket or reader is left.
pub(super) fn judge_silence(link: &Link) -> Judgement {
    wait_until("there is no program", || {
        Ok(!link.shown()?.as_object().ok_or("no link")?.contains_key("xdp"))
    })?;
    wait_until("there is no packet socket", || {
        let sockets = link.near.output_of(&["cat", "/proc/net/packet"])?;
        Ok(sockets.lines().count() <= 1)
    })?;
    if link.is_own() {
        wait_until("nobody has the device", || link.has_flag("NO-CARRIER"))?;
    }
    Ok(())
}

/// A sender that does not end by itself.
struct Load(Child);

impl Drop for Load {
    fn drop(&mut self) {
        // Ignored: a sender that has ended has failed, which the judge finds out otherwise.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A BPF object held by a process.
#[derive(PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Object {
    /// Name of the kind in bpftool.
    kind: &'static str,
    number: u32,
}

impl Object {
    fn all_of(process: u32) -> Result<Vec<Self>, Failed> {
        let mut all = Vec::new();
        for descriptor in fs::read_dir(format!("/proc/{process}/fdinfo"))? {
            // A descriptor that has been closed holds nothing.
            let text = fs::read_to_string(descriptor?.path()).unwrap_or_default();
            for (name, value) in text.lines().filter_map(|line| line.split_once(':')) {
                let kind = match name {
                    "prog_id" => "prog",
                    "map_id" => "map",
                    "link_id" => "link",
                    _ => continue,
                };
                all.push(Self { kind, number: value.trim().parse()? });
            }
        }
        Ok(all)
    }

    fn is_there(&self) -> Result<bool, Failed> {
        let mut bpftool = Command::new("bpftool");
        bpftool.args([self.kind, "show", "id", &self.number.to_string()]);
        Ok(bpftool.stdout(Stdio::null()).stderr(Stdio::null()).status()?.success())
    }
}

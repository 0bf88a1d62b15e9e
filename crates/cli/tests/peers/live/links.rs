//! Links that are lost and come back: told when it happens, and counted.

use libtest_mimic::Failed;
use serde_json::Value;

use crate::Judgement;
use crate::live::Judge;
use crate::live::forwarding::{DEVICE, Link, PEER, Way, join};
use crate::live::messages::Messages;
use crate::live::program::{command, wait_until};

pub(crate) const TRIALS: [Judge; 3] = [
    ("ops_3_lost_link_is_told_and_counted", || {
        [Way::AfPacket, Way::AfXdpNative].into_iter().try_for_each(judge_link)
    }),
    ("ops_3_lost_device_ends_and_is_told", || Way::ALL.into_iter().try_for_each(judge_device)),
    ("ops_3_lost_destination_is_told", judge_destination),
];

/// Starts a run, and returns the address of its metrics.
fn start(link: &Link, more: &[&str]) -> Result<(Messages, String), Failed> {
    let mut run = command(&link.near);
    run.arg("run").args(link.args(&["--cpus", "1", "--log", "json", "--metrics", "0"])).args(more);
    run.arg("--no-control");
    let mut run = Messages::of(run)?;
    let served = run.wait_for("address")?;
    let address = served["address"].as_str().ok_or("no address")?.to_owned();
    Ok((run, address))
}

fn expect(message: &Value, level: &str, link: &str, part: &str) -> Judgement {
    let is_of_device = message["device"] == DEVICE && message["level"] == level;
    let text = message["message"].as_str().unwrap_or_default();
    if is_of_device && message["link"] == link && text.contains(part) {
        return Ok(());
    }
    Err(format!("{level}, {link}, {part} were expected: {message}").into())
}

/// Metrics of a run, read in its namespace.
fn metrics(link: &Link, address: &str) -> Result<String, Failed> {
    link.near.within(|| {
        let mut stream = std::net::TcpStream::connect(address)?;
        std::io::Write::write_all(
            &mut stream,
            format!("GET /metrics HTTP/1.0\r\nHost: {address}\r\n\r\n").as_bytes(),
        )?;
        let mut text = String::new();
        std::io::Read::read_to_string(&mut stream, &mut text)?;
        Ok(text)
    })
}

fn judge_link(way: Way) -> Judgement {
    let link = Link::new(way)?;
    link.near.run(&["ip", "link", "set", "lo", "up"])?;
    let (mut run, address) = start(&link, &[])?;
    let (far, _) = link.sender();
    let shows = |up: u8, losses: u32| -> Judgement {
        let expected = [
            format!("forebay_device_up{{device=\"{DEVICE}\"}} {up}"),
            format!("forebay_carrier_losses_total{{device=\"{DEVICE}\"}} {losses}"),
        ];
        // A text is sent again for a moment.
        wait_until(&expected.join(" and "), || {
            let text = metrics(&link, &address)?;
            Ok(expected.iter().all(|line| text.lines().any(|it| it.starts_with(line))))
        })
    };
    shows(1, 0)?;
    far.run(&["ip", "link", "set", PEER, "down"])?;
    expect(&run.wait_for("link")?, "WARN", "no_carrier", "lost its carrier")?;
    shows(0, 1)?;
    far.run(&["ip", "link", "set", PEER, "up"])?;
    expect(&run.wait_for("link")?, "INFO", "running", "has its link again")?;
    shows(1, 1)?;
    link.near.run(&["ip", "link", "set", DEVICE, "down"])?;
    expect(&run.wait_for("link")?, "WARN", "down", "ip link set fb0 up")?;
    link.near.run(&["ip", "link", "set", DEVICE, "up"])?;
    expect(&run.wait_for("link")?, "INFO", "running", "has its link again")?;
    run.judge_alive()
}

/// The loss of a device is told with its consequence, and ends the run.
fn judge_device(way: Way) -> Judgement {
    let link = Link::new(way)?;
    link.near.run(&["ip", "link", "set", "lo", "up"])?;
    let (mut run, _) = start(&link, &[])?;
    link.near.run(&["ip", "link", "delete", DEVICE])?;
    let lost = run.wait_for("problem")?;
    let text = |field: &str| lost[field].as_str().unwrap_or_default();
    let is_whole = text("problem").contains(DEVICE) && text("consequence") == "the run ends";
    let failure = run.wait_for("code")?;
    if is_whole && !text("help").is_empty() && failure["code"] == 3 && run.ends()? == Some(3) {
        return Ok(());
    }
    Err(format!("{way:?}: {lost}, {failure}").into())
}

/// The loss of a device that packets would leave by is told even if none does.
fn judge_destination() -> Judgement {
    let link = Link::new(Way::AfPacket)?;
    link.near.run(&["ip", "link", "set", "lo", "up"])?;
    let (far, _) = link.sender();
    let ends = [(&link.near, "fb2", "02:00:00:00:00:03"), (far, "fb3", "02:00:00:00:00:04")];
    join(ends[0], ends[1], 1)?;
    let (mut run, _) = start(&link, &["--to", "dev:fb2"])?;
    link.near.run(&["ip", "link", "delete", "fb2"])?;
    let lost = run.wait_for("link")?;
    if lost["device"] != "fb2" || lost["link"] != "gone" || lost["level"] != "ERROR" {
        return Err(lost.to_string().into());
    }
    run.judge_alive()
}

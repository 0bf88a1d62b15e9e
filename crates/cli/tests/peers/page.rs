//! The page in Chromium: what it shows, what it changes, and what another site's page gets.

use std::error::Error;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::thread;

use etherparse::PacketBuilder;
use forebay_control::ControlClient;
use serde_json::Value;

use crate::Judgement;
use crate::browser::Browser;
use crate::captures::write_pcap;
use crate::frames::Frame;
use crate::live::program::wait_until;
use crate::metrics::MeasuredRun;

/// Name and function of a judge.
type PageJudge = (&'static str, fn() -> Judgement);

/// All judges.
pub(crate) const TRIALS: [PageJudge; 5] = [
    ("pag_5_chromium_shows_run_and_flow", judge_page),
    ("pag_5_page_agrees_in_storm_and_drops", judge_storm),
    ("pag_5_page_tells_of_elephant", judge_elephant),
    ("pag_5_page_goes_on_with_other_run", judge_other_run),
    ("pag_3_other_site_changes_nothing", judge_other_site),
];

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// Flow of the bundled capture.
const FLOW: &str = "udp 10.9.0.2:39796 > 10.9.0.1:53";

/// Words of `explain` on the page.
const EXPLANATION: &str = "document.getElementById('explanation').textContent";

/// Pictures of the page, kept for people.
const PICTURE: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/page.png");
const PICTURE_OF_STORM: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/page-storm.png");
const PICTURE_OF_ELEPHANT: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/page-elephant.png");

/// Port of the heavy flow, and those of light ones: together they have fewer packets.
const HEAVY: u16 = 1000;
const LIGHT: std::ops::Range<u16> = 1001..1017;

/// Changes of the mask in the storm.
const FLIPS: usize = 12;

type Done<T> = Result<T, Box<dyn Error>>;

/// A replay on two CPUs whose page has a token.
fn run(directory: &Path) -> Done<MeasuredRun> {
    run_with(directory, &["--cpus", "2", "--rate", "100k", "--work", "1000"])
}

fn run_with(directory: &Path, args: &[&str]) -> Done<MeasuredRun> {
    let token = directory.join("token");
    fs::write(&token, format!("{TOKEN}\n"))?;
    fs::set_permissions(&token, fs::Permissions::from_mode(0o600))?;
    let token = token.display().to_string();
    MeasuredRun::start_with(&[args, &["--page-token", &token]].concat())
}

fn json(run: &MeasuredRun, path: &str) -> Done<Value> {
    Ok(serde_json::from_str(&run.get(path)?)?)
}

fn judge_page() -> Judgement {
    let directory = tempfile::tempdir()?;
    let run = run(directory.path())?;
    let origin = format!("http://{}", run.address);
    let mut browser = Browser::start()?;
    browser.open(&format!("{origin}/"))?;
    browser.wait_for("document.querySelectorAll('#cpus tbody tr').length === 2")?;
    shows_counters(&mut browser, &run)?;
    // A line needs two values.
    browser.wait_for("/L/.test(document.querySelector('#rates path')?.getAttribute('d'))")?;
    sets_mask(&mut browser, &run, "2", 1)?;
    sets_mask(&mut browser, &run, "3", 2)?;
    tells_story(&mut browser)?;
    let resources = browser
        .value("performance.getEntriesByType('resource').map(({ name }) => name).join(' ')")?;
    for resource in resources.as_str().unwrap_or_default().split(' ') {
        if !resource.starts_with(&origin) {
            return Err(format!("the page asks for {resource}").into());
        }
    }
    browser.picture(Path::new(PICTURE))?;
    if browser.errors.is_empty() { Ok(()) } else { Err(browser.errors.join("\n").into()) }
}

/// Checks that the counters shown are between those before and after.
fn shows_counters(browser: &mut Browser, run: &MeasuredRun) -> Judgement {
    let before = json(run, "/api/state")?;
    let of_page = "[...document.querySelectorAll('#cpus tbody tr')].map((row) => row.dataset.packets).join(' ')";
    let first = format!(
        "Number(document.querySelector('#cpus tbody tr').dataset.packets) > {}",
        before["cpus"][0]["packets"]
    );
    browser.wait_for(&first)?;
    let shown = browser.value(of_page)?;
    let after = json(run, "/api/state")?;
    for (index, shown) in shown.as_str().unwrap_or_default().split(' ').enumerate() {
        let packets = |state: &Value| state["cpus"][index]["packets"].as_u64();
        let shown = shown.parse().ok();
        if shown < packets(&before) || shown > packets(&after) {
            return Err(format!("{shown:?} is not between\n{before}\nand\n{after}").into());
        }
    }
    Ok(())
}

/// A heavy flow fills its CPU: light ones leave it, by load, and later it moves itself, as its CPU is taken
/// from the mask. The page tells of each what `explain` does.
fn judge_elephant() -> Judgement {
    let directory = tempfile::tempdir()?;
    let socket = directory.path().join("s.sock").display().to_string();
    let capture = directory.path().join("heavy.pcap");
    write_pcap(&capture, &heavy_and_light());
    let capture = capture.display().to_string();
    let mut args = vec!["--cpus", "2", "--spread", "always", "--rate", "40k", "--work", "20000"];
    args.extend(["--control", &socket, &capture]);
    let run = run_with(directory.path(), &args)?;
    let told = |flow: &str| -> Done<Vec<String>> {
        let lines = ControlClient::connect(socket.as_ref())?.ask(&format!("explain {flow}"))?;
        Ok(lines.iter().map(|line| line.trim().to_owned()).collect())
    };
    let cpu = |flow: &str| -> Done<u16> {
        let lines = told(flow)?;
        let on =
            lines.iter().find_map(|line| line.strip_prefix("now:   on CPU ")?.split(':').next());
        Ok(on.ok_or_else(|| format!("{flow} is nowhere: {lines:?}"))?.parse()?)
    };
    let heavy = flow_of(HEAVY);
    wait_until("packets have come", || Ok(LIGHT.map(flow_of).all(|flow| cpu(&flow).is_ok())))?;
    let full = cpu(&heavy)?;
    let mut beside = Vec::new();
    for flow in LIGHT.map(flow_of) {
        if cpu(&flow)? == full {
            beside.push(flow);
        }
    }
    if beside.is_empty() {
        return Err("all light flows are elsewhere".into());
    }
    let mut browser = Browser::start()?;
    browser.open(&format!("http://{}/", run.address))?;
    browser.value("document.getElementById('follow').checked = true")?;
    sets(&mut browser, "rps_balance", "load")?;
    wait_until("a light flow has left by load", || {
        Ok(beside.iter().any(|flow| told(flow).is_ok_and(|lines| has_left(&lines, full))))
    })?;
    // Moves that went on would not be the same twice. Without balance all return.
    sets(&mut browser, "rps_balance", "off")?;
    wait_until("the heavy flow is where the mask has it", || Ok(cpu(&heavy)? == full))?;
    for flow in &beside {
        if has_left(&told(flow)?, full) {
            agrees(&mut browser, flow, &told, "(balance)")?;
        }
    }
    let other = 1 - full;
    sets(&mut browser, "rx-0/rps_cpus", &(1 << other).to_string())?;
    wait_until("the heavy flow has moved", || Ok(cpu(&heavy)? == other))?;
    agrees(&mut browser, &heavy, &told, "(rps)")?;
    browser.picture(Path::new(PICTURE_OF_ELEPHANT))?;
    if browser.errors.is_empty() { Ok(()) } else { Err(browser.errors.join("\n").into()) }
}

/// A document that the page cannot show, and another run with more queues, end nothing.
fn judge_other_run() -> Judgement {
    let directory = tempfile::tempdir()?;
    let run = run(directory.path())?;
    let mut browser = Browser::start()?;
    browser.open(&format!("http://{}/", run.address))?;
    browser.wait_for("document.querySelectorAll('#queues tbody tr').length === 1")?;
    browser.value(
        "{ const real = window.fetch;
           let turns = 0;
           window.fetch = async (path, ...rest) => {
             const answer = await real(path, ...rest);
             if (path !== '/api/state') return answer;
             const state = await answer.json();
             turns += 1;
             if (turns === 1) return { json: async () => ({}) };
             state.run = 'another';
             state.at_ns *= 2;
             state.queues.push({ ...state.queues[0], queue: 'rx-1' });
             return { json: async () => state };
           }; }",
    )?;
    browser.wait_for("document.querySelectorAll('#queues tbody tr').length === 2")?;
    let packets = "document.querySelector('#queues tbody tr')?.dataset.packets";
    let shown = browser.value(packets)?;
    browser.wait_for(&format!("{packets} !== {shown}"))?;
    browser.wait_for("document.getElementById('status').className === ''")?;
    if browser.errors.is_empty() { Ok(()) } else { Err(browser.errors.join("\n").into()) }
}

/// True if an explanation has a move from this CPU by load.
fn has_left(lines: &[String], from: u16) -> bool {
    let left = format!(" s: CPU {from} to CPU ");
    lines.iter().any(|line| line.contains(&left) && line.contains("(balance)"))
}

/// The page tells of a flow, which moved for this reason, the moves that `explain` tells, and draws each.
fn agrees(
    browser: &mut Browser,
    flow: &str,
    told: &impl Fn(&str) -> Done<Vec<String>>,
    reason: &str,
) -> Judgement {
    search_for(browser, flow)?;
    let mut last = String::new();
    let shows_same = || -> Result<bool, libtest_mimic::Failed> {
        // A flow may move on while it is asked for.
        let expected = moves(&told(flow)?);
        let shown = browser.value(EXPLANATION)?.as_str().unwrap_or_default().to_owned();
        let drawn = browser.value("document.querySelectorAll('.story .move').length")?;
        let lines: Vec<_> = shown.lines().map(|line| line.trim().to_owned()).collect();
        last = format!("{drawn} are drawn of {shown}\nwhere {expected:#?}");
        Ok(shown.starts_with(&format!("flow {flow}, "))
            && moves(&lines) == expected
            && drawn == expected.len()
            && expected.iter().any(|line| line.contains(reason)))
    };
    wait_until("the page agrees", shows_same).map_err(|error| format!("{error:?}: {last}").into())
}

/// Moves of an explanation.
fn moves(lines: &[String]) -> Vec<String> {
    lines.iter().filter(|line| line.contains(" s: CPU ")).cloned().collect()
}

/// Name of the flow from this port.
fn flow_of(port: u16) -> String {
    format!("udp 10.9.0.2:{port} > 10.9.0.1:53")
}

/// Frames of a round: the heavy flow has 3 of 5.
fn heavy_and_light() -> Vec<Frame> {
    let frame = |port| {
        let mut bytes = Vec::new();
        let builder = PacketBuilder::ethernet2([2; 6], [4; 6]);
        let builder = builder.ipv4([10, 9, 0, 2], [10, 9, 0, 1], 64).udp(port, 53);
        builder.write(&mut bytes, &[7; 32]).unwrap();
        Frame { wire_len: u32::try_from(bytes.len()).unwrap(), bytes }
    };
    let ports = LIGHT.step_by(2).flat_map(|port| [HEAVY, port, HEAVY, port + 1, HEAVY]);
    ports.map(frame).collect()
}

/// A flow is followed while the mask flips, and as packets drop: the page has the words of `explain`.
fn judge_storm() -> Judgement {
    let directory = tempfile::tempdir()?;
    let socket = directory.path().join("s.sock").display().to_string();
    let mut args = vec!["--cpus", "2", "--rps", "1", "--spread", "always", "--rate", "50k"];
    args.extend(["--work", "2000", "--when-full", "drop", "--control", &socket]);
    let run = run_with(directory.path(), &args)?;
    let explained = || -> Done<Vec<String>> {
        let lines = ControlClient::connect(socket.as_ref())?.ask(&format!("explain {FLOW}"))?;
        Ok(lines.iter().map(|line| line.trim().to_owned()).collect())
    };
    let mut browser = Browser::start()?;
    browser.open(&format!("http://{}/", run.address))?;
    browser.value("document.getElementById('follow').checked = true")?;
    search(&mut browser)?;
    for flip in 0..FLIPS {
        let mask = 2 - flip % 2;
        sets(&mut browser, "rx-0/rps_cpus", &mask.to_string())?;
        let on = format!("on CPU {}: its last packet went there", mask - 1);
        browser.wait_for(&format!("{EXPLANATION}.includes('{on}')"))?;
    }
    let expected = moves(&explained()?);
    let last = expected.last().ok_or("it has not moved")?.replace('\'', "");
    if expected.len() < FLIPS {
        return Err(format!("{FLIPS} moves were expected: {expected:?}").into());
    }
    browser.wait_for(&format!("{EXPLANATION}.includes('{last}')"))?;
    let shown = browser.value(EXPLANATION)?;
    let shown: Vec<_> =
        shown.as_str().unwrap_or_default().lines().map(|it| it.trim().to_owned()).collect();
    let drawn = browser.value("document.querySelectorAll('.story .move').length")?;
    if moves(&shown) != expected || drawn != expected.len() {
        return Err(format!("{drawn} are drawn, {shown:?} are shown of {expected:?}").into());
    }
    sets(&mut browser, "netdev_max_backlog", "1")?;
    browser.wait_for(
        "Number(document.querySelector('#drops tr[data-reason=backlog_full]')?.dataset.count) > 0",
    )?;
    browser.wait_for(&format!("{EXPLANATION}.includes('backlog_full')"))?;
    // Drops of other flows may have made it forget those of this one, until the next.
    wait_until("the drop is explained", || {
        Ok(explained()?.iter().any(|line| line.contains("backlog_full")))
    })?;
    browser.picture(Path::new(PICTURE_OF_STORM))?;
    if browser.errors.is_empty() { Ok(()) } else { Err(browser.errors.join("\n").into()) }
}

/// Changes the mask on the page, and waits until the map has it.
fn sets_mask(browser: &mut Browser, run: &MeasuredRun, mask: &str, cpus: usize) -> Judgement {
    sets(browser, "rx-0/rps_cpus", mask)?;
    let map = "new Set([...document.querySelectorAll('#map rect[data-cpu]')].map((it) => it.dataset.cpu)).size";
    browser.wait_for(&format!("{map} === {cpus}"))?;
    match &*self::mask(run)? {
        now if now == mask => Ok(()),
        now => Err(format!("rps_cpus is {now}, not {mask}").into()),
    }
}

/// Changes a knob on the page, and waits for the answer.
fn sets(browser: &mut Browser, knob: &str, value: &str) -> Judgement {
    let row = format!("document.querySelector('#knobs tr[data-knob=\"{knob}\"]')");
    browser.wait_for(&format!("{row}?.querySelector('button') != null"))?;
    browser.value(&format!(
        "{{ document.getElementById('token').value = '{TOKEN}';
            {row}.querySelector('input').value = '{value}';
            {row}.querySelector('button').click(); }}"
    ))?;
    let told = format!("document.getElementById('answer').textContent === 'now {knob} {value}'");
    browser.wait_for(&told).map(drop)?;
    Ok(())
}

/// Searches for the flow of the bundled capture, with the token.
fn search(browser: &mut Browser) -> Judgement {
    search_for(browser, FLOW)
}

fn search_for(browser: &mut Browser, flow: &str) -> Judgement {
    browser.value(&format!(
        "{{ document.getElementById('token').value = '{TOKEN}';
            document.getElementById('flow').value = '{flow}';
            document.getElementById('search').requestSubmit(); }}"
    ))?;
    Ok(())
}

/// Searches for a flow that has moved, and checks its words and its line in time.
fn tells_story(browser: &mut Browser) -> Judgement {
    search(browser)?;
    let text = browser.wait_for(EXPLANATION)?.as_str().unwrap_or_default().to_owned();
    if !text.starts_with(&format!("flow {FLOW}, hash ")) {
        return Err(format!("the page tells {text}").into());
    }
    let moves = text.lines().filter(|line| line.contains(": CPU ")).count();
    let drawn = browser.value("document.querySelectorAll('.story .move').length")?;
    if moves == 0 || drawn != moves {
        return Err(format!("{drawn} moves are drawn of\n{text}").into());
    }
    Ok(())
}

/// A page of another site, in the browser of one who may reach the server, neither reads nor changes
/// anything.
fn judge_other_site() -> Judgement {
    let directory = tempfile::tempdir()?;
    let run = run(directory.path())?;
    let before = mask(&run)?;
    let site = serve(&attack(&run.address))?;
    let mut browser = Browser::start()?;
    browser.open(&format!("http://{site}/"))?;
    let outcomes = browser.wait_for("window.outcomes")?;
    if outcomes != "refused refused refused refused refused" {
        return Err(format!("the other site got: {outcomes}").into());
    }
    // The form was sent by then, and refused.
    browser.wait_for("document.querySelector('iframe').dataset.loaded === 'yes'")?;
    match mask(&run)? {
        now if now == before => Ok(()),
        now => Err(format!("the other site has set rps_cpus to {now}").into()),
    }
}

/// Mask of the first queue.
fn mask(run: &MeasuredRun) -> Done<String> {
    let knobs = json(run, "/api/knobs")?;
    let knobs = knobs["knobs"].as_array().into_iter().flatten();
    let mask = knobs
        .filter(|knob| knob["name"] == "rx-0/rps_cpus")
        .find_map(|knob| knob["value"].as_str());
    Ok(mask.ok_or("there is no rps_cpus")?.to_owned())
}

/// Page that tries to read the counters, to change a knob with the token and without a preflight, and
/// to show the page in a frame.
fn attack(address: &str) -> String {
    let change = r#"{"knob":"rps_cpus","value":"2"}"#;
    format!(
        r#"<!doctype html><title>another site</title>
<iframe name="frame"></iframe>
<form id="form" method="post" enctype="text/plain" action="http://{address}/api/set" target="frame">
<input name='{{"knob":"rps_cpus","value":"2","a":"' value='"}}'></form>
<script>
const of = (path, options) => fetch("http://{address}" + path, options).then(
  (answer) => answer.type === "opaque" ? "sent" : "read", () => "refused");
const headers = {{ "Content-Type": "application/json", "X-Forebay-Token": "{TOKEN}" }};
const body = '{change}';
(async () => {{
  const outcomes = [
    await of("/api/state"),
    await of("/metrics"),
    await of("/api/set", {{ method: "POST", headers, body }}),
    await of("/api/set", {{ method: "POST", mode: "no-cors", body }}),
    await of("/api/explain?flow=1"),
  ];
  const frame = document.querySelector("iframe");
  frame.addEventListener("load", () => {{ frame.dataset.loaded = "yes"; }});
  document.getElementById("form").submit();
  window.outcomes = outcomes.join(" ");
}})();
</script>"#
    )
}

/// Serves a document at a free port, until the program ends; returns the address.
fn serve(document: &str) -> Done<String> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let answer = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{document}",
        document.len()
    );
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            // Ignored: a browser that goes away.
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(answer.as_bytes());
        }
    });
    // The name differs from that of the server, so that it is another site, not only another port.
    Ok(format!("localhost:{}", address.port()))
}

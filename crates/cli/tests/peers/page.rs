//! The page in Chromium: what it shows, what it changes, and what another site's page gets.

use std::error::Error;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::thread;

use serde_json::Value;

use crate::Judgement;
use crate::browser::Browser;
use crate::metrics::MeasuredRun;

/// Name and function of a judge.
type PageJudge = (&'static str, fn() -> Judgement);

/// All judges.
pub(crate) const TRIALS: [PageJudge; 2] = [
    ("pag_5_chromium_shows_run_and_flow", judge_page),
    ("pag_3_other_site_changes_nothing", judge_other_site),
];

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// Flow of the bundled capture.
const FLOW: &str = "udp 10.9.0.2:39796 > 10.9.0.1:53";

/// Picture of the page, kept for people.
const PICTURE: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/page.png");

type Done<T> = Result<T, Box<dyn Error>>;

/// A replay on two CPUs whose page has a token.
fn run(directory: &Path) -> Done<MeasuredRun> {
    let token = directory.join("token");
    fs::write(&token, format!("{TOKEN}\n"))?;
    fs::set_permissions(&token, fs::Permissions::from_mode(0o600))?;
    let token = token.display().to_string();
    let args = ["--cpus", "2", "--rate", "100k", "--work", "1000", "--page-token", &token];
    MeasuredRun::start_with(&args)
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

/// Changes the mask on the page, and waits until the map has it.
fn sets_mask(browser: &mut Browser, run: &MeasuredRun, mask: &str, cpus: usize) -> Judgement {
    let set = format!(
        "{{ document.getElementById('token').value = '{TOKEN}';
            const row = document.querySelector('#knobs tr[data-knob=\"rx-0/rps_cpus\"]');
            row.querySelector('input').value = '{mask}';
            row.querySelector('button').click(); }}"
    );
    browser.wait_for(
        "document.querySelector('#knobs tr[data-knob=\"rx-0/rps_cpus\"] button') !== null",
    )?;
    browser.value(&set)?;
    let told =
        format!("document.getElementById('answer').textContent === 'now rx-0/rps_cpus {mask}'");
    browser.wait_for(&told)?;
    let map = "new Set([...document.querySelectorAll('#map rect[data-cpu]')].map((it) => it.dataset.cpu)).size";
    browser.wait_for(&format!("{map} === {cpus}"))?;
    match &*self::mask(run)? {
        now if now == mask => Ok(()),
        now => Err(format!("rps_cpus is {now}, not {mask}").into()),
    }
}

/// Searches for a flow that has moved, and checks its words and its line in time.
fn tells_story(browser: &mut Browser) -> Judgement {
    let search = format!(
        "{{ document.getElementById('flow').value = '{FLOW}';
            document.getElementById('search').requestSubmit(); }}"
    );
    browser.value(&search)?;
    let text = "document.getElementById('explanation').textContent";
    let text = browser.wait_for(text)?.as_str().unwrap_or_default().to_owned();
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

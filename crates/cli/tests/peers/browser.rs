//! Chromium, driven by a test through pipes (the DevTools protocol). Messages are JSON, each with a
//! zero byte behind it.

use std::error::Error;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

type Done<T> = Result<T, Box<dyn Error>>;

/// Longest time until a page shows what it should: only to end a hang.
const SHOW_TIME: Duration = Duration::from_secs(120);

/// Size of the window.
const WINDOW: [u32; 2] = [1200, 1900];

/// Names that Chromium has.
const PROGRAMS: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];

/// Reason why no browser can be driven.
pub(crate) fn missing() -> Option<String> {
    program().is_none().then(|| "there is no chromium".to_owned())
}

fn program() -> Option<&'static str> {
    let runs = |program: &&str| {
        let version = Command::new(program)
            .arg("--version")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        version.is_ok_and(|status| status.success())
    };
    PROGRAMS.into_iter().find(runs)
}

/// A browser with one page, until dropped.
pub(crate) struct Browser {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    commands: u64,
    session: Option<String>,
    /// Errors that the page wrote to its console, or that the browser noted.
    pub(crate) errors: Vec<String>,
    /// Profile, removed with the browser.
    _directory: TempDir,
}

impl Browser {
    /// Starts the browser with an empty page.
    pub(crate) fn start() -> Done<Self> {
        let directory = tempfile::tempdir()?;
        let program = program().ok_or("there is no chromium")?;
        // The protocol is spoken through descriptors 3 and 4.
        let script = "exec \"$@\" 3<&0 4>&1 </dev/null >/dev/null 2>/dev/null";
        let mut chromium = Command::new("sh");
        chromium.args(["-c", script, "sh", program, "--headless", "--remote-debugging-pipe"]);
        // A sandbox takes a user other than root; all pages are this test's own.
        chromium.args(["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]);
        chromium.arg(format!("--user-data-dir={}", directory.path().display()));
        chromium.arg(format!("--window-size={},{}", WINDOW[0], WINDOW[1]));
        let mut child = chromium.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let to = child.stdin.take().ok_or("it has no input")?;
        let from = BufReader::new(child.stdout.take().ok_or("it has no output")?);
        let errors = Vec::new();
        let (commands, session, _directory) = (0, None, directory);
        let mut browser = Self { child, to, from, commands, session, errors, _directory };
        let target = browser.command("Target.createTarget", &json!({ "url": "about:blank" }))?;
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let attached = browser.command("Target.attachToTarget", &attach)?;
        browser.session = Some(attached["sessionId"].as_str().ok_or("no session")?.to_owned());
        for domain in ["Page", "Runtime", "Log"] {
            browser.command(&format!("{domain}.enable"), &json!({}))?;
        }
        Ok(browser)
    }

    pub(crate) fn open(&mut self, url: &str) -> Done<()> {
        let answer = self.command("Page.navigate", &json!({ "url": url }))?;
        match answer["errorText"].as_str() {
            Some(error) => Err(format!("{url}: {error}").into()),
            None => self.wait_for("document.readyState === 'complete'").map(|_| ()),
        }
    }

    /// Value of an expression on the page.
    pub(crate) fn value(&mut self, expression: &str) -> Done<Value> {
        let evaluate =
            json!({ "expression": expression, "awaitPromise": true, "returnByValue": true });
        let answer = self.command("Runtime.evaluate", &evaluate)?;
        match answer.get("exceptionDetails") {
            Some(details) => Err(format!("{expression}: {details}").into()),
            None => Ok(answer["result"]["value"].clone()),
        }
    }

    /// Value of an expression, as soon as it is true or a text.
    pub(crate) fn wait_for(&mut self, expression: &str) -> Done<Value> {
        let until = Instant::now() + SHOW_TIME;
        loop {
            let value = self.value(expression);
            let is_right =
                |value: &Value| *value == true || value.as_str().is_some_and(|it| !it.is_empty());
            if value.as_ref().is_ok_and(is_right) {
                return value;
            }
            if Instant::now() > until {
                return Err(format!("{expression} is {value:?}").into());
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Takes a picture of the page.
    pub(crate) fn picture(&mut self, path: &Path) -> Done<()> {
        let [width, height] = WINDOW;
        let clip = json!({ "x": 0, "y": 0, "width": width, "height": height, "scale": 0.75 });
        let capture = json!({ "format": "png", "clip": clip });
        let answer = self.command("Page.captureScreenshot", &capture)?;
        let text = answer["data"].as_str().ok_or("no picture")?;
        Ok(fs::write(path, decoded(text))?)
    }

    fn command(&mut self, method: &str, params: &Value) -> Done<Value> {
        self.commands += 1;
        let id = self.commands;
        let mut message = json!({ "id": id, "method": method, "params": params });
        if let Some(session) = &self.session {
            message["sessionId"] = session.as_str().into();
        }
        let mut bytes = message.to_string().into_bytes();
        bytes.push(0);
        self.to.write_all(&bytes)?;
        loop {
            let mut bytes = Vec::new();
            if self.from.read_until(0, &mut bytes)? == 0 {
                return Err("the browser has ended".into());
            }
            bytes.pop();
            let mut message: Value = serde_json::from_slice(&bytes)?;
            self.note(&message);
            if message["id"] == id {
                return match message.get("error") {
                    Some(error) => Err(format!("{method}: {error}").into()),
                    None => Ok(message["result"].take()),
                };
            }
        }
    }

    /// Keeps errors.
    fn note(&mut self, event: &Value) {
        let params = &event["params"];
        let is_error = match event["method"].as_str() {
            Some("Runtime.exceptionThrown") => true,
            Some("Runtime.consoleAPICalled") => params["type"] == "error",
            Some("Log.entryAdded") => params["entry"]["level"] == "error",
            _ => false,
        };
        if is_error {
            self.errors.push(params.to_string());
        }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.command("Browser.close", &json!({}));
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Bytes of a text in base64.
fn decoded(text: &str) -> Vec<u8> {
    let six_bits = |letter: u8| match letter {
        b'A'..=b'Z' => Some(u32::from(letter - b'A')),
        b'a'..=b'z' => Some(u32::from(letter - b'a') + 26),
        b'0'..=b'9' => Some(u32::from(letter - b'0') + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let letters: Vec<_> = text.bytes().filter_map(six_bits).collect();
    let bytes = letters.chunks(4).flat_map(|chunk| {
        let word = chunk.iter().fold(0, |word, bits| word << 6 | bits);
        let word = word << (6 * (4 - chunk.len()));
        let [_, bytes @ ..] = word.to_be_bytes();
        bytes.into_iter().take(chunk.len() * 6 / 8)
    });
    bytes.collect()
}

//! The back end of a vhost-user device is missing, is refused, goes and comes back: told when it happens, and counted.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::WorkDir;

/// `VHOST_USER_GET_FEATURES`, `GET_VRING_BASE`, and the flags of an answer: version 1, a reply.
const GET_FEATURES: u32 = 1;
const GET_VRING_BASE: u32 = 11;
const ANSWER: u32 = 5;

/// Time after which a run counts as hanging.
const PATIENCE: Duration = Duration::from_secs(60);

/// `VIRTIO_F_VERSION_1`.
const FEATURES: u64 = 1 << 32;

/// A back end that does what a session takes, and no more. It connects anew until it goes: on a machine without time, a
/// session may end before its answers come.
struct BackEnd {
    /// Connection, until the back end goes.
    stream: Arc<Mutex<Option<UnixStream>>>,
    answers: JoinHandle<()>,
}

impl BackEnd {
    fn connect(path: &Path) -> Self {
        Self::offering(path, FEATURES)
    }

    fn offering(path: &Path, features: u64) -> Self {
        let stream = Arc::new(Mutex::new(Some(connect(path))));
        let (current, path) = (Arc::clone(&stream), path.to_owned());
        let answers = thread::spawn(move || {
            let mut answering = clone_of(&current);
            while let Some(stream) = &mut answering {
                while answer(stream, features).is_ok() {}
                if let Some(stream) = &mut *current.lock().unwrap() {
                    *stream = connect(&path);
                }
                answering = clone_of(&current);
            }
        });
        Self { stream, answers }
    }

    fn go(self) {
        let stream = self.stream.lock().unwrap().take().unwrap();
        // The program may have closed it already.
        let _ = stream.shutdown(Shutdown::Both);
        self.answers.join().unwrap();
    }
}

fn connect(path: &Path) -> UnixStream {
    loop {
        match UnixStream::connect(path) {
            Ok(stream) => break stream,
            Err(_) => thread::sleep(Duration::from_millis(5)),
        }
    }
}

fn clone_of(stream: &Mutex<Option<UnixStream>>) -> Option<UnixStream> {
    stream.lock().unwrap().as_ref().map(|stream| stream.try_clone().unwrap())
}

/// Reads a message, and answers it if it is a question.
fn answer(stream: &mut UnixStream, features: u64) -> std::io::Result<()> {
    let mut header = [0; 12];
    stream.read_exact(&mut header)?;
    let word = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().unwrap());
    let mut body = vec![0; usize::try_from(word(8)).unwrap()];
    stream.read_exact(&mut body)?;
    match word(0) {
        GET_FEATURES => body = features.to_ne_bytes().to_vec(),
        GET_VRING_BASE => {}
        _ => return Ok(()),
    }
    let len = u32::try_from(body.len()).unwrap();
    stream.write_all(&[word(0), ANSWER, len].map(u32::to_ne_bytes).concat())?;
    stream.write_all(&body)
}

/// A run of a vhost-user device, and its messages. Drop kills it.
struct Run {
    child: Child,
    messages: Box<dyn Iterator<Item = Value>>,
}

impl Run {
    fn start(dir: &WorkDir) -> Self {
        let args = "run vhost-user:v.sock --listen --cpus 1 --no-control --metrics 0 --log json";
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.args(args.split(' ')).current_dir(&dir.0).stdout(Stdio::null());
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let messages = lines.map(|line| serde_json::from_str(&line.unwrap()).unwrap());
        Self { child, messages: Box::new(messages) }
    }

    fn next_with(&mut self, field: &str) -> Value {
        self.messages.find(|message| !message[field].is_null()).unwrap()
    }

    /// Next message about the link, but those of a machine without time: that there was no back end yet
    /// when it was looked for, or that its answers came late.
    fn next_of_link(&mut self) -> Value {
        let is_of_link = |message: &Value| !message["link"].is_null();
        let is_early = |message: &Value| text(message).contains("no back end yet");
        let is_late = |message: &Value| text(message).contains("cannot set its back end up");
        let mut messages = self.messages.by_ref().filter(is_of_link);
        messages.find(|message| !is_early(message) && !is_late(message)).unwrap()
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn text(message: &Value) -> &str {
    message["message"].as_str().unwrap()
}

fn metrics(address: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET /metrics HTTP/1.0\r\nHost: {address}\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn ops_3_lost_back_end_is_told() {
    let dir = WorkDir::new();
    let mut run = Run::start(&dir);
    let address = run.next_with("address")["address"].as_str().unwrap().to_owned();
    for losses in 0..2 {
        let shows = |up: u8, losses: u32| {
            let lines = [
                format!("forebay_device_up{{device=\"v.sock\"}} {up}"),
                format!("forebay_carrier_losses_total{{device=\"v.sock\"}} {losses}"),
            ];
            // A text is sent again for a moment.
            let begun = Instant::now();
            while !lines.iter().all(|line| metrics(&address).contains(line)) {
                assert!(begun.elapsed() < PATIENCE, "{lines:?}: {}", metrics(&address));
                thread::sleep(Duration::from_millis(20));
            }
        };
        shows(0, losses);
        let back_end = BackEnd::connect(&dir.0.path().join("v.sock"));
        let told = run.next_of_link();
        assert_eq!((&told["level"], &told["link"]), (&"INFO".into(), &"running".into()));
        shows(1, losses);
        back_end.go();
        let told = run.next_of_link();
        assert_eq!((&told["level"], &told["link"]), (&"WARN".into(), &"no_carrier".into()));
        assert_eq!(told["device"], "v.sock");
        assert!(text(&told).contains("lost its back end"), "{told}");
        assert!(text(&told).ends_with("the back end closed the connection"), "{told}");
        shows(0, losses + 1);
    }
}

#[test]
fn ops_3_missing_back_end_is_told() {
    let dir = WorkDir::new();
    let mut run = Run::start(&dir);
    let mut is_warned = |words: [&str; 2]| {
        let is_told = |told: &Value| words.iter().all(|words| text(told).contains(words));
        let told = run.messages.find(is_told).unwrap();
        assert_eq!((&told["level"], &told["link"]), (&"WARN".into(), &"no_carrier".into()));
    };
    is_warned(["v.sock has no back end yet", "waiting for a back end at"]);
    let legacy = BackEnd::offering(&dir.0.path().join("v.sock"), 0);
    is_warned(["v.sock cannot set its back end up", "without VIRTIO_F_VERSION_1"]);
    legacy.go();
    let _current = BackEnd::connect(&dir.0.path().join("v.sock"));
    // The one that went may have done so in the middle of its setup.
    run.messages.find(|message| message["link"] == "running").unwrap();
}

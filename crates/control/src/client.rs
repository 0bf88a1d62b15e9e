//! Client end of the control socket, by which the program's commands ask a run. The process that listens
//! there need not be a run: what it sends has limits, and is never printed as it comes.

use std::fmt::Write as _;
use std::io::{self, ErrorKind, Read, Write};
use std::mem;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use forebay_sys::error::{Error, Result};
use forebay_sys::refused::Refused;
use forebay_sys::unix_peer::unix_peer;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::geteuid;

/// Maximum time to connect, and for one line of an answer; the run itself waits five seconds for its queues.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Interval between two looks at a run that does not answer.
const LOOK_PERIOD: Duration = Duration::from_secs(1);

/// Maximum time for a whole answer, a watch's excepted.
pub const WHOLE_ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// Maximum length of a line of an answer, in bytes.
pub const ANSWER_LINE_BYTES_MAX: usize = 1 << 20;

/// Maximum length of an answer, in bytes, each of its lines counted with [`ANSWER_LINE_COST_BYTES`] besides. The
/// largest are metrics with those of ten thousand sockets.
pub const ANSWER_BYTES_MAX: usize = 64 << 20;

/// Memory that a line takes besides its bytes.
const ANSWER_LINE_COST_BYTES: usize = 64;

/// Bytes that are read at once.
const READ_BYTES: usize = 64 << 10;

/// A connection to a run.
#[derive(Debug)]
pub struct ControlClient {
    path: PathBuf,
    stream: UnixStream,
    /// Bytes read: from `start` on less than a line, and what came with its end.
    read: Vec<u8>,
    /// Number of bytes of `read` that are taken.
    start: usize,
    /// Number of bytes of `read` that were searched for the end of a line.
    searched: usize,
    /// Maximum time for one line of an answer.
    timeout: Duration,
    /// True if an answer, or the rest of one, did not come in time.
    is_owed: bool,
}

/// A line of an answer.
enum AnswerLine {
    /// Part of the answer.
    Part(String),
    /// The answer is complete.
    Ok,
    /// A refusal.
    Refused(Refused),
    /// End of the stream: the run has ended, or has disconnected the client.
    Gone,
}

/// Time by which a line has to be complete.
#[derive(Clone, Copy)]
enum By {
    /// Absolute time.
    Time(Instant),
    /// [`ANSWER_TIMEOUT`] after its first bytes, which may come at any time.
    OnceBegun,
}

impl ControlClient {
    /// Connects to the run that listens at `path`.
    ///
    /// # Errors
    /// If none does, or this user may not connect; [`Error::Answer`] if it accepts nobody.
    pub fn connect(path: &Path) -> Result<Self> {
        Self::connect_within(path, ANSWER_TIMEOUT)
    }

    fn connect_within(path: &Path, timeout: Duration) -> Result<Self> {
        let unreachable = |source| match source {
            // A full queue of clients that it has not accepted.
            rustix::io::Errno::AGAIN => silent(path, timeout),
            source => Error::NoRun { path: path.to_owned(), source: source.into() },
        };
        let stream = reach(path, timeout).map_err(unreachable)?;
        let (path, read) = (path.to_owned(), Vec::new());
        Ok(Self { path, stream, read, start: 0, searched: 0, timeout, is_owed: false })
    }

    /// True if an answer did not come in time. The next request waits for its end first, so that the
    /// connection remains of use once the run answers again.
    #[must_use]
    pub fn is_answer_owed(&self) -> bool {
        self.is_owed
    }

    /// True if the run belongs to the calling user: file paths from another user's run are not
    /// trusted.
    #[must_use]
    pub fn is_own_run(&self) -> bool {
        unix_peer(&self.stream).is_ok_and(|run| run.user == geteuid().as_raw())
    }

    /// Sends a request, and returns the lines of the answer, with control characters escaped. See
    /// [`request`](super::request) for both.
    ///
    /// # Errors
    /// [`Error::Refused`] with the run's reason; [`Error::NoRun`] if the run has ended meanwhile;
    /// [`Error::Answer`] if the answer exceeds a limit, or is no text.
    pub fn ask(&mut self, request: &str) -> Result<Vec<String>> {
        let lines = self.answer(request)?;
        Ok(lines.into_iter().map(without_controls).collect())
    }

    /// Asks for the path of the run's config file, as it is: not to be printed.
    ///
    /// # Errors
    /// As [`ask`](Self::ask).
    pub fn config(&mut self) -> Result<PathBuf> {
        Ok(self.answer("config")?.concat().into())
    }

    fn answer(&mut self, request: &str) -> Result<Vec<String>> {
        if mem::take(&mut self.is_owed) {
            match self.rest_of_answer() {
                Ok(_) | Err(Error::Refused(_)) => {}
                Err(error) => return Err(error),
            }
        }
        self.send(request)?;
        self.rest_of_answer()
    }

    fn rest_of_answer(&mut self) -> Result<Vec<String>> {
        let until = Instant::now() + WHOLE_ANSWER_TIMEOUT;
        let (mut lines, mut len_bytes) = (Vec::new(), 0);
        loop {
            match self.line(By::Time(until.min(Instant::now() + self.timeout)))? {
                AnswerLine::Part(line) => {
                    len_bytes += line.len() + ANSWER_LINE_COST_BYTES;
                    if len_bytes > ANSWER_BYTES_MAX {
                        let limit = ANSWER_BYTES_MAX >> 20;
                        return Err(self.wrong(format!("it is longer than {limit} MiB")));
                    }
                    lines.push(line);
                }
                AnswerLine::Ok => return Ok(lines),
                AnswerLine::Refused(refused) => return Err(Error::Refused(refused)),
                AnswerLine::Gone => return Err(self.lost(ErrorKind::UnexpectedEof.into())),
            }
        }
    }

    /// Sends a request, and passes every line of the answer to `see` as it comes, with control characters
    /// escaped, until the run ends or `see` returns [`Enough::Yes`].
    ///
    /// # Errors
    /// As [`ask`](Self::ask), except that the end of the run is none.
    pub fn watch(mut self, request: &str, mut see: impl FnMut(&str) -> Enough) -> Result<()> {
        self.send(request)?;
        // The values of now come at once; then a watch may be silent for a long time.
        let mut by = By::Time(Instant::now() + ANSWER_TIMEOUT);
        loop {
            match self.line(by)? {
                AnswerLine::Part(line) => {
                    if see(&without_controls(line)) == Enough::Yes {
                        return Ok(());
                    }
                }
                AnswerLine::Ok | AnswerLine::Gone => return Ok(()),
                AnswerLine::Refused(refused) => return Err(Error::Refused(refused)),
            }
            by = By::OnceBegun;
        }
    }

    fn send(&mut self, request: &str) -> Result<()> {
        let request = request.strip_suffix('\n').unwrap_or(request);
        if request.contains('\n') {
            return Err(Error::Setting {
                what: "request",
                value: request.to_owned(),
                why: "it has only one line".to_owned(),
            });
        }
        let sent = (&self.stream).write_all(format!("{request}\n").as_bytes());
        match sent {
            // The run disconnected the client before it could ask: the answer has the reason.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
            Err(error) if is_timeout(&error) => Err(silent(&self.path, ANSWER_TIMEOUT)),
            sent => sent.map_err(|source| self.lost(source)),
        }
    }

    fn line(&mut self, by: By) -> Result<AnswerLine> {
        let mut until = match by {
            By::Time(until) => Some(until),
            By::OnceBegun => None,
        };
        loop {
            let fresh = &self.read[self.searched..];
            let end = fresh.iter().position(|byte| *byte == b'\n').map(|end| self.searched + end);
            if end.unwrap_or(self.read.len()) - self.start > ANSWER_LINE_BYTES_MAX {
                let limit = ANSWER_LINE_BYTES_MAX >> 10;
                return Err(self.wrong(format!("a line is longer than {limit} KiB")));
            }
            if let Some(end) = end {
                return self.take(end);
            }
            self.searched = self.read.len();
            if self.read.len() > self.start {
                until = until.or_else(|| Some(Instant::now() + ANSWER_TIMEOUT));
            }
            if self.read_more(until)? == 0 {
                return Ok(AnswerLine::Gone);
            }
        }
    }

    /// Takes the line that ends at `end` of the bytes read.
    fn take(&mut self, end: usize) -> Result<AnswerLine> {
        let line = String::from_utf8(self.read[self.start..end].to_vec());
        (self.start, self.searched) = (end + 1, end + 1);
        let line = line.map_err(|error| {
            let valid = error.utf8_error().valid_up_to();
            let byte = error.as_bytes().get(valid).copied().unwrap_or_default();
            self.wrong(format!("byte {valid} of a line, {byte:#04x}, is not UTF-8"))
        })?;
        Ok(match line.strip_prefix("error ").map(Refused::from_line) {
            _ if line == "ok" => AnswerLine::Ok,
            Some(Some(Refused { errno, why })) => {
                AnswerLine::Refused(Refused::new(errno, without_controls(why)))
            }
            _ => AnswerLine::Part(line),
        })
    }

    /// Reads what there is, once there is something, and returns the number of bytes; 0 at the end.
    fn read_more(&mut self, until: Option<Instant>) -> Result<usize> {
        self.read.drain(..self.start);
        self.searched -= self.start;
        self.start = 0;
        let mut bytes = vec![0; READ_BYTES];
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                self.is_owed = true;
                return Err(silent(&self.path, self.timeout));
            }
            let set = self.stream.set_read_timeout(left.map(|left| left.min(LOOK_PERIOD)));
            match set.and_then(|()| (&self.stream).read(&mut bytes)) {
                Ok(count) => {
                    self.read.extend(&bytes[..count]);
                    return Ok(count);
                }
                Err(error) if is_timeout(&error) => self.refuse_stopped()?,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(self.lost(error)),
            }
        }
    }

    /// Refuses to wait for a process that is stopped: it answers nobody until it is continued.
    fn refuse_stopped(&mut self) -> Result<()> {
        match unix_peer(&self.stream) {
            Ok(run) if run.is_stopped() => {
                self.is_owed = true;
                let process = run.process.map_or(0, |process| process.as_raw_nonzero().get());
                Err(self.wrong(format!("process {process} is stopped (kill -CONT {process})")))
            }
            _ => Ok(()),
        }
    }

    fn lost(&self, source: io::Error) -> Error {
        Error::NoRun { path: self.path.clone(), source }
    }

    fn wrong(&self, problem: String) -> Error {
        Error::Answer { path: self.path.clone(), problem }
    }
}

/// Connects to a socket; `EAGAIN` if a process listens there that has not accepted others in this time.
pub(super) fn reach(path: &Path, timeout: Duration) -> rustix::io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let (family, flags) = (AddressFamily::UNIX, SocketFlags::CLOEXEC);
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    // It bounds `connect`, too.
    set_socket_timeout(&socket, Timeout::Send, Some(timeout))?;
    rustix::net::connect(&socket, &address)?;
    let stream = UnixStream::from(socket);
    set_socket_timeout(&stream, Timeout::Send, Some(ANSWER_TIMEOUT))?;
    Ok(stream)
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

fn silent(path: &Path, after: Duration) -> Error {
    let problem = format!("none came within {after:?}");
    Error::Answer { path: path.to_owned(), problem }
}

/// Text with control characters escaped, but for the tabs between the columns of a list: a terminal would obey
/// them.
fn without_controls(line: String) -> String {
    let is_escaped = |char: char| char.is_control() && char != '\t';
    if !line.contains(is_escaped) {
        return line;
    }
    line.chars().fold(String::new(), |mut shown, char| {
        // Writing to a string does not fail.
        let _ = match is_escaped(char) {
            true => write!(shown, "{}", char.escape_default()),
            false => write!(shown, "{char}"),
        };
        shown
    })
}

/// Decision of a watcher after each line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Enough {
    /// Stop watching.
    Yes,
    /// Continue watching.
    No,
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::thread;

    use super::*;

    /// A process that answers a request with these bytes, and then with `more` for as long as there is a
    /// client.
    struct FakeRun {
        dir: tempfile::TempDir,
    }

    impl FakeRun {
        fn answers(first: &'static [u8], more: &'static [u8]) -> Self {
            let dir = tempfile::tempdir().unwrap();
            let listener = UnixListener::bind(dir.path().join("s")).unwrap();
            thread::spawn(move || {
                for client in listener.incoming() {
                    let mut client = client.unwrap();
                    thread::spawn(move || {
                        let _ = client.read(&mut [0; 4096]).unwrap();
                        client.write_all(first).unwrap();
                        while !more.is_empty() && client.write_all(more).is_ok() {}
                    });
                }
            });
            Self { dir }
        }

        fn client(&self) -> ControlClient {
            ControlClient::connect(&self.dir.path().join("s")).unwrap()
        }
    }

    fn problem<T>(answer: Result<T>) -> String {
        match answer {
            Err(Error::Answer { problem, .. }) => problem,
            Err(other) => panic!("{other}"),
            Ok(_) => panic!("it was answered"),
        }
    }

    #[test]
    fn promise_5_endless_line_is_refused() {
        let run = FakeRun::answers(b"", &[b'x'; 4096]);
        let mut client = run.client();
        assert_eq!(problem(client.ask("list")), "a line is longer than 1024 KiB");
        assert!(client.read.capacity() < 4 * ANSWER_LINE_BYTES_MAX, "{}", client.read.capacity());
        let watched = run.client().watch("watch", |line| panic!("{line}"));
        assert_eq!(problem(watched), "a line is longer than 1024 KiB");
    }

    #[test]
    fn promise_5_endless_answer_is_refused() {
        let lines: &[u8] = b"a b\n\n".repeat(1000).leak();
        assert_eq!(
            problem(FakeRun::answers(b"", lines).client().ask("get a")),
            "it is longer than 64 MiB"
        );
    }

    #[test]
    fn promise_5_answers_hold_no_controls() {
        let run = FakeRun::answers("\x1b[2J\u{9b}1m\x07 3\t4é\nok\n".as_bytes(), b"");
        let shown = "\\u{1b}[2J\\u{9b}1m\\u{7} 3\t4é";
        assert_eq!(run.client().ask("get a").unwrap(), [shown]);
        let mut seen = Vec::new();
        let watched = run.client().watch("watch", |line| {
            seen.push(line.to_owned());
            Enough::No
        });
        watched.unwrap();
        assert_eq!(seen, [shown]);
        let refused = FakeRun::answers(b"error EINVAL: \x1b]0;x\x07\n", b"").client().ask("get a");
        assert!(
            matches!(&refused, Err(Error::Refused(Refused { why, .. })) if why == "\\u{1b}]0;x\\u{7}"),
            "{refused:?}"
        );
    }

    #[test]
    fn promise_5_bytes_are_told_by_name() {
        let run = FakeRun::answers(b"ab\xff\nok\n", b"");
        assert_eq!(problem(run.client().ask("get a")), "byte 2 of a line, 0xff, is not UTF-8");
    }

    #[test]
    fn promise_3_silence_ends_a_wait() {
        let run = FakeRun::answers(b"3\no", b"");
        let mut client = run.client();
        client.send("get a").unwrap();
        let by = By::Time(Instant::now() + Duration::from_millis(50));
        assert!(matches!(client.line(by), Ok(AnswerLine::Part(line)) if line == "3"));
        let past = By::Time(Instant::now());
        assert_eq!(problem(client.line(past)), "none came within 10s");
    }

    /// An answer that comes late is not taken for that to the next request.
    #[test]
    fn promise_3_late_answer_is_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let timeout = Duration::from_millis(20);
        let mut client = ControlClient::connect_within(&path, timeout).unwrap();
        let (mut run, _) = listener.accept().unwrap();
        run.write_all(b"1\n").unwrap();
        assert_eq!(problem(client.ask("get a")), "none came within 20ms");
        assert_eq!(problem(client.ask("get b")), "none came within 20ms");
        assert!(client.is_answer_owed());
        client.timeout = ANSWER_TIMEOUT;
        run.write_all(b"error EBUSY: late\n3\nok\n").unwrap();
        assert_eq!(client.ask("get c").unwrap(), ["3"]);
        assert!(!client.is_answer_owed());
        let mut asked = [0; 64];
        let count = run.read(&mut asked).unwrap();
        assert_eq!(&asked[..count], b"get a\nget c\n");
    }

    #[test]
    fn promise_3_unaccepted_client_gives_up() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&socket, 0).unwrap();
        let _accepted_later = ControlClient::connect(&path).unwrap();
        let timeout = Duration::from_millis(20);
        let second = ControlClient::connect_within(&path, timeout);
        assert_eq!(problem(second), "none came within 20ms");
    }
}

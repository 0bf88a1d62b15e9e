//! Session of one client of the control socket: its requests, and their answers.

use std::fmt;
use std::io::{self, ErrorKind};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use forebay_rx::CpuId;
use forebay_sys::errno::Errno;
use forebay_sys::error::quoted;
use forebay_sys::hidden::Hidden;
use forebay_sys::refused::{Refused, Written};

use super::clients::ClientSlot;
use super::explain::explain;
use super::handle::Control;
use super::list::list;
use super::names::{self, Names};
use super::request::{LINE_BYTES_MAX, Request};
use super::socket::send_all;

/// Time for which a client may leave an answer unread, once the kernel's socket buffer is full.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// Time between two polls of a watch.
const WATCH_PERIOD: Duration = Duration::from_millis(20);

/// Text of a run's metrics, made at the time of the call.
pub(super) type MetricsText = Box<dyn Fn() -> String + Send + Sync>;

/// State that answers are made from.
pub(super) struct SessionContext {
    pub(super) control: Control,
    /// Path of the config file that the run was started with.
    pub(super) config: Option<PathBuf>,
    pub(super) metrics: Option<MetricsText>,
}

impl fmt::Debug for SessionContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SessionContext").field(&self.control).finish()
    }
}

/// A client and its requests.
#[derive(Debug)]
pub(super) struct ControlSession<'a> {
    context: &'a SessionContext,
    slot: ClientSlot,
    lines: Lines,
}

impl<'a> ControlSession<'a> {
    pub(super) fn new(
        context: &'a SessionContext,
        slot: ClientSlot,
        stream: Hidden<UnixStream>,
    ) -> Self {
        Self { context, slot, lines: Lines { stream, read: Vec::new(), has_ended: false } }
    }

    /// Answers one line after another until the client disconnects, or is disconnected.
    ///
    /// # Errors
    /// If reading or writing fails.
    pub(super) fn serve(mut self) -> io::Result<()> {
        self.lines.stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
        loop {
            while !self.lines.wait(None)? {}
            self.slot.heard();
            let answered = match self.lines.take() {
                HeardLine::Line(line) => match Request::parse(&line) {
                    Ok(Request::Watch(knob)) => self.watch(knob.as_deref())?,
                    Ok(request) => self.context.answer(&request),
                    Err(refused) => Err(refused),
                },
                HeardLine::Noise => Err(invalid("a request is text in UTF-8".to_owned())),
                // The client is disconnected: the rest of its line would be read as a request.
                HeardLine::TooLong => {
                    let why = format!("a request has at most {LINE_BYTES_MAX} bytes");
                    return self.lines.send(Err(invalid(why)));
                }
                HeardLine::Gone => return Ok(()),
            };
            self.lines.send(answered)?;
            self.slot.heard();
        }
    }

    /// Sends the values of the knobs, and every new value, until a line comes or the client
    /// disconnects.
    fn watch(&mut self, knob: Option<&str>) -> io::Result<SessionAnswer> {
        let paths = match self.context.watched(knob) {
            Ok(paths) => paths,
            Err(refused) => return Ok(Err(refused)),
        };
        let Some(_watching) = self.slot.watch() else {
            let why = "too many clients are watching; end one of them, then try again";
            return Ok(Err(Refused::new(Errno::Busy, why)));
        };
        let names = Names::in_run(&self.context.control);
        let mut known = vec![None; paths.len()];
        let mut settings = None;
        loop {
            let mut text = String::new();
            // Comparing all settings once costs much less than reading each knob.
            let now = knob.is_none().then(|| self.context.control.settings());
            if now.is_none() || now != settings {
                for (path, known) in paths.iter().zip(&mut known) {
                    let value = self.context.value(path).ok();
                    if let Some(value) = &value
                        && known.as_ref() != Some(value)
                    {
                        text += &format!("{} {value}\n", names.short(path));
                    }
                    *known = value;
                }
                settings = now;
            }
            send_all(&self.lines.stream, text.as_bytes())?;
            if self.lines.wait(Some(WATCH_PERIOD))? {
                return Ok(Ok(Vec::new()));
            }
        }
    }
}

/// Lines before `ok`, or the refusal in its place.
type SessionAnswer = Result<Vec<String>, Refused>;

impl SessionContext {
    fn answer(&self, request: &Request) -> SessionAnswer {
        match request {
            Request::Get(knob) => self.get(knob),
            Request::Set { knob, value } => self.control.set_and_report(knob, value),
            Request::List => Ok(list(&self.control).iter().map(ToString::to_string).collect()),
            Request::Explain { flow, json } => {
                let explanation = explain(&self.control, flow)?;
                let text = if *json {
                    explanation.document().to_string()
                } else {
                    explanation.to_string()
                };
                Ok(text.lines().map(str::to_owned).collect())
            }
            Request::Flows => {
                Ok(self.control.top_flows()?.iter().map(ToString::to_string).collect())
            }
            Request::RfsDesired(flow, cpu) => self
                .control
                .rfs_desired(*flow, *cpu)
                .map(|written| notes_on(&self.control, &written)),
            Request::Pause(cpu) => self.command(*cpu, Control::pause),
            Request::Resume(cpu) => self.command(*cpu, Control::resume),
            Request::Kill(cpu) => self.command(*cpu, Control::kill),
            Request::Config => match &self.config {
                Some(path) => told_path(path),
                None => Err(Refused::new(Errno::NoEnt, "the run was started without --config")),
            },
            Request::Metrics => match &self.metrics {
                Some(text) => Ok(text().lines().map(str::to_owned).collect()),
                None => {
                    Err(Refused::new(Errno::NoEnt, "the program gives no metrics to this socket"))
                }
            },
            Request::Watch(_) => Ok(Vec::new()), // handled by the session
        }
    }

    fn get(&self, knob: &str) -> SessionAnswer {
        let paths = names::find(&self.control, knob)?;
        if let [path] = &paths[..] {
            return Ok(self.read(path)?.lines().map(str::to_owned).collect());
        }
        let names = Names::in_run(&self.control);
        let named = |path: &String| Ok(format!("{} {}", names.short(path), self.value(path)?));
        paths.iter().map(named).collect()
    }

    fn command(
        &self,
        cpu: CpuId,
        command: impl Fn(&Control, CpuId) -> Result<(), Refused>,
    ) -> SessionAnswer {
        command(&self.control, cpu).map(|()| Vec::new())
    }

    fn watched(&self, knob: Option<&str>) -> Result<Vec<String>, Refused> {
        match knob {
            Some(knob) => {
                let paths = names::find(&self.control, knob)?;
                // One that cannot be read would be watched in vain.
                paths.iter().try_for_each(|path| self.read(path).map(drop))?;
                Ok(paths)
            }
            None => Ok(names::knobs(&self.control)),
        }
    }

    fn read(&self, path: &str) -> Result<String, Refused> {
        let read = self.control.read(path);
        read.map_err(|errno| Refused::new(errno, format!("{path} cannot be read")))
    }

    fn value(&self, path: &str) -> Result<String, Refused> {
        value_of(&self.control, path)
    }
}

impl Control {
    /// Writes a knob as [`set`](Self::set) does, and returns the lines that answer the request `set`
    /// of the control socket.
    ///
    /// # Errors
    /// As `set`.
    pub fn set_and_report(&self, knob: &str, value: &str) -> Result<Vec<String>, Refused> {
        let mut lines = Vec::new();
        let names = Names::in_run(self);
        let paths = names::find_for_writing(self, knob)?;
        for (index, path) in paths.iter().enumerate() {
            let name = names.short(path);
            let written = self.echo(path, value).map_err(|Refused { errno, why }| {
                let why = format!("{name} cannot be {}: {why}", quoted(value));
                let refused = Refused::new(errno, why);
                names.after(refused, &paths[..index])
            })?;
            if let Ok(value) = value_of(self, path) {
                lines.push(format!("now {name} {value}"));
            }
            let notes = notes_on(self, &written);
            let further = notes.into_iter().filter(|line| !lines.contains(line));
            let further: Vec<_> = further.collect();
            lines.extend(further);
        }
        Ok(lines)
    }
}

/// Path as the line of an answer. Another one in its place would be written to.
fn told_path(path: &Path) -> SessionAnswer {
    match path.to_str() {
        Some(text) if !text.contains('\n') => Ok(vec![text.to_owned()]),
        _ => Err(invalid(format!("the path of the config file, {path:?}, is not a line of UTF-8"))),
    }
}

/// Text of a file, as one line.
fn value_of(control: &Control, path: &str) -> Result<String, Refused> {
    let text = control.read(path);
    let text = text.map_err(|errno| Refused::new(errno, format!("{path} cannot be read")))?;
    Ok(text.trim_end().replace('\n', " "))
}

/// Notes on the part of a write that is not in force as requested.
pub(super) fn notes_on(control: &Control, written: &Written) -> Vec<String> {
    let Written { in_effect, ignored, .. } = written;
    let in_effect = (!in_effect.is_empty()).then(|| format!("in effect: {in_effect}"));
    let ignored = (!ignored.is_empty()).then(|| {
        let running = control.settings().cpus;
        format!("ignored {ignored}: not among the CPUs that run ({running})")
    });
    in_effect.into_iter().chain(ignored).collect()
}

fn invalid(why: String) -> Refused {
    Refused::new(Errno::Inval, why)
}

/// Input of a client, line by line.
#[derive(Debug)]
struct Lines {
    stream: Hidden<UnixStream>,
    /// Bytes read and not taken: at most a line and the bytes that came with its end.
    read: Vec<u8>,
    has_ended: bool,
}

/// Next part of the input.
#[derive(PartialEq, Eq, Debug)]
enum HeardLine {
    /// A line, without its end.
    Line(String),
    /// A line that is not UTF-8.
    Noise,
    /// More bytes than a line may have.
    TooLong,
    /// End of the input; an unfinished line is not a request.
    Gone,
}

impl Lines {
    /// Waits for at most `timeout`, and returns true if there is something to take.
    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<bool> {
        if self.is_ready() {
            return Ok(true);
        }
        self.stream.set_read_timeout(timeout)?;
        let mut bytes = [0; LINE_BYTES_MAX];
        match rustix::io::read(&self.stream, &mut bytes).map_err(io::Error::from) {
            Ok(0) => self.has_ended = true,
            Ok(count) => self.read.extend(&bytes[..count]),
            Err(error) if is_patience(error.kind()) => {}
            Err(error) => return Err(error),
        }
        Ok(self.is_ready())
    }

    fn is_ready(&self) -> bool {
        self.has_ended || self.read.len() >= LINE_BYTES_MAX || self.read.contains(&b'\n')
    }

    fn take(&mut self) -> HeardLine {
        match self.read.iter().position(|byte| *byte == b'\n') {
            Some(end) if end < LINE_BYTES_MAX => {
                let rest = self.read.split_off(end + 1);
                let mut line = std::mem::replace(&mut self.read, rest);
                line.truncate(end);
                String::from_utf8(line).map_or(HeardLine::Noise, HeardLine::Line)
            }
            None if self.read.len() < LINE_BYTES_MAX => HeardLine::Gone,
            _ => HeardLine::TooLong,
        }
    }

    fn send(&mut self, answer: SessionAnswer) -> io::Result<()> {
        let mut text = String::new();
        match answer {
            Ok(lines) => {
                lines.iter().for_each(|line| text += &format!("{line}\n"));
                text += "ok\n";
            }
            Err(refused) => text = format!("error {refused}\n"),
        }
        send_all(&self.stream, text.as_bytes())
    }
}

fn is_patience(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn lines() -> (UnixStream, Lines) {
        let (client, stream) = UnixStream::pair().unwrap();
        (client, Lines { stream: Hidden::new(stream).unwrap(), read: Vec::new(), has_ended: false })
    }

    /// All parts that a session hears of a client's bytes.
    fn heard(written: &[u8]) -> Vec<HeardLine> {
        let (mut client, mut lines) = lines();
        let writer = std::thread::spawn({
            let written = written.to_vec();
            move || {
                // In small pieces. Writing fails once the session has heard enough.
                let _ = written.chunks(7).try_for_each(|piece| client.write_all(piece));
            }
        });
        let mut heard = Vec::new();
        while !matches!(heard.last(), Some(HeardLine::Gone | HeardLine::TooLong)) {
            while !lines.wait(None).unwrap() {}
            heard.push(lines.take());
        }
        drop(lines);
        writer.join().unwrap();
        heard
    }

    #[test]
    fn promise_5_partial_lines_are_noise() {
        let line = |text: &str| HeardLine::Line(text.to_owned());
        assert_eq!(heard(b""), [HeardLine::Gone]);
        assert_eq!(heard(b"get a\n\r\nset b 1"), [line("get a"), line("\r"), HeardLine::Gone]);
        assert_eq!(heard(b"\xff\xfe\nlist\n"), [HeardLine::Noise, line("list"), HeardLine::Gone]);
    }

    #[test]
    fn promise_3_line_length_is_bounded() {
        let of_len = |len_bytes: usize| [vec![b'x'; len_bytes - 1], vec![b'\n']].concat();
        let longest = "x".repeat(LINE_BYTES_MAX - 1);
        assert_eq!(heard(&of_len(LINE_BYTES_MAX)), [HeardLine::Line(longest), HeardLine::Gone]);
        assert_eq!(heard(&of_len(LINE_BYTES_MAX + 1)), [HeardLine::TooLong]);
        assert_eq!(heard(&vec![b'x'; 10 * LINE_BYTES_MAX]), [HeardLine::TooLong]);
    }

    #[test]
    fn promise_8_untellable_path_is_refused() {
        use std::ffi::OsStr;
        use std::os::unix::ffi::OsStrExt;

        let told = |path: &[u8]| told_path(Path::new(OsStr::from_bytes(path)));
        assert_eq!(told("/etc/fé b.toml".as_bytes()), Ok(vec!["/etc/fé b.toml".to_owned()]));
        for (path, shown) in [(&b"/etc/a\nb"[..], "/etc/a\\nb"), (b"/etc/a\xff", "/etc/a\\xFF")] {
            let Refused { errno, why } = told(path).unwrap_err();
            assert_eq!(errno, Errno::Inval);
            assert!(why.contains(shown), "{why}");
        }
    }

    #[test]
    fn silence_is_no_line() {
        let (mut client, mut lines) = lines();
        assert!(!lines.wait(Some(Duration::from_millis(1))).unwrap());
        client.write_all(b"ge").unwrap();
        assert!(!lines.wait(Some(Duration::from_millis(1))).unwrap());
        client.write_all(b"t a\n").unwrap();
        assert!(lines.wait(None).unwrap());
        assert_eq!(lines.take(), HeardLine::Line("get a".to_owned()));
    }
}

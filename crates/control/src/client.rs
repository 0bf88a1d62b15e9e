//! The other end of the control socket: what the program's commands ask a run with.

use std::io::{self, BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use forebay_sys::error::{Error, Result};
use forebay_sys::refused::Refused;
use rustix::net::sockopt::socket_peercred;
use rustix::process::geteuid;

/// Time that a run has for a line of its answer: it waits a second for its queues itself.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// A connection to a run.
#[derive(Debug)]
pub struct ControlClient {
    path: PathBuf,
    stream: BufReader<UnixStream>,
}

/// A line of an answer.
enum AnswerLine {
    /// Part of the answer.
    Part(String),
    /// The answer is complete.
    Ok,
    /// Refusal.
    Refused(Refused),
    /// The run has ended, or sent the client away.
    Gone,
}

impl ControlClient {
    /// Connects to the run that listens at `path`.
    ///
    /// # Errors
    /// When none does, or it may not be asked.
    pub fn connect(path: &Path) -> Result<Self> {
        let unreachable = |source| Error::NoRun { path: path.to_owned(), source };
        let stream = UnixStream::connect(path).map_err(unreachable)?;
        stream.set_read_timeout(Some(ANSWER_TIMEOUT)).map_err(unreachable)?;
        stream.set_write_timeout(Some(ANSWER_TIMEOUT)).map_err(unreachable)?;
        Ok(Self { path: path.to_owned(), stream: BufReader::new(stream) })
    }

    /// True if the run is of the user who asks: what another's says is not to be trusted with files.
    #[must_use]
    pub fn is_own_run(&self) -> bool {
        let run = socket_peercred(self.stream.get_ref());
        run.is_ok_and(|run| run.uid == geteuid())
    }

    /// Asks, and returns the lines of the answer. See [`request`](super::request) for both.
    ///
    /// # Errors
    /// [`Error::Refused`] with what the run says; when the run has ended meanwhile.
    pub fn ask(&mut self, request: &str) -> Result<Vec<String>> {
        self.send(request)?;
        let mut lines = Vec::new();
        loop {
            match self.line().map_err(|source| self.lost(source))? {
                AnswerLine::Part(line) => lines.push(line),
                AnswerLine::Ok => return Ok(lines),
                AnswerLine::Refused(refused) => return Err(Error::Refused(refused)),
                AnswerLine::Gone => return Err(self.lost(ErrorKind::UnexpectedEof.into())),
            }
        }
    }

    /// Asks, and gives every line of the answer to `see` when it comes, until the run ends or `see`
    /// has enough.
    ///
    /// # Errors
    /// As [`ask`](Self::ask), but for the end of the run.
    pub fn watch(mut self, request: &str, mut see: impl FnMut(&str) -> Enough) -> Result<()> {
        self.send(request)?;
        // Nothing may change for a long time.
        self.stream.get_ref().set_read_timeout(None).map_err(|source| self.lost(source))?;
        loop {
            match self.line().map_err(|source| self.lost(source))? {
                AnswerLine::Part(line) if see(&line) == Enough::No => {}
                AnswerLine::Part(_) | AnswerLine::Ok | AnswerLine::Gone => return Ok(()),
                AnswerLine::Refused(refused) => return Err(Error::Refused(refused)),
            }
        }
    }

    fn send(&mut self, request: &str) -> Result<()> {
        let request = request.strip_suffix('\n').unwrap_or(request);
        if request.contains('\n') {
            return Err(Error::Setting {
                what: "a request",
                value: request.to_owned(),
                why: "it has only one line".to_owned(),
            });
        }
        let sent = self.stream.get_ref().write_all(format!("{request}\n").as_bytes());
        match sent {
            // It was turned away before it could ask: the answer says why.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
            sent => sent.map_err(|source| self.lost(source)),
        }
    }

    fn line(&mut self) -> io::Result<AnswerLine> {
        let mut line = String::new();
        if self.stream.read_line(&mut line)? == 0 {
            return Ok(AnswerLine::Gone);
        }
        let line = line.trim_end_matches('\n');
        Ok(match line.strip_prefix("error ").map(Refused::from_line) {
            _ if line == "ok" => AnswerLine::Ok,
            Some(Some(refused)) => AnswerLine::Refused(refused),
            _ => AnswerLine::Part(line.to_owned()),
        })
    }

    fn lost(&self, source: io::Error) -> Error {
        Error::NoRun { path: self.path.clone(), source }
    }
}

/// Wish of somebody who watches to go on or not.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Enough {
    /// Enough was seen.
    Yes,
    /// More is to come.
    No,
}

//! Client end of the control socket, by which the program's commands ask a run.

use std::io::{self, BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use forebay_sys::error::{Error, Result};
use forebay_sys::refused::Refused;
use rustix::net::sockopt::socket_peercred;
use rustix::process::geteuid;

/// Timeout for one line of an answer; the run itself waits a second for its queues.
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
    /// A refusal.
    Refused(Refused),
    /// End of the stream: the run has ended, or has disconnected the client.
    Gone,
}

impl ControlClient {
    /// Connects to the run that listens at `path`.
    ///
    /// # Errors
    /// If none does, or this user may not connect.
    pub fn connect(path: &Path) -> Result<Self> {
        let unreachable = |source| Error::NoRun { path: path.to_owned(), source };
        let stream = UnixStream::connect(path).map_err(unreachable)?;
        stream.set_read_timeout(Some(ANSWER_TIMEOUT)).map_err(unreachable)?;
        stream.set_write_timeout(Some(ANSWER_TIMEOUT)).map_err(unreachable)?;
        Ok(Self { path: path.to_owned(), stream: BufReader::new(stream) })
    }

    /// True if the run belongs to the calling user: file paths from another user's run are not
    /// trusted.
    #[must_use]
    pub fn is_own_run(&self) -> bool {
        let run = socket_peercred(self.stream.get_ref());
        run.is_ok_and(|run| run.uid == geteuid())
    }

    /// Sends a request, and returns the lines of the answer. See [`request`](super::request) for
    /// both.
    ///
    /// # Errors
    /// [`Error::Refused`] with the run's reason; [`Error::NoRun`] if the run has ended meanwhile.
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

    /// Sends a request, and passes every line of the answer to `see` as it comes, until the run
    /// ends or `see` returns [`Enough::Yes`].
    ///
    /// # Errors
    /// As [`ask`](Self::ask), except that the end of the run is none.
    pub fn watch(mut self, request: &str, mut see: impl FnMut(&str) -> Enough) -> Result<()> {
        self.send(request)?;
        // A watch may be silent for a long time.
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
            // The run disconnected the client before it could ask: the answer has the reason.
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

/// Decision of a watcher after each line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Enough {
    /// Stop watching.
    Yes,
    /// Continue watching.
    No,
}

//! Thread that asks the run: for samples at an interval, about the followed flow, for changes. The
//! screen never waits for it.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::time::{Duration, Instant};

use forebay_control::{ControlClient, FlowName};
use forebay_sys::Error;

use super::sample::{Masks, Sample};
use crate::failure::Failure;
use crate::ticker::spawn;

/// Interval between two looks for requests while there are no samples to take.
const IDLE_PERIOD: Duration = Duration::from_secs(3600);

/// Request to the thread.
#[derive(Debug)]
pub(super) enum Ask {
    /// Explain this flow with each sample, or none.
    Follow(Option<FlowName>),
    /// Set a knob: `KNOB=VALUE`.
    Set(String),
    /// Take no samples, or take them again.
    Pause(bool),
}

/// Answer of the thread.
#[derive(Debug)]
pub(super) enum Told {
    /// A sample.
    Sample(Sample),
    /// Lines about a flow.
    Flow(FlowName, Vec<String>),
    /// Answer to a change, or an error.
    Message(String),
    /// The run has ended.
    Ended,
}

/// Handle of the thread, which ends once this is dropped.
#[derive(Debug)]
pub(super) struct Sampler {
    asks: Sender<Ask>,
    told: Receiver<Told>,
}

impl Sampler {
    /// Starts to take samples.
    pub(super) fn start(link: Link, interval: Duration) -> Result<Self, Failure> {
        let (asks, asked) = mpsc::channel();
        let (to_screen, told) = mpsc::channel();
        spawn("takes samples of the run", move || {
            SamplerThread { link, interval, to_screen, flow: None }.serve(&asked);
        })?;
        Ok(Self { asks, told })
    }

    pub(super) fn ask(&self, ask: Ask) {
        // Ignored: the thread has ended if the run has, which it has told.
        let _ = self.asks.send(ask);
    }

    /// Next answer, if there is one.
    pub(super) fn next(&self) -> Option<Told> {
        match self.told.try_recv() {
            Ok(told) => Some(told),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => Some(Told::Ended),
        }
    }
}

/// Connection to a run, made again when it is lost.
#[derive(Debug)]
pub(super) struct Link {
    path: PathBuf,
    client: Option<ControlClient>,
    /// Number of connections that were made.
    connections: u64,
}

/// Reason for the absence of an answer.
#[derive(Debug)]
pub(super) enum NoAnswer {
    /// The run refused, or the connection was lost.
    Because(Error),
    /// Nobody listens any more.
    Ended(Error),
}

impl Link {
    /// Connects to the run that listens at `path`.
    pub(super) fn open(path: &Path) -> Result<Self, Failure> {
        let client = Some(ControlClient::connect(path)?);
        Ok(Self { path: path.to_owned(), client, connections: 1 })
    }

    /// Name of the run: that of its socket.
    pub(super) fn name(&self) -> String {
        self.path.file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned())
    }

    /// Metrics of the run.
    pub(super) fn sample(&mut self) -> Result<Sample, NoAnswer> {
        let masks = Masks::read(&self.ask("get rps_cpus")?);
        let lines = self.ask("metrics")?;
        let mut sample = Sample::read(Instant::now(), &lines, masks);
        // None while the run is too busy to answer.
        let flows = match self.ask("flows") {
            Err(NoAnswer::Because(Error::Refused(_))) => Vec::new(),
            flows => flows?,
        };
        sample.connection = self.connections;
        sample.flows = flows.iter().filter_map(|line| line.parse().ok()).collect();
        Ok(sample)
    }

    /// Sends a request. Another connection takes the place of one that is lost.
    pub(super) fn ask(&mut self, request: &str) -> Result<Vec<String>, NoAnswer> {
        let client = match &mut self.client {
            Some(client) => client,
            none => {
                let client = connect(&self.path)?;
                self.connections += 1;
                none.insert(client)
            }
        };
        let error = match client.ask(request) {
            Ok(lines) => return Ok(lines),
            Err(error) => error,
        };
        match &error {
            Error::NoRun { .. } => {
                self.client = None;
                self.client = Some(connect(&self.path)?);
                self.connections += 1;
            }
            // The rest of a wrong answer would be taken for the answer to the next request.
            Error::Answer { .. } if !client.is_answer_owed() => self.client = None,
            _ => {}
        }
        Err(NoAnswer::Because(error))
    }
}

fn connect(path: &Path) -> Result<ControlClient, NoAnswer> {
    ControlClient::connect(path).map_err(no_connection)
}

/// Reason for the absence of a connection: a run that has ended, or one that accepts nobody now.
fn no_connection(error: Error) -> NoAnswer {
    match &error {
        Error::NoRun { source, .. }
            if matches!(source.kind(), ErrorKind::ConnectionRefused | ErrorKind::NotFound) =>
        {
            NoAnswer::Ended(error)
        }
        _ => NoAnswer::Because(error),
    }
}

/// State of the thread.
struct SamplerThread {
    link: Link,
    interval: Duration,
    to_screen: Sender<Told>,
    flow: Option<FlowName>,
}

impl SamplerThread {
    fn serve(mut self, asked: &Receiver<Ask>) {
        let mut due = Some(Instant::now());
        loop {
            let wait = due.map_or(IDLE_PERIOD, |due| due.saturating_duration_since(Instant::now()));
            let done = match asked.recv_timeout(wait) {
                Ok(Ask::Follow(flow)) => {
                    self.flow = flow;
                    self.explain()
                }
                Ok(Ask::Set(setting)) => self.set(&setting),
                Ok(Ask::Pause(is_paused)) => {
                    due = (!is_paused).then(Instant::now);
                    Ok(())
                }
                Err(RecvTimeoutError::Timeout) => {
                    // One that is late is not made up for.
                    due = due.map(|due| (due + self.interval).max(Instant::now()));
                    if due.is_some() { self.sample() } else { Ok(()) }
                }
                Err(RecvTimeoutError::Disconnected) => return,
            };
            match done {
                Ok(()) => {}
                Err(NoAnswer::Because(error)) => self.send(Told::Message(error.to_string())),
                Err(NoAnswer::Ended(_)) => return self.send(Told::Ended),
            }
        }
    }

    fn send(&self, told: Told) {
        // Ignored: the screen has ended.
        let _ = self.to_screen.send(told);
    }

    fn sample(&mut self) -> Result<(), NoAnswer> {
        let sample = self.link.sample()?;
        self.send(Told::Sample(sample));
        self.explain()
    }

    fn explain(&mut self) -> Result<(), NoAnswer> {
        let Some(flow) = self.flow else { return Ok(()) };
        let lines = self.link.ask(&format!("explain {flow}"))?;
        self.send(Told::Flow(flow, lines));
        Ok(())
    }

    fn set(&mut self, setting: &str) -> Result<(), NoAnswer> {
        let lines = self.link.ask(&format!("set {setting}"))?;
        self.send(Told::Message(lines.join("; ")));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn top_5_stopped_run_has_not_ended() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run.sock");
        let has_ended = || matches!(connect(&path), Err(NoAnswer::Ended(_)));
        assert!(has_ended(), "there is no socket");
        drop(UnixListener::bind(&path).unwrap());
        assert!(has_ended(), "nobody listens");
        // As of a run that is stopped and whose queue is full, and of one of another user.
        let silent = Error::Answer { path: path.clone(), problem: "none came".to_owned() };
        let denied =
            Error::NoRun { path: path.clone(), source: ErrorKind::PermissionDenied.into() };
        for error in [silent, denied] {
            assert!(matches!(no_connection(error), NoAnswer::Because(_)));
        }
    }
}

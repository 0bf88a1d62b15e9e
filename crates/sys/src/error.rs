//! Errors outside the path: each says what failed, where, and what to do.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use forebay_rx::CpuId;
use forebay_rx::arrive::SourceError;
use forebay_rx::sink::SinkError;

use crate::errno::Errno;
use crate::refused::Refused;

/// Error of the host: a file, a device or the system.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file cannot be opened, read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    File {
        /// Attempt.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Reason.
        source: io::Error,
    },
    /// A capture file is unusable, or damaged from an offset on.
    #[error("{name}: {problem} at offset {offset}")]
    Capture {
        /// The file's name, or a substitute such as that of standard input.
        name: String,
        /// Offset in the file.
        offset: u64,
        /// Flaw.
        problem: String,
        /// Advice.
        help: String,
    },
    /// A setting has an invalid value.
    #[error("{what} cannot be {}: {why}", quoted(value))]
    Setting {
        /// The setting's name.
        what: &'static str,
        /// Value that was given.
        value: String,
        /// Reason why the value is invalid.
        why: String,
    },
    /// A directory is unfit as mount point of the control tree.
    #[error("cannot mount the control tree on {}: {problem}", directory.display())]
    Mountpoint {
        /// The directory.
        directory: PathBuf,
        /// Flaw.
        problem: String,
        /// Advice.
        help: String,
    },
    /// The system refuses to mount the control tree.
    #[error("cannot mount the control tree on {}: {source}", directory.display())]
    Mount {
        /// The directory.
        directory: PathBuf,
        /// Reason.
        source: io::Error,
    },
    /// The packet memory cannot be mapped.
    #[error("cannot map {bytes} bytes of packet memory: {source}")]
    Memory {
        /// Size in bytes.
        bytes: usize,
        /// Reason.
        source: io::Error,
    },
    /// A config file has an invalid line.
    #[error("{}:{line}: {problem}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// Line, from 1 on.
        line: usize,
        /// Flaw.
        problem: String,
    },
    /// Another process listens at the socket.
    #[error("{what} {} is in use{}", path.display(), by(*process))]
    InUse {
        /// Name of it, as in "the control socket".
        what: &'static str,
        /// Path of the socket.
        path: PathBuf,
        /// Process that owns the socket, if known.
        process: Option<i32>,
    },
    /// An address cannot be listened at.
    #[error("cannot listen for {what} at {address}: {source}")]
    Listen {
        /// Purpose, as in "metrics".
        what: &'static str,
        /// The address.
        address: SocketAddr,
        /// Reason.
        source: io::Error,
    },
    /// A run does not answer at its control socket.
    #[error("no run answers at {}: {source}", path.display())]
    NoRun {
        /// Path of the control socket.
        path: PathBuf,
        /// Reason.
        source: io::Error,
    },
    /// The answer at a control socket is not one of a run, or does not come.
    #[error("the answer at {} cannot be used: {problem}", path.display())]
    Answer {
        /// Path of the control socket.
        path: PathBuf,
        /// Description of the problem.
        problem: String,
    },
    /// No run listens in the default directories.
    #[error("no run listens in {}", places(looked))]
    NoRuns {
        /// The directories of their sockets.
        looked: Vec<PathBuf>,
    },
    /// Several runs listen, and none was chosen.
    #[error("several runs listen: {}", names.join(", "))]
    SeveralRuns {
        /// Names of the runs.
        names: Vec<String>,
    },
    /// A request that a run refused.
    #[error("{} ({})", .0.why, .0.errno)]
    Refused(Refused),
    /// The XDP program of Forebay cannot be attached to an interface.
    #[error("{interface}: {problem}")]
    Xdp {
        /// The interface.
        interface: String,
        /// Flaw.
        problem: String,
        /// Advice.
        help: String,
    },
    /// A thread could not be started.
    #[error("cannot start the thread of CPU {cpu}: {source}")]
    Thread {
        /// CPU of the thread.
        cpu: CpuId,
        /// Reason.
        source: io::Error,
    },
    /// A thread beside those of the CPUs could not be started.
    #[error("cannot start the thread that {work}: {source}")]
    Helper {
        /// Work of the thread, as in "watches over the run".
        work: &'static str,
        /// Reason.
        source: io::Error,
    },
    /// No interface of this network namespace has that name.
    #[error("there is no interface {name:?} in this network namespace")]
    NoInterface {
        /// The name.
        name: String,
        /// Names of the interfaces that exist, the most similar first.
        there_are: Vec<String>,
    },
    /// The interface was deleted, or moved to another network namespace.
    #[error("the interface {name} is gone")]
    DeviceGone {
        /// Name of the interface.
        name: String,
    },
    /// A device, or the kernel on its behalf, refuses something.
    #[error("{name}: cannot {what}: {source}")]
    Device {
        /// The device.
        name: String,
        /// Attempt, as in "bind queue 0".
        what: String,
        /// Reason.
        source: io::Error,
        /// Advice.
        help: String,
    },
    /// The process lacks a privilege.
    #[error("{what} needs {missing}, which this process does not have")]
    Privilege {
        /// Attempt, as in `AF_XDP on veth0`.
        what: String,
        /// Names of the missing capabilities.
        missing: String,
        /// Way to obtain them.
        help: String,
    },
    /// The kernel is too old, or was built without a feature.
    #[error("this kernel has no {what} (Linux has it since {since})")]
    Unsupported {
        /// The kernel's feature.
        what: String,
        /// Version that introduced it, as in 5.18.
        since: &'static str,
        /// Advice.
        help: String,
    },
    /// A default route goes out of the interface: taking its packets may cut the machine off.
    #[error("{name} has a default route: taking all its packets may cut this machine off")]
    DefaultRoute {
        /// The interface.
        name: String,
    },
    /// A source failed with an error that is not of this crate.
    #[error("the source of {queue} failed: {source}")]
    Source {
        /// Queue of the source: `rx-0`, or `eth1/rx-0` where there are several devices.
        queue: String,
        /// Message.
        source: SourceError,
    },
    /// A sink failed with an error that is not of this crate.
    #[error("the output device failed: {source}")]
    Sink {
        /// Message.
        source: SinkError,
    },
    /// A thread panicked: a bug in the handler, or in the path. Programs built with unwinding see
    /// it; releases of the `forebay` program abort instead.
    #[error("the thread of CPU {cpu} panicked: {message}")]
    Panicked {
        /// CPU of the thread.
        cpu: CpuId,
        /// Message.
        message: String,
    },
}

impl Error {
    /// Advice to the user.
    #[must_use]
    pub fn help(&self) -> String {
        match self {
            Self::File { .. } if self.is_refusal() => {
                "check that there is room and that files can be written there, or give another \
                 directory, then try again"
                    .to_owned()
            }
            Self::File { action, .. } => {
                format!("check that the path is right and that you may {action} it, then try again")
            }
            Self::Capture { help, .. } | Self::Mountpoint { help, .. } | Self::Xdp { help, .. } => {
                help.clone()
            }
            Self::Mount { .. } => {
                "this needs /dev/fuse (modprobe fuse), and root or the program fusermount3; check that \
                 they are there, or go without"
                    .to_owned()
            }
            Self::Setting { .. } => "see `forebay help` for what it can be".to_owned(),
            Self::Memory { .. } => {
                "free some memory, or ask for fewer CPUs or queues or a smaller backlog".to_owned()
            }
            Self::Config { .. } => "correct that line, or remove it".to_owned(),
            Self::InUse { .. } => "end that process, or give another path".to_owned(),
            Self::Listen { .. } => {
                "give an address of this machine, with a port that is free".to_owned()
            }
            Self::NoRun { .. } => {
                "check that it runs, or say with --control where it listens".to_owned()
            }
            Self::Answer { .. } => {
                "check that the process that listens there is a run of this version that can answer \
                 (one that is stopped cannot); end it, or say another with --control"
                    .to_owned()
            }
            Self::NoRuns { .. } => {
                "start one as the same user; or say with --control where it listens, and let a \
                 replay listen there with the same option"
                    .to_owned()
            }
            Self::SeveralRuns { .. } => "say which with --name".to_owned(),
            Self::Refused(Refused { errno: Errno::Perm, .. }) => {
                "ask as the user who started the run, or as root".to_owned()
            }
            Self::Refused(_) => "see `forebay list` for the knobs and their values".to_owned(),
            Self::Thread { .. } | Self::Helper { .. } => {
                "check the limits on threads and memory (ulimit -u, ulimit -v, pids.max of the cgroup)"
                    .to_owned()
            }
            Self::NoInterface { there_are, .. } if there_are.is_empty() => {
                "see `ip link`, or look in the namespace that has it: ip netns exec NAME".to_owned()
            }
            Self::NoInterface { there_are, .. } => {
                format!("there are: {}", first_of(there_are))
            }
            Self::DeviceGone { .. } => "start again when it is back".to_owned(),
            Self::Device { help, .. }
            | Self::Privilege { help, .. }
            | Self::Unsupported { help, .. } => help.clone(),
            Self::DefaultRoute { .. } => {
                "say with --take what may be taken, as in --take udp:53, or --yes to take all"
                    .to_owned()
            }
            Self::Source { .. } | Self::Sink { .. } => {
                "see the message above; check that the device is up, then start again".to_owned()
            }
            Self::Panicked { .. } => {
                "this is a bug: please report it with the command and the seed".to_owned()
            }
        }
    }

    /// True if the system refused, as opposed to bad input or usage.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        match self {
            Self::File { action, source, .. } => is_output(action) && !is_bad_path(source.kind()),
            Self::Refused(refused) => {
                use Errno::{Busy, NoMem, NoSpc, Perm};
                [Perm, Busy, NoMem, NoSpc].contains(&refused.errno)
            }
            Self::Memory { .. }
            | Self::InUse { .. }
            | Self::Listen { .. }
            | Self::NoRun { .. }
            | Self::Answer { .. }
            | Self::NoRuns { .. }
            | Self::Mount { .. }
            | Self::Xdp { .. }
            | Self::Thread { .. }
            | Self::Helper { .. }
            | Self::NoInterface { .. }
            | Self::DeviceGone { .. }
            | Self::Device { .. }
            | Self::Privilege { .. }
            | Self::Unsupported { .. }
            | Self::DefaultRoute { .. }
            | Self::Source { .. }
            | Self::Sink { .. }
            | Self::Panicked { .. } => true,
            Self::Capture { .. }
            | Self::Setting { .. }
            | Self::SeveralRuns { .. }
            | Self::Config { .. }
            | Self::Mountpoint { .. } => false,
        }
    }

    /// Converts the error of a queue's source; an error of this crate is returned as it is.
    pub fn of_source(queue: String, error: SourceError) -> Self {
        match error.downcast::<Self>() {
            Ok(error) => *error,
            Err(source) => Self::Source { queue, source },
        }
    }

    /// Converts the error of a sink; an error of this crate is returned as it is.
    #[must_use]
    pub fn of_sink(error: SinkError) -> Self {
        match error.downcast::<Self>() {
            Ok(error) => *error,
            Err(source) => Self::Sink { source },
        }
    }

    /// Adds the attempt and the file to a system error, for `map_err`.
    pub fn file(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { action, path, source }
    }
}

/// Names of the directories searched.
fn places(directories: &[PathBuf]) -> String {
    if directories.is_empty() {
        return "any directory: neither RUNTIME_DIRECTORY nor XDG_RUNTIME_DIR is set".to_owned();
    }
    let names: Vec<_> = directories.iter().map(|path| path.display().to_string()).collect();
    names.join(" or ")
}

/// Owner of a socket, as part of a message.
fn by(process: Option<i32>) -> String {
    process.map_or_else(String::new, |process| format!(" by process {process}"))
}

/// At most as many names as a user reads.
fn first_of(names: &[String]) -> String {
    const SHOWN_MAX: usize = 8;
    let shown = names.iter().take(SHOWN_MAX).map(String::as_str).collect::<Vec<_>>().join(", ");
    if names.len() > SHOWN_MAX { format!("{shown}, …") } else { shown }
}

/// True if the action was on a file of ours, as opposed to an input.
fn is_output(action: &str) -> bool {
    ["create", "write", "remove"].contains(&action)
}

/// True if the path is the cause. Any other error is the device's: full, read-only or broken.
fn is_bad_path(kind: io::ErrorKind) -> bool {
    use io::ErrorKind::{
        AlreadyExists, InvalidFilename, InvalidInput, IsADirectory, NotADirectory, NotFound,
        PermissionDenied,
    };
    matches!(
        kind,
        AlreadyExists
            | InvalidFilename
            | InvalidInput
            | IsADirectory
            | NotADirectory
            | NotFound
            | PermissionDenied
    )
}

/// Result of the host.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Value in quotes, for a message; of a long one, the first characters and their number.
#[must_use]
pub fn quoted(value: &str) -> String {
    const SHOWN_MAX: usize = 100;
    match value.char_indices().nth(SHOWN_MAX) {
        None => format!("{value:?}"),
        Some((end, _)) => format!("{:?}... ({} characters)", &value[..end], value.chars().count()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_values_are_cut_short() {
        let message = |value: String| {
            Error::Setting { what: "rps_cpus", value, why: "no".to_owned() }.to_string()
        };
        let whole = "\u{e9}".repeat(100);
        assert_eq!(message(whole.clone()), format!("rps_cpus cannot be \"{whole}\": no"));
        let shown = format!("rps_cpus cannot be \"{whole}\"... (101 characters): no");
        assert_eq!(message("\u{e9}".repeat(101)), shown);
    }

    #[test]
    fn unwritable_device_refused_bad_path_usage() {
        use io::ErrorKind::{
            IsADirectory, NotFound, PermissionDenied, QuotaExceeded, ReadOnlyFilesystem,
            StorageFull, WriteZero,
        };
        let is_refusal = |action, kind: io::ErrorKind| {
            let error = Error::file(action, "f")(kind.into());
            assert_eq!(error.help().contains("room"), error.is_refusal(), "{error}");
            error.is_refusal()
        };
        for kind in [StorageFull, QuotaExceeded, ReadOnlyFilesystem, WriteZero] {
            assert!(is_refusal("create", kind) && is_refusal("write", kind), "{kind}");
            assert!(!is_refusal("read", kind), "{kind}");
        }
        for kind in [NotFound, PermissionDenied, IsADirectory] {
            assert!(!is_refusal("create", kind), "{kind}");
        }
    }
}

//! Error messages for people, and exit codes.

use std::io::{self, Write};
use std::process::ExitCode;

use miette::{Diagnostic, Report};
use serde_json::json;
use tracing::error;

use crate::{log, output};

/// Reason for the failure of a command.
#[derive(Debug, thiserror::Error, Diagnostic)]
pub(crate) enum Failure {
    /// An error of the library.
    #[error("{error}")]
    Host {
        /// Error of the library.
        error: forebay_sys::Error,
        /// Advice.
        #[help]
        help: String,
    },
    /// A run broke a promise.
    #[error("a promise was broken: {}", broken.join("; "))]
    Promise {
        /// The broken laws, in words.
        broken: Vec<String>,
        /// Advice.
        #[help]
        help: String,
    },
    /// A simulation broke a law.
    #[error("a law was broken: {law}: {text}")]
    #[diagnostic(help("`{command}` does it again; this is a bug: please report it"))]
    Law {
        /// The law.
        law: &'static str,
        /// Description of the violation.
        text: String,
        /// Command that reproduces the violation.
        command: String,
    },
    /// Standard output cannot be written.
    #[error("cannot write to standard output: {error}")]
    #[diagnostic(help("check that there is room where it goes, then try again"))]
    Output {
        /// Reason.
        error: std::io::Error,
    },
    /// The command line or the input cannot be used.
    #[error("{problem}")]
    Usage {
        /// Description of the problem.
        problem: String,
        /// Advice.
        #[help]
        help: String,
    },
}

impl From<forebay_sys::Error> for Failure {
    fn from(error: forebay_sys::Error) -> Self {
        Self::Host { help: error.help(), error }
    }
}

impl Failure {
    pub(crate) fn usage(problem: impl Into<String>, help: impl Into<String>) -> Self {
        Self::Usage { problem: problem.into(), help: help.into() }
    }

    /// Creates a failure for broken promises. `more` names what to report besides the command.
    pub(crate) fn promise(broken: Vec<String>, more: &str) -> Self {
        let help = format!("this is a bug: please report it with the command{more}");
        Self::Promise { broken, help }
    }

    /// Names the place of wrong input in a file.
    pub(crate) fn at(self, place: &str) -> Self {
        match self {
            Self::Usage { problem, help } => {
                Self::Usage { problem: format!("{place}: {problem}"), help }
            }
            other => other,
        }
    }

    /// Adds to the advice.
    pub(crate) fn and_help(self, more: &str) -> Self {
        let with = |help: String| format!("{help}; {more}");
        match self {
            Self::Host { error, help } => Self::Host { error, help: with(help) },
            Self::Promise { broken, help } => Self::Promise { broken, help: with(help) },
            Self::Usage { problem, help } => Self::Usage { problem, help: with(help) },
            other @ (Self::Law { .. } | Self::Output { .. }) => other,
        }
    }

    /// Exit code. 1: a promise was broken; 2: usage or bad input; 3: a device or the system
    /// refused.
    fn exit_code(&self) -> u8 {
        match self {
            Self::Promise { .. } | Self::Law { .. } => 1,
            Self::Usage { .. } => 2,
            Self::Output { .. } => 3,
            Self::Host { error, .. } if error.is_refusal() => 3,
            Self::Host { .. } => 2,
        }
    }
}

/// Ends the program. If JSON is requested and nothing has been printed, the error is also printed
/// to standard output, as a document.
pub(crate) fn exit(result: Result<(), Failure>, prints_json: bool) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            let code = failure.exit_code();
            if prints_json && !output::has_printed() {
                let help = failure.help().map(|help| help.to_string());
                let document = json!({ "error": failure.to_string(), "help": help });
                // Ignored: the error is printed to standard error as well.
                let _ = output::print(&format!("{document}\n"));
            }
            if log::is_for_people() {
                // Ignored: nobody reads a closed standard error.
                let _ = writeln!(io::stderr(), "{:?}", Report::new(failure));
            } else {
                let help = failure.help().map(|help| help.to_string());
                error!(code, help, "{failure}");
            }
            ExitCode::from(code)
        }
    }
}

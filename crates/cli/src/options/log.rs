//! Options of messages.

use clap::{Args, ValueEnum};
use tracing::level_filters::LevelFilter;

/// The program's messages.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct LogOptions {
    /// Form of messages: text for people or json, on standard error, or journald, into the journal
    /// with their fields
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t)]
    pub(crate) log: LogFormat,

    /// Least severe messages that are printed
    #[arg(long, value_name = "LEVEL", value_enum, default_value_t)]
    pub(crate) log_level: LogLevel,
}

/// Form of messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum)]
pub(crate) enum LogFormat {
    /// A line for people
    #[default]
    Text,
    /// A JSON object a line, with time, level and fields
    Json,
    /// An entry of the journal, with level and fields
    Journald,
}

/// Severity of messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum)]
pub(crate) enum LogLevel {
    /// Failures
    Error,
    /// Failures, and warnings of what may be wrong
    Warn,
    /// All that, and the steps of the run
    #[default]
    Info,
}

impl LogLevel {
    pub(crate) fn filter(self) -> LevelFilter {
        match self {
            Self::Error => LevelFilter::ERROR,
            Self::Warn => LevelFilter::WARN,
            Self::Info => LevelFilter::INFO,
        }
    }
}

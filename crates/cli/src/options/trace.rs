//! Options of the trace.

use std::path::PathBuf;

use clap::Args;
use forebay_engine::trace::TracePlan;

/// Trace output.
#[derive(Debug, Args)]
pub(crate) struct TraceOptions {
    /// Write a trace of every packet and change to DIR
    #[arg(long, value_name = "DIR")]
    pub(crate) trace: Option<PathBuf>,

    /// Trace the headers of every frame too
    #[arg(long, requires = "trace")]
    pub(crate) trace_parse: bool,
}

impl TraceOptions {
    /// Trace configuration, if requested.
    pub(crate) fn plan(&self) -> Option<TracePlan> {
        let directory = self.trace.clone()?;
        Some(TracePlan { directory, parse: self.trace_parse })
    }
}

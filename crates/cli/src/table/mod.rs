//! Final report of a run as text.

pub(crate) mod figures;
mod path;
mod replay;
mod run;

pub(crate) use figures::{counted, grouped};
pub(crate) use replay::render as render_replay;
pub(crate) use run::render as render_run;

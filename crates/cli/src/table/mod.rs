//! Final report of a run as text.

mod run; //    report of a run
mod replay; // report of a replay
mod path; //   tables about the path, of both
pub(crate) mod figures; // form of numbers

pub(crate) use figures::{counted, grouped};
pub(crate) use replay::render as render_replay;
pub(crate) use run::render as render_run;

//! The end of a run, for people.

pub(crate) mod figures;
mod path;
mod replay;

pub(crate) use replay::render as render_replay;

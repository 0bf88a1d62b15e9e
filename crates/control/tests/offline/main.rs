//! Tests of the control plane that any machine can run.

mod control; // knobs of an engine
mod devices; // knobs of several devices

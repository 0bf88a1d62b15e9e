//! Tests of the simulator that any machine can run.

mod results; // recorded runs

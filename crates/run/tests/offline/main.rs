//! Tests of runs and replays that any machine can run.

mod replays; //      replays of generated traffic, and their reports
mod captures; //     formats of captures, damaged ones too
mod coalescing; //   streams that are merged, held, written
mod engine; //       threads, sources, handlers
mod live_changes; // knobs changed under traffic
mod run; //          runs over devices of the tests' own
mod trace; //        rows of a trace

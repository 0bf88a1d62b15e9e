//! Tests of the program that any machine can run.

mod program; // its commands, options and errors

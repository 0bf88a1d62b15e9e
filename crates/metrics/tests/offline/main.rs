//! Tests of metrics that any machine can run.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod client; // HTTP clients, well-behaved and not
mod page; //   the page, its questions, and changes of knobs
mod scrape; // samples, and the engine that they are of
mod server; // answers to clients
mod named; //  metrics named by the dashboard and the alert rules

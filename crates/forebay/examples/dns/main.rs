//! An authoritative name server: `dns --zone example.zone --listen 10.0.0.2:53 eth1`.
//!
//! Each CPU's thread polls packets, delivers those of its flows to its own socket, reads them there
//! and answers: no other thread is woken for a query. Answers are composed when the zone is loaded.
//! The server speaks UDP only: clients must repeat truncated queries over TCP elsewhere.

mod answer; //   the answer to one query
mod body; //     composed answers
mod prepared; // a zone prepared for look-ups
mod serve; //    the service threads
mod zone; //     contents of a master file
#[path = "../ending/mod.rs"]
mod ending;

use std::error::Error;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Parser;
use forebay::net::Net;

use crate::ending::From;
use crate::prepared::Zone;
use crate::serve::{Served, Server};
use crate::zone::Contents;

/// An authoritative name server
#[derive(Debug, Parser)]
struct Options {
    /// The zone, as a master file (RFC 1035)
    #[arg(long, value_name = "FILE")]
    zone: PathBuf,

    /// Address to listen on
    #[arg(long, value_name = "ADDR", default_value = "0.0.0.0:53")]
    listen: SocketAddr,

    #[command(flatten)]
    from: From,
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse();
    let contents = Contents::read(&options.zone)?;
    let zone = Arc::new(Zone::new(&contents));
    let config = options.from.config();
    let mut devices = [options.from.open(&format!("udp:{}", options.listen.port()))?];
    let (net, engine) = Net::over(&config, &options.from.net(), &mut devices)?;
    let server = Server::bind(zone, &net, config.cpus.cpus(), options.listen)?;
    ending::stop_on_signals(engine.stopper())?;
    eprintln!("{} names, at {}; Ctrl-C ends it", contents.names.len(), options.listen);
    let server = Arc::new(server);
    let serving = Arc::clone(&server);
    let outcome = engine.run_with(move |cpu| serving.serve(cpu))?;
    for (cpu, Served { queries, answers, batches }, full) in server.served() {
        println!(
            "CPU {cpu}: {queries} queries in {batches} batches, {answers} answers; \
             {full} queries had no room"
        );
    }
    ending::report(&net, outcome)
}

//! An authoritative name server: `dns --zone example.zone --listen 10.0.0.2:53 eth1`.
//!
//! Each CPU's thread takes packets in, delivers those of its flows to its own socket, reads them
//! there and answers: no other thread is woken for a query. Answers are composed when the zone is
//! loaded. Over UDP only: what is truncated has to be asked for elsewhere.

mod answer; //   one query, one answer
mod body; //     what follows the question in one
mod prepared; // a zone made ready
mod zone; //     a zone as its master file tells it
#[path = "../ending/mod.rs"]
mod ending;

use std::error::Error;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use clap::Parser;
use forebay::engine::CpuThread;
use forebay::net::{Datagrams, Net, NetStack, UdpSocket};
use forebay::{CpuId, Outcome};

use crate::answer::{PAYLOAD_MAX_BYTES, answer};
use crate::ending::From;
use crate::prepared::Zone;
use crate::zone::Contents;

/// Queries that are read at once.
const BATCH_MAX: usize = 64;

/// An authoritative name server
#[derive(Debug, Parser)]
struct Options {
    /// The zone, as a master file (RFC 1035)
    #[arg(long, value_name = "FILE")]
    zone: PathBuf,

    /// Where to listen
    #[arg(long, value_name = "ADDR", default_value = "0.0.0.0:53")]
    listen: SocketAddr,

    #[command(flatten)]
    from: From,
}

/// What one thread did.
#[derive(Clone, Copy, Debug, Default)]
struct Served {
    queries: u64,
    answers: u64,
    batches: u64,
}

/// One CPU's end of the service.
struct Server {
    zone: Arc<Zone>,
    /// One for each CPU: each gets what is delivered on its CPU.
    sockets: Vec<(CpuId, UdpSocket)>,
    served: Mutex<Vec<(CpuId, Served)>>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse();
    let contents = Contents::read(&options.zone)?;
    let zone = Arc::new(Zone::new(&contents));
    let config = options.from.config();
    let mut devices = [options.from.open(&[options.listen.port()])?];
    let (net, engine) = Net::over(&config, &options.from.net(), &mut devices)?;
    let bind = |&cpu: &CpuId| Ok((cpu, net.socket().reuse_port_on(cpu).bind(options.listen)?));
    let sockets = config.cpus.cpus().iter().map(bind).collect::<std::io::Result<Vec<_>>>()?;
    ending::stop_on_signals(engine.stopper())?;
    eprintln!("{} names, at {}; Ctrl-C ends it", contents.names.len(), options.listen);
    let server = Arc::new(Server { zone, sockets, served: Mutex::default() });
    let serving = Arc::clone(&server);
    let outcome = engine.run_with(move |cpu| serving.serve(cpu))?;
    server.report(&outcome);
    match outcome.errors.into_iter().next() {
        Some(error) => Err(error.into()),
        None => Ok(()),
    }
}

impl Server {
    /// Answers what comes to one CPU, until the run ends.
    fn serve(&self, cpu: &mut CpuThread<NetStack>) {
        let here = cpu.cpu();
        let Some((_, socket)) = self.sockets.iter().find(|(cpu, _)| *cpu == here) else { return };
        let (mut batch, mut room) = (Datagrams::new(), [0; PAYLOAD_MAX_BYTES as usize]);
        let mut served = Served::default();
        while socket.recv_batch_on(cpu, &mut batch, BATCH_MAX) > 0 {
            served.batches += 1;
            for query in &mut batch {
                served.queries += 1;
                let Some(len) = answer(&self.zone, query.payload(), &mut room) else { continue };
                // There is room in a frame for more than we ever say.
                served.answers += u64::from(query.reply(&room[..len]).is_ok());
            }
            if let Err(error) = socket.send_replies(&mut batch) {
                eprintln!("CPU {here}: {error}");
                break;
            }
        }
        self.served.lock().unwrap_or_else(PoisonError::into_inner).push((here, served));
    }

    fn report(&self, outcome: &Outcome<NetStack>) {
        let mut served = self.served.lock().unwrap_or_else(PoisonError::into_inner).clone();
        served.sort_by_key(|(cpu, _)| *cpu);
        for (cpu, Served { queries, answers, batches }) in served {
            println!("CPU {cpu}: {queries} queries in {batches} batches, {answers} answers");
        }
        for (cpu, socket) in &self.sockets {
            let full = socket.counts().rcvbuf_errors;
            if full > 0 {
                println!("socket of CPU {cpu}: {full} queries had no room");
            }
        }
        for (reason, frames) in ending::dropped(outcome) {
            println!("{frames} frames dropped: {reason}");
        }
        println!("{} frames not home", outcome.frames_away);
    }
}

//! Requests and answers over TCP: `rpc serve --readers 100 --per-thread 1 --work 200 eth1`, and from
//! another host `rpc client --connections 100 10.0.0.2:9000`.
//!
//! The server's threads block in their calls, or poll the descriptors of several connections. Each
//! request costs work in its connection's own memory, so it matters where packets are steered:
//!
//! ```text
//! --set rps_cpus=0                                            all on the CPU that polls
//! --set rps_sock_flow_entries=0                               RPS: by the hash
//! --set rps_sock_flow_entries=32768 --set rps_flow_cnt=32768  RFS: where the thread runs
//! ```
//!
//! `serve --kernel` does the same over the kernel's sockets, to compare with. `forebay compare tcp`
//! runs both with all steerings; the modules are those of its programs.

#[path = "../../../cli/src/compare/own/rpc/client.rs"]
mod client; //  the load
#[path = "../ending/mod.rs"]
mod ending;
#[path = "../../../cli/src/compare/own/rpc/message.rs"]
mod message; // sizes of requests and answers
#[path = "../../../cli/src/compare/own/rpc/sockets.rs"]
mod sockets; // sockets of the server
#[path = "../../../cli/src/compare/own/rpc/threads.rs"]
mod threads; // threads that answer
#[path = "../../../cli/src/compare/own/rpc/work.rs"]
mod work; //    what a request costs the server

use std::error::Error;
use std::net::SocketAddr;
use std::time::Duration;

use clap::Parser;
use forebay::net::{Net, TcpListener};

use crate::client::{Client, LoadPlan};
use crate::ending::From;
use crate::message::MessageSizes;
use crate::sockets::RpcListener;
use crate::threads::ServicePlan;

/// Connections that may wait to be accepted.
const BACKLOG: u32 = 1024;

/// Requests and answers over TCP
#[derive(Debug, Parser)]
enum Options {
    /// Answers requests
    Serve(Serve),
    /// Asks over the kernel's sockets, and prints one line of JSON
    Client(Load),
}

#[derive(Debug, clap::Args)]
struct Serve {
    /// Address to listen on
    #[arg(long, value_name = "ADDR", default_value = "0.0.0.0:9000")]
    listen: SocketAddr,

    #[command(flatten)]
    service: ServicePlan,

    /// Sets a knob of the engine, as in rps_cpus=3; repeatable
    #[arg(long = "set", value_name = "KNOB=VALUE")]
    knobs: Vec<String>,

    /// Serves over the kernel's sockets
    #[arg(long)]
    kernel: bool,

    #[command(flatten)]
    from: From,
}

#[derive(Debug, clap::Args)]
struct Load {
    /// The server
    #[arg(value_name = "ADDR")]
    to: SocketAddr,

    /// Connections, each with one request at a time
    #[arg(long, value_name = "N", default_value_t = 1)]
    connections: u16,

    #[command(flatten)]
    sizes: MessageSizes,

    /// Milliseconds before those that are measured
    #[arg(long, value_name = "MS", default_value_t = 200)]
    warm_up: u64,

    /// Milliseconds that are measured
    #[arg(long, value_name = "MS", default_value_t = 1000)]
    window: u64,
}

fn main() -> Result<(), Box<dyn Error>> {
    match Options::parse() {
        Options::Serve(options) if options.kernel => serve_by_kernel(&options),
        Options::Serve(options) => serve(&options),
        Options::Client(load) => ask(&load),
    }
}

/// Serves until the run ends.
fn serve(options: &Serve) -> Result<(), Box<dyn Error>> {
    let Serve { listen, service, knobs, from, .. } = options;
    let mut config = from.config();
    config.coalesce.is_on = true; // TCP takes a merged packet whole
    let mut devices = [from.open(&format!("tcp:{}", listen.port()))?];
    let (net, engine) = Net::over(&config, &from.net(), &mut devices)?;
    for knob in knobs {
        let (name, value) = knob.split_once('=').ok_or(format!("--set {knob}: no value"))?;
        engine.control().set(name, value)?;
    }
    let listener = TcpListener::bind_with_backlog(&net, listen, BACKLOG)?;
    let threads = threads::start(RpcListener::Own(listener), *service, config.cpus.cpus())?;
    ending::stop_on_signals(engine.stopper())?;
    eprintln!("answering at {listen}; Ctrl-C ends it");
    let outcome = engine.run()?;
    println!("{} answers", threads.join()?);
    ending::report(&net, outcome)
}

/// Serves until the program is ended.
fn serve_by_kernel(options: &Serve) -> Result<(), Box<dyn Error>> {
    let Serve { listen, service, from, .. } = options;
    let listener = RpcListener::Kernel(std::net::TcpListener::bind(listen)?);
    let threads = threads::start(listener, *service, from.config().cpus.cpus())?;
    eprintln!("answering at {listen} by the kernel; Ctrl-C ends it");
    println!("{} answers", threads.join()?);
    Ok(())
}

fn ask(load: &Load) -> Result<(), Box<dyn Error>> {
    let &Load { to, connections, sizes, .. } = load;
    let [warm_up, window] = [load.warm_up, load.window].map(Duration::from_millis);
    let client = Client::connect(LoadPlan { to, connections, sizes, warm_up, window })?;
    println!("{}", serde_json::to_string(&client.measure()?)?);
    Ok(())
}

//! The server and the client of the example `rpc`, one after the other on each device.

#[path = "../../../../../cli/src/compare/own/rpc/client.rs"]
mod client;
#[path = "../../../../../cli/src/compare/own/rpc/message.rs"]
mod message;
#[path = "../../../../../cli/src/compare/own/rpc/sockets.rs"]
#[expect(dead_code, reason = "the kernel's sockets are not under test")]
mod sockets;
#[path = "../../../../../cli/src/compare/own/rpc/threads.rs"]
mod threads;
#[path = "../../../../../cli/src/compare/own/rpc/work.rs"]
mod work;

use std::time::Duration;

use clap::Parser;
use forebay::net::{NetConfig, TcpListener};

use self::client::{Client, LoadPlan};
use self::sockets::RpcListener;
use self::threads::ServicePlan;
use crate::sockets::rig::{OURS, Running, over_tap};
use crate::tcp::Trial;

pub(crate) const TRIALS: &[Trial] = &[
    ("tcp_19_rpc_threads_block", || serve("rpc --readers 8 --per-thread 1 --work 20", 8)),
    ("tcp_19_rpc_threads_poll", || serve("rpc --readers 2 --per-thread 10 --pinned", 20)),
    ("tcp_19_rpc_connections_take_turns", || serve("rpc --readers 2 --per-thread 2", 4)),
];

/// The server's arguments.
#[derive(Parser)]
struct Service {
    #[command(flatten)]
    plan: ServicePlan,
}

/// Serves two clients, one after the other. Every connection of both is served.
fn serve(service: &str, connections: u16) {
    let (net, engine) = over_tap(&NetConfig::default());
    let listener = TcpListener::bind_with_backlog(&net, format!("{OURS}:9000"), 64).unwrap();
    let to = listener.local_addr();
    let Service { plan } = Service::parse_from(service.split(' '));
    let threads = threads::start(RpcListener::Own(listener), plan, net.cpus()).unwrap();
    let running = Running::begin(engine);
    let mut transactions = 0;
    for _ in 0..2 {
        let window = Duration::from_millis(30);
        let sizes = plan.sizes;
        let load = LoadPlan { to, connections, sizes, warm_up: window, window };
        let figures = Client::connect(load).unwrap().measure().unwrap();
        let figures = serde_json::to_value(figures).unwrap();
        let came = figures["transactions"].as_u64().unwrap();
        assert!(came > 0, "{figures}");
        transactions += came + figures["warm_up_transactions"].as_u64().unwrap();
    }
    drop(net);
    let outcome = running.end();
    let answers = threads.join().unwrap();
    assert!(answers >= transactions, "{answers} answers, {transactions} transactions");
    assert_eq!(outcome.frames_away, 0);
}

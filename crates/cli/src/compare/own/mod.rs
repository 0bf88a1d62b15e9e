//! Our side of a comparison: programs that `forebay compare` starts in its namespaces.
//!
//! They follow the protocol of the peers (`bench/peers/peer.h`): `ready`, then one line of JSON; and
//! they end when standard input is closed.

mod ask; //   a client that measures the time to each answer
mod serve; // receivers that count, answer or bridge
mod rpc; //   requests and answers over TCP
mod bulk; //  streams over TCP
mod impair; // a bridge that impairs frames
mod impaired_path; // what it does to them
mod window; // the window of measurement

use std::io::Read;
use std::thread;

use clap::{Args, ValueEnum};
use forebay_device::Via;

use crate::failure::Failure;
use crate::output;
use crate::run::PacketRingArg;

#[derive(Debug, Args)]
pub(crate) struct OwnArgs {
    #[arg(value_enum)]
    what: OwnProgram,

    #[arg(long, default_value = "af_xdp")]
    via: Via,

    /// Interfaces
    #[arg(long)]
    device: Vec<String>,

    #[arg(long, value_delimiter = ',', default_values_t = [0])]
    cpus: Vec<u16>,

    #[arg(long, default_value_t = 9000)]
    port: u16,

    /// Milliseconds before the window
    #[arg(long, default_value_t = 200)]
    warm_up: u64,

    /// Milliseconds of the window
    #[arg(long, default_value_t = 400)]
    window: u64,

    /// Assign hash ranges to CPUs by load
    #[arg(long)]
    balance: bool,

    #[arg(long, value_enum)]
    packet_ring: Option<PacketRingArg>,

    /// Poll without ever going to sleep
    #[arg(long)]
    spin: bool,

    /// Whom to ask
    #[arg(long, default_value = "10.77.0.2")]
    to: std::net::Ipv4Addr,

    /// Requests a second; 0: back to back
    #[arg(long, default_value_t = 0)]
    rate: u32,

    #[command(flatten)]
    rpc: rpc::RpcArgs,

    #[command(flatten)]
    impair: impair::ImpairArgs,
}

/// A program of our side.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum OwnProgram {
    /// Counts packets
    Count,
    /// Counts datagrams of a socket
    UdpCount,
    /// Answers datagrams
    UdpEcho,
    /// Bridges two interfaces
    Bridge,
    /// Asks a server by a socket of the kernel
    Ask,
    /// Answers requests over TCP
    RpcServe,
    /// Asks over TCP, by sockets of the kernel
    RpcAsk,
    /// Sends streams over TCP
    BulkSend,
    /// Receives streams over TCP
    BulkReceive,
    /// Bridges two TAPs that it makes, and impairs what goes from the first to the second
    Impair,
}

pub(crate) fn run(args: &OwnArgs) -> Result<(), Failure> {
    thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
    match args.what {
        OwnProgram::Count | OwnProgram::Bridge => serve::path(args),
        OwnProgram::UdpCount | OwnProgram::UdpEcho => serve::socket(args),
        OwnProgram::Ask => ask::run(args),
        OwnProgram::RpcServe => rpc::serve(args),
        OwnProgram::RpcAsk => rpc::ask(args),
        OwnProgram::BulkSend => bulk::send(args),
        OwnProgram::BulkReceive => bulk::receive(args),
        OwnProgram::Impair => impair::run(args),
    }
}

fn ready() -> Result<(), Failure> {
    output::print("ready\n")
}

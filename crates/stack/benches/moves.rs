//! Order of many connections through moves: `moves CONNECTIONS SEGMENTS` opens connections behind the receive path on
//! 128 CPUs, in an order of steps that a seed determines, and sends segments over them while their applications move from CPU
//! to CPU. It compares every byte, and prints the number of moves.

#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a program for developers")]

#[allow(dead_code, reason = "also for tests")]
#[path = "../tests/offline/tcp/moves.rs"]
mod moves; // the CPUs, the path, the connections

use std::time::Instant;

use moves::{MovesPlan, run};

fn main() {
    let numbers = std::env::args().skip(1).filter_map(|argument| argument.parse().ok());
    let numbers: Vec<u32> = numbers.collect();
    // `cargo bench` passes options of its own.
    let (connections, segments) = match numbers[..] {
        [connections, segments] => (connections, segments),
        _ => (1000, 10_000),
    };
    let (cpus, queues, flow_slots) = (128, 4, 1 << 16);
    let plan =
        MovesPlan { seed: 1, cpus, queues, connections, segments: segments.into(), flow_slots };
    let began = Instant::now();
    let result = run(plan);
    println!("{connections} connections, {:.1} s: {result:?}", began.elapsed().as_secs_f64());
}

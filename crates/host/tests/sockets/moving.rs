//! Readers that move: their flows follow them, in order.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use forebay::CpuId;
use forebay::net::{Datagrams, NetConfig};
use forebay::sys;

use crate::Trial;
use crate::rig::{OURS, Running, client, over_tap};

pub(crate) const TRIALS: &[Trial] =
    &[("rfs_1_flows_follow_a_reader_that_moves_and_promise_1_in_order", follow)];

const FLOWS: u32 = 16;

/// Sends numbered datagrams of several flows until it is told to end.
fn send(to: SocketAddr, until: Arc<AtomicBool>) -> JoinHandle<()> {
    thread::spawn(move || {
        let flows: Vec<_> = (0..FLOWS).map(|_| client(to)).collect();
        let mut number = 0u64;
        while !until.load(Ordering::Relaxed) {
            for flow in &flows {
                flow.send(&number.to_be_bytes()).unwrap();
                number += 1;
            }
            thread::yield_now();
        }
    })
}

fn follow() {
    let cpus = sys::allowed_cpus();
    if cpus.len() < 2 {
        eprintln!("there is one CPU only: nobody can move");
        return;
    }
    let (net, engine) = over_tap(&NetConfig::default());
    let socket = net.bind(format!("{OURS}:7")).unwrap();
    let running = Running::begin(engine);
    let is_over = Arc::new(AtomicBool::new(false));
    let sender = send(socket.local_addr(), Arc::clone(&is_over));
    let mut last: BTreeMap<SocketAddr, u64> = BTreeMap::new();
    let mut batch = Datagrams::new();
    let mut read = |count: usize| {
        let mut seen = 0;
        while seen < count {
            seen += socket.recv_batch(&mut batch, 64).unwrap();
            for datagram in &batch {
                let number = u64::from_be_bytes(datagram.payload().try_into().unwrap());
                let before = last.insert(datagram.source(), number);
                assert!(before.is_none_or(|before| before < number), "in order");
            }
        }
    };
    for round in 0..10 {
        let cpu: CpuId = cpus[round % 2];
        sys::pin_to(cpu).unwrap();
        // What was sent before it moved, and a while for the moves.
        read(20_000);
        let before = socket.counts().by_cpu;
        read(20_000);
        let counts = socket.counts().by_cpu;
        let came: Vec<u64> = counts.iter().zip(&before).map(|(now, then)| now - then).collect();
        let here = came[net.cpus().iter().position(|&of| of == cpu).unwrap()];
        let all: u64 = came.iter().sum();
        assert!(here * 100 >= all * 95, "{here} of {all} on {cpu:?}");
    }
    drop(batch);
    is_over.store(true, Ordering::Relaxed);
    sender.join().unwrap();
    drop(socket);
    let mut outcome = running.end();
    assert_eq!(net.frames_away(&mut outcome), 0);
}

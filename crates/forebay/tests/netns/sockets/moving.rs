//! Readers that move to another CPU: their flows follow, in order.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use forebay::Control;
use forebay::net::{Datagrams, Net, NetConfig, NetEngine, UdpSocket};
use forebay_engine::Config;
use forebay_engine::knobs::Queues;
use forebay_rx::CpuId;
use forebay_rx::steer::SpreadPolicy;
use forebay_sys as sys;
use forebay_sys::cpu_list::CpuList;

use crate::sockets::Trial;
use crate::sockets::rig::{OURS, Running, client, over_tap, over_tap_by};

pub(crate) const TRIALS: &[Trial] = &[
    ("rfs_1_flows_follow_moving_reader_in_order", follow),
    ("promise_2_fragments_wait_where_their_flow_goes", fragments),
    ("per_cpu_sockets_spread_flows", spread),
    ("rfs_6_inline_readers_answer_in_order", || answered(Echo { batch_max: 3, turns: 0 })),
    ("rfs_6_own_turns_keep_answers_ordered", || answered(Echo { batch_max: 1024, turns: 1 })),
];

/// Reason why nothing can move here.
pub(crate) fn one_cpu() -> Option<String> {
    let cpus = sys::allowed_cpus().len();
    (cpus < 2).then(|| format!("it takes two CPUs, and {cpus} may be used"))
}

const FLOWS: u32 = 16;

/// Sends numbered datagrams of several flows until told to stop.
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
        // Read the datagrams sent before the move, and wait for the moves.
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

/// Lets one CPU after the other be the only one, until told to stop.
pub(crate) fn flip_masks(
    control: Control,
    cpus: Vec<CpuId>,
    until: Arc<AtomicBool>,
) -> JoinHandle<()> {
    thread::spawn(move || {
        for cpu in cpus.iter().cycle() {
            if until.load(Ordering::Relaxed) {
                return;
            }
            control.set_rps_cpus(Queues::All, CpuList::new([*cpu])).unwrap();
            thread::sleep(Duration::from_micros(300));
        }
    })
}

/// Moves a flow between CPUs while its fragments arrive.
fn fragments() {
    const DATAGRAMS: u32 = 5000;
    let cpus = sys::allowed_cpus();
    let config = Config { spread: SpreadPolicy::Always, ..Config::live() };
    let (net, engine) = over_tap_by(&config, &NetConfig::default());
    let socket = net.bind(format!("{OURS}:7")).unwrap();
    socket.set_followed(false);
    socket.set_recv_buffer_size(u32::MAX);
    let control = engine.control();
    let running = Running::begin(engine);
    let is_over = Arc::new(AtomicBool::new(false));
    let flips = flip_masks(control, cpus, Arc::clone(&is_over));
    let kernels = client(socket.local_addr());
    let (mut buffer, mut next) = ([0; 4000], 0u32);
    // At most as many datagrams are in flight as the device's queue holds.
    for number in 0..DATAGRAMS {
        let mut payload = [7; 3500];
        payload[..4].copy_from_slice(&number.to_be_bytes());
        kernels.send(&payload).unwrap();
        while number + 1 - next >= 32 || number + 1 == DATAGRAMS && next < DATAGRAMS {
            assert_eq!(socket.recv(&mut buffer).unwrap(), payload.len());
            assert_eq!(buffer[..4], next.to_be_bytes());
            next += 1;
        }
    }
    is_over.store(true, Ordering::Relaxed);
    flips.join().unwrap();
    assert!(socket.counts().by_cpu.iter().filter(|&&count| count > 0).count() > 1);
    drop(socket);
    let mut outcome = running.end();
    assert_eq!(net.frames_away(&mut outcome), 0);
}

/// Thread of a CPU that answers datagrams with the same.
#[derive(Clone, Copy)]
struct Echo {
    /// Number of datagrams that are read at once, at most.
    batch_max: usize,
    /// Turns of the CPU before each read.
    turns: usize,
}

/// Moves flows between CPUs, each of which reads its own socket.
fn answered(echo: Echo) {
    const IN_FLIGHT: u64 = 16;
    let cpus = sys::allowed_cpus();
    let config = Config { spread: SpreadPolicy::Always, ..Config::live() };
    let (net, engine) = over_tap_by(&config, &NetConfig::default());
    let control = engine.control();
    let (sockets, running) = echo_on_each_cpu(&net, engine, echo);
    let is_over = Arc::new(AtomicBool::new(false));
    let flips = flip_masks(control, cpus, Arc::clone(&is_over));
    let flows: Vec<_> = (0..4).map(|_| client(sockets[0].local_addr())).collect();
    let mut buffer = [0; 8];
    for round in 0..125 {
        let numbers = round * IN_FLIGHT..(round + 1) * IN_FLIGHT;
        for number in numbers.clone() {
            flows.iter().for_each(|flow| assert_eq!(flow.send(&number.to_be_bytes()).unwrap(), 8));
        }
        for (number, flow) in
            numbers.flat_map(|number| flows.iter().map(move |flow| (number, flow)))
        {
            assert_eq!(flow.recv(&mut buffer).unwrap(), 8);
            assert_eq!(u64::from_be_bytes(buffer), number);
        }
    }
    is_over.store(true, Ordering::Relaxed);
    flips.join().unwrap();
    assert!(sockets.iter().all(|socket| socket.counts().queued > 0), "flows have moved");
    drop(sockets);
    let mut outcome = running.end();
    assert_eq!(net.frames_away(&mut outcome), 0);
}

/// A socket on each CPU, and a thread that answers.
fn echo_on_each_cpu(net: &Net, engine: NetEngine, echo: Echo) -> (Vec<UdpSocket>, Running) {
    let bind = |&cpu: &CpuId| net.socket().reuse_port_on(cpu).bind(format!("{OURS}:7")).unwrap();
    let sockets: Vec<_> = net.cpus().iter().map(bind).collect();
    let (read, places) = (sockets.clone(), net.cpus().to_vec());
    let running = Running::begin_with(engine, move |cpu| {
        let place = places.iter().position(|&of| of == cpu.cpu()).unwrap();
        let mut batch = Datagrams::new();
        loop {
            (0..echo.turns).for_each(|_| _ = cpu.turn_once());
            if read[place].recv_batch_on(cpu, &mut batch, echo.batch_max) == 0 {
                return;
            }
            for datagram in &mut batch {
                let payload = datagram.payload().to_vec();
                datagram.reply(&payload).unwrap();
            }
            read[place].send_replies(&mut batch).unwrap();
        }
    });
    (sockets, running)
}

fn spread() {
    let config = Config { spread: SpreadPolicy::Always, ..Config::live() };
    let (net, engine) = over_tap_by(&config, &NetConfig::default());
    let (sockets, running) = echo_on_each_cpu(&net, engine, Echo { batch_max: 64, turns: 0 });
    let flows: Vec<_> = (0..64).map(|_| client(sockets[0].local_addr())).collect();
    let mut buffer = [0; 8];
    for number in 0..100u64 {
        for flow in &flows {
            flow.send(&number.to_be_bytes()).unwrap();
            assert_eq!(flow.recv(&mut buffer).unwrap(), 8);
            assert_eq!(buffer, number.to_be_bytes());
        }
    }
    // Each socket has received exactly the datagrams delivered on its CPU.
    for (place, socket) in sockets.iter().enumerate() {
        let counts = socket.counts();
        assert!(counts.queued >= 6400 / 8, "{counts:?}");
        assert_eq!(counts.by_cpu[place], counts.queued);
    }
    drop(sockets);
    let mut outcome = running.end();
    assert_eq!(net.frames_away(&mut outcome), 0);
}

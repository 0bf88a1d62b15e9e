//! Echo exchanges.

use std::thread;

use forebay::net::{Datagrams, NetConfig};
use forebay_engine::Config;

use crate::sockets::Trial;
use crate::sockets::rig::{OURS, OURS_V6, Running, client, over_strange_tap};

pub(crate) const TRIALS: &[Trial] = &[
    ("datagrams_are_answered_where_they_lie", answered),
    ("promise_2_unsendable_answers_are_counted", too_long),
    ("datagrams_answered_on_turning_thread", answered_inline),
];

/// Sends datagrams of many lengths to an echo server, one after another, and checks that they
/// return.
fn exchange(to: &str) {
    let client = client(to.parse().unwrap());
    let mut buffer = [0; 2000];
    for len in (0..1452).step_by(61).chain([1452]) {
        let sent: Vec<u8> = (0..len).map(|at| u8::try_from(at % 251).unwrap()).collect();
        client.send(&sent).unwrap();
        let received = client.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..received], sent);
    }
}

fn answered() {
    let (net, engine) = over_strange_tap(&Config::live(), &NetConfig::default());
    let socket = net.bind("[::]:7").unwrap();
    let running = Running::begin(engine);
    let reader = thread::spawn(move || {
        let mut batch = Datagrams::new();
        let mut count = 0;
        while let Ok(some) = socket.recv_batch(&mut batch, 64) {
            for datagram in &mut batch {
                let payload = datagram.payload().to_vec();
                datagram.reply(&payload).unwrap();
            }
            assert_eq!(socket.send_replies(&mut batch).unwrap(), some);
            count += some;
        }
        count
    });
    exchange(&format!("{OURS}:7"));
    exchange(&format!("[{OURS_V6}]:7"));
    running.end();
    assert_eq!(reader.join().unwrap(), 2 * 25);
}

fn too_long() {
    const MTU: usize = 1500;
    let (net, engine) = over_strange_tap(&Config::live(), &NetConfig::default());
    let socket = net.bind(format!("{OURS}:7")).unwrap();
    let running = Running::begin(engine);
    let client = client(socket.local_addr());
    client.send(b"?").unwrap();
    let mut batch = Datagrams::new();
    let mut answer = |len| {
        assert_eq!(socket.recv_batch(&mut batch, 1).unwrap(), 1);
        batch.iter_mut().for_each(|datagram| datagram.reply(&vec![1; len]).unwrap());
        socket.send_replies(&mut batch).unwrap()
    };
    assert_eq!(answer(MTU - 28 + 1), 0);
    client.send(b"?").unwrap();
    assert_eq!(answer(MTU - 28), 1);
    assert_eq!(client.recv(&mut [0; MTU]).unwrap(), MTU - 28);
    let text = net.snmp();
    let ip: Vec<_> = text.lines().filter_map(|line| line.strip_prefix("Ip: ")).collect();
    let named = ip[0].split(' ').zip(ip[1].split(' '));
    assert_eq!(named.clone().find(|(name, _)| *name == "OutDiscards"), Some(("OutDiscards", "1")));
    drop((socket, batch));
    assert_eq!(running.end().frames_away, 0);
}

fn answered_inline() {
    let (net, engine) = over_strange_tap(&Config::live(), &NetConfig::default());
    let running = Running::begin_with(engine, move |cpu| {
        let socket = net.socket().reuse_port_on(cpu.cpu()).bind("[::]:7").unwrap();
        let mut batch = Datagrams::new();
        while socket.recv_batch_on(cpu, &mut batch, 64) > 0 {
            for datagram in &mut batch {
                let payload = datagram.payload().to_vec();
                datagram.reply(&payload).unwrap();
            }
            socket.send_replies(&mut batch).unwrap();
        }
    });
    exchange(&format!("{OURS}:7"));
    exchange(&format!("[{OURS_V6}]:7"));
    let outcome = running.end();
    assert_eq!(outcome.frames_away, 0);
}

//! Listeners that share an address.

#![allow(clippy::disallowed_types, reason = "a lock of the test's record of claims")]

use std::net::{Shutdown, SocketAddr};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex};

use forebay_rx::cpu::CpuId;
use forebay_stack::Division;
use forebay_stack::tcp::{
    Flow, PassedConnection, ReusePort, SynCookies, Tcp, TcpConfig, TcpError, TcpOut, TcpSocket,
    WriteFlags,
};

use super::pair::{Faults, MTU, Pair};

/// A path that takes a millisecond.
pub(super) fn pair() -> Pair {
    Pair::new(1, Faults { delay_us: 1_000, ..Faults::default() }, [TcpConfig::default(); 2])
}

/// A listener of host 1 at port 80, shared with others; with a CPU, preferred there.
pub(super) fn listen(pair: &mut Pair, cpu: Option<CpuId>) -> TcpSocket {
    let there = pair.address(1, 80);
    let tcp = &mut pair.hosts[1].tcp;
    let socket = tcp.socket().unwrap();
    let reuse_port = ReusePort { cpu, ..ReusePort::default() };
    tcp.bind_reuse_port(socket, there, Some(reuse_port)).unwrap();
    tcp.listen(socket, 1024).unwrap();
    socket
}

/// Sends the SYN of a connection from host 0.
pub(super) fn begin(pair: &mut Pair) -> TcpSocket {
    let ends = (pair.address(0, 0), pair.address(1, 80));
    let socket = pair.hosts[0].tcp.socket().unwrap();
    let begun = pair.call(0, |tcp, out| tcp.connect(socket, ends, MTU, out));
    assert_eq!(begun, Err(TcpError::InProgress));
    socket
}

/// Lets handshakes come to their end.
pub(super) fn settle(pair: &mut Pair) {
    for _ in 0..20 {
        pair.step();
    }
}

pub(super) fn end(pair: &mut Pair, host: usize, sockets: impl IntoIterator<Item = TcpSocket>) {
    for socket in sockets {
        pair.call(host, |tcp, out| tcp.close(socket, out)).unwrap();
    }
}

/// Connections that wait at a listener.
pub(super) fn accepted(pair: &mut Pair, listener: TcpSocket) -> Vec<TcpSocket> {
    std::iter::from_fn(|| Some(pair.hosts[1].tcp.accept(listener).ok()?.0)).collect()
}

#[test]
fn tcp_31_listeners_share_connections() {
    let mut pair = pair();
    let listeners = [None; 4].map(|cpu| listen(&mut pair, cpu));
    let clients: Vec<_> = (0..400).map(|_| begin(&mut pair)).collect();
    settle(&mut pair);
    let shares = listeners.map(|listener| accepted(&mut pair, listener));
    let counts = shares.each_ref().map(Vec::len);
    assert_eq!(counts.iter().sum::<usize>(), 400, "{counts:?}");
    assert!(counts.iter().all(|count| (50..150).contains(count)), "{counts:?}");
    end(&mut pair, 0, clients);
    end(&mut pair, 1, shares.into_iter().flatten().chain(listeners));
    pair.check_rest();
}

#[test]
fn tcp_31_cpu_has_its_own_listener() {
    let mut pair = pair();
    let cpus = [0, 1, 2].map(CpuId);
    let listeners = cpus.map(|cpu| listen(&mut pair, Some(cpu)));
    for (cpu, listener) in cpus.into_iter().zip(listeners) {
        pair.hosts[1].cpu = cpu;
        let clients: Vec<_> = (0..10).map(|_| begin(&mut pair)).collect();
        settle(&mut pair);
        let servers = accepted(&mut pair, listener);
        assert_eq!(servers.len(), 10, "{cpu:?}");
        end(&mut pair, 0, clients);
        end(&mut pair, 1, servers);
    }
    end(&mut pair, 1, listeners);
    pair.check_rest();
}

/// As the kernel's without `tcp_migrate_req`: what waits at the listener ends with it.
#[test]
fn tcp_31_closing_resets_waiting_connections() {
    let mut pair = pair();
    let listeners = [None; 2].map(|cpu| listen(&mut pair, cpu));
    let clients: Vec<_> = (0..40).map(|_| begin(&mut pair)).collect();
    settle(&mut pair);
    // Half of the second batch's handshakes are with a listener that closes before their ACK.
    let late: Vec<_> = (0..40).map(|_| begin(&mut pair)).collect();
    while pair.hosts[1].tcp.request_count() < 40 {
        assert!(pair.step());
    }
    end(&mut pair, 1, [listeners[0]]);
    settle(&mut pair);
    let servers = accepted(&mut pair, listeners[1]);
    let mut reset = 0;
    for &client in clients.iter().chain(&late) {
        match pair.hosts[0].tcp.take_error(client).unwrap() {
            None => {}
            Some(TcpError::Reset) => reset += 1,
            Some(other) => panic!("{other:?}"),
        }
    }
    assert_eq!(reset + servers.len(), 80);
    assert!((20..60).contains(&reset), "{reset}");
    end(&mut pair, 0, clients.into_iter().chain(late));
    end(&mut pair, 1, servers.into_iter().chain([listeners[1]]));
    pair.check_rest();
}

#[test]
fn tcp_31_all_must_share() {
    let mut pair = pair();
    let shared = listen(&mut pair, None);
    let there = pair.address(1, 80);
    let tcp = &mut pair.hosts[1].tcp;
    let other = tcp.socket().unwrap();
    assert_eq!(tcp.bind(other, there), Err(TcpError::AddressInUse));
    pair.call(1, |tcp, out| tcp.close(shared, out)).unwrap();
    let tcp = &mut pair.hosts[1].tcp;
    tcp.bind(other, there).unwrap();
    tcp.listen(other, 1).unwrap();
    let third = tcp.socket().unwrap();
    let reuse_port = Some(ReusePort::default());
    assert_eq!(tcp.bind_reuse_port(third, there, reuse_port), Err(TcpError::AddressInUse));
}

/// Place of a host's process beside another one, as the test has it.
#[derive(Debug, Default)]
pub(super) struct Beside {
    pub(super) takes: AtomicBool,
    pub(super) answers: AtomicBool,
    pub(super) has_others: AtomicBool,
    /// True if the other process has every flow.
    is_claimed: AtomicBool,
    /// Flows that this process has claimed.
    claimed: Mutex<Vec<Flow>>,
    /// Numbers of its flows that came into TIME-WAIT, and that it passed on.
    ended: AtomicU32,
    passed: AtomicU32,
    cookie_us: AtomicU64,
}

impl Division for Beside {
    fn secret(&self) -> [u8; 16] {
        [2; 16]
    }

    fn origin_ns(&self) -> u64 {
        0
    }

    fn takes_datagrams(&self, _: &Flow) -> bool {
        self.takes.load(Relaxed)
    }

    fn refuses_datagrams(&self, _: &Flow) -> bool {
        self.answers.load(Relaxed)
    }

    fn takes(&self, listener: SocketAddr, flow: &Flow) -> bool {
        assert_eq!(listener, flow.ours);
        self.takes.load(Relaxed)
    }

    fn answers(&self, _: SocketAddr, _: &Flow) -> bool {
        self.answers.load(Relaxed)
    }

    fn has_others(&self, _: SocketAddr) -> bool {
        self.has_others.load(Relaxed)
    }

    fn claim(&self, flow: &Flow, _: u32) -> bool {
        let is_free = !self.is_claimed.load(Relaxed);
        if is_free {
            let mut claimed = self.claimed.lock().unwrap();
            assert!(!claimed.contains(flow), "claimed twice: {flow:?}");
            claimed.push(*flow);
        }
        is_free
    }

    fn note_cookie(&self, now_us: u64) {
        self.cookie_us.store(now_us, Relaxed);
    }

    fn cookie_us(&self) -> u64 {
        self.cookie_us.load(Relaxed)
    }

    fn mark_ended(&self, _: &Flow) {
        self.ended.fetch_add(1, Relaxed);
    }

    fn pass_on(&self, flow: &Flow) {
        self.release(flow);
        self.passed.fetch_add(1, Relaxed);
    }

    fn adopt(&self, flow: &Flow, syn: u32) -> bool {
        self.claim(flow, syn)
    }

    fn release(&self, flow: &Flow) {
        let mut claimed = self.claimed.lock().unwrap();
        let at = claimed.iter().position(|other| other == flow);
        claimed.swap_remove(at.expect("released once, and claimed before"));
    }
}

impl Beside {
    /// Host 1 beside another process.
    pub(super) fn host(pair: &mut Pair) -> Arc<Self> {
        let this = Arc::<Self>::default();
        pair.hosts[1].tcp.divide(this.clone());
        this
    }

    /// Number of the flows that this process has claimed.
    pub(super) fn claims(&self) -> usize {
        self.claimed.lock().unwrap().len()
    }
}

fn sent(pair: &Pair) -> u64 {
    pair.hosts[1].tcp.counters().out_segs.get()
}

#[test]
fn exe_8_cookies_for_all_lose_no_syn() {
    let mut pair = pair();
    let config = TcpConfig { syncookies: SynCookies::Always, ..*pair.hosts[1].tcp.config() };
    pair.hosts[1].tcp.configure(config);
    let beside = Beside::host(&mut pair);
    // Another process may have had the flow until now.
    beside.takes.store(true, Relaxed);
    let listener = listen(&mut pair, None);
    begin(&mut pair);
    settle(&mut pair);
    assert!(pair.hosts[1].tcp.accept(listener).is_ok(), "its first SYN is answered");
    assert_eq!((beside.claims(), beside.cookie_us()), (1, 0));
    beside.answers.store(true, Relaxed);
    begin(&mut pair);
    settle(&mut pair);
    assert!(pair.hosts[1].tcp.accept(listener).is_ok());
    assert_ne!(beside.cookie_us(), 0);
}

#[test]
fn exe_8_other_processes_flows_are_left_alone() {
    let mut pair = pair();
    let beside = Beside::host(&mut pair);
    let listener = listen(&mut pair, None);
    let client = begin(&mut pair);
    settle(&mut pair);
    assert_eq!((sent(&pair), beside.claims()), (0, 0), "its SYNs are another's");
    beside.takes.store(true, Relaxed);
    beside.is_claimed.store(true, Relaxed);
    settle(&mut pair);
    assert_eq!(sent(&pair), 0, "another one has claimed it");
    beside.is_claimed.store(false, Relaxed);
    let server = loop {
        if let Ok((server, _)) = pair.hosts[1].tcp.accept(listener) {
            break server;
        }
        assert!(pair.step());
    };
    assert_eq!(beside.claims(), 1);
    end(&mut pair, 1, [server]);
    settle(&mut pair);
    end(&mut pair, 0, [client]);
    while pair.hosts[1].tcp.time_wait_count() == 0 || beside.ended.load(Relaxed) == 0 {
        assert!(pair.step());
    }
    end(&mut pair, 1, [listener]);
    pair.check_rest();
    assert_eq!(beside.claims(), 0, "all is released");
}

#[test]
fn exe_8_stray_segments_get_one_reset() {
    let mut pair = pair();
    let listener = listen(&mut pair, None);
    let clients = [begin(&mut pair), begin(&mut pair)];
    settle(&mut pair);
    let beside = Beside::host(&mut pair);
    let servers = accepted(&mut pair, listener);
    // The process that had them is killed.
    pair.hosts[1].tcp = Tcp::new(TcpConfig::default(), [2; 16], pair.now_us);
    pair.hosts[1].tcp.divide(beside.clone());
    assert_eq!(servers.len(), 2);
    let listener = listen(&mut pair, None);
    let write = |pair: &mut Pair, client| {
        pair.call(0, |tcp, out| tcp.write(client, b"x", WriteFlags::default(), out)).unwrap();
        settle(pair);
        pair.hosts[0].tcp.take_error(client)
    };
    assert_eq!(write(&mut pair, clients[0]), Ok(None), "another process answers");
    assert_eq!(pair.hosts[1].tcp.counters().out_rsts.get(), 0);
    beside.takes.store(true, Relaxed);
    beside.answers.store(true, Relaxed);
    assert_eq!(write(&mut pair, clients[1]), Ok(Some(TcpError::Reset)));
    end(&mut pair, 0, clients);
    end(&mut pair, 1, [listener]);
    pair.check_rest();
}

/// ACKs that may be of cookies are looked at only while some process has sent cookies, since each is guessed with
/// a small probability.
#[test]
fn exe_8_cookies_are_read_while_sent() {
    let mut pair = pair();
    let listener = listen(&mut pair, None);
    let client = begin(&mut pair);
    settle(&mut pair);
    let servers = accepted(&mut pair, listener);
    let beside = Beside::default();
    beside.takes.store(true, Relaxed);
    let beside = Arc::new(beside);
    pair.hosts[1].tcp = Tcp::new(TcpConfig::default(), [2; 16], pair.now_us);
    pair.hosts[1].tcp.divide(beside.clone());
    assert_eq!(servers.len(), 1);
    let listener = listen(&mut pair, None);
    let looked_at = |pair: &mut Pair| {
        pair.call(0, |tcp, out| tcp.write(client, b"x", WriteFlags::default(), out)).unwrap();
        settle(pair);
        pair.hosts[1].tcp.counters().syncookies_failed.get()
    };
    assert_eq!(looked_at(&mut pair), 0, "nobody has sent a cookie");
    beside.note_cookie(pair.now_us);
    assert!(looked_at(&mut pair) > 0, "the other process has");
    end(&mut pair, 0, [client]);
    end(&mut pair, 1, [listener]);
}

#[test]
fn exe_8_unaccepted_connection_goes_on_elsewhere() {
    for closes in [false, true] {
        let mut pair = pair();
        let beside = Beside::host(&mut pair);
        beside.takes.store(true, Relaxed);
        let listener = listen(&mut pair, None);
        let client = begin(&mut pair);
        settle(&mut pair);
        let question: Vec<u8> = (0..3000_u32).map(|at| at.to_be_bytes()[3]).collect();
        let write = |tcp: &mut Tcp, out: &mut TcpOut<'_>| {
            tcp.write(client, &question, WriteFlags::default(), out)
        };
        assert_eq!(pair.call(0, write), Ok(question.len()));
        if closes {
            pair.call(0, |tcp, out| tcp.shutdown(client, Shutdown::Write, out)).unwrap();
        }
        settle(&mut pair);
        let passed = pair.call(1, |tcp, out| tcp.pass_on(listener, out)).unwrap().unwrap();
        assert_eq!((beside.claims(), beside.passed.load(Relaxed)), (0, 1));
        assert_eq!(pair.hosts[1].tcp.flow_count(), 0);
        let passed = PassedConnection::of_bytes(&passed.to_bytes()).unwrap();
        assert!(pair.call(1, |tcp, out| tcp.adopt(listener, &passed, out)));
        assert!(!pair.call(1, |tcp, out| tcp.adopt(listener, &passed, out)), "it is there");
        let servers = accepted(&mut pair, listener);
        let mut read = vec![0; 4000];
        let len = pair.call(1, |tcp, out| tcp.read(servers[0], &mut read, out)).unwrap();
        assert_eq!(&read[..len], question);
        pair.call(1, |tcp, out| tcp.write(servers[0], b"answer", WriteFlags::default(), out))
            .unwrap();
        settle(&mut pair);
        let len = pair.call(0, |tcp, out| tcp.read(client, &mut read, out)).unwrap();
        assert_eq!(&read[..len], b"answer");
        let end_of_stream = pair.call(1, |tcp, out| tcp.read(servers[0], &mut read, out));
        assert_eq!(end_of_stream, if closes { Ok(0) } else { Err(TcpError::WouldBlock) });
        end(&mut pair, 0, [client]);
        settle(&mut pair);
        end(&mut pair, 1, servers.into_iter().chain([listener]));
        pair.check_rest();
        assert_eq!(pair.hosts[1].tcp.counters().out_rsts.get(), 0);
    }
}

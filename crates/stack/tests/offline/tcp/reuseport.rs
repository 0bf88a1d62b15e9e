//! Listeners that share an address.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use forebay_rx::cpu::CpuId;
use forebay_stack::tcp::{ReusePort, Succession, TcpConfig, TcpError, TcpSocket};

use super::pair::{Faults, MTU, Pair};

/// A path that takes a millisecond.
fn pair() -> Pair {
    Pair::new(1, Faults { delay_us: 1_000, ..Faults::default() }, [TcpConfig::default(); 2])
}

/// A listener of host 1 at port 80, shared with others; with a CPU, preferred there.
fn listen(pair: &mut Pair, cpu: Option<CpuId>) -> TcpSocket {
    let there = pair.address(1, 80);
    let tcp = &mut pair.hosts[1].tcp;
    let socket = tcp.socket().unwrap();
    let reuse_port = ReusePort { cpu, ..ReusePort::default() };
    tcp.bind_reuse_port(socket, there, Some(reuse_port)).unwrap();
    tcp.listen(socket, 1024).unwrap();
    socket
}

/// Sends the SYN of a connection from host 0.
fn begin(pair: &mut Pair) -> TcpSocket {
    let ends = (pair.address(0, 0), pair.address(1, 80));
    let socket = pair.hosts[0].tcp.socket().unwrap();
    let begun = pair.call(0, |tcp, out| tcp.connect(socket, ends, MTU, out));
    assert_eq!(begun, Err(TcpError::InProgress));
    socket
}

/// Lets handshakes come to their end.
fn settle(pair: &mut Pair) {
    for _ in 0..20 {
        pair.step();
    }
}

fn end(pair: &mut Pair, host: usize, sockets: impl IntoIterator<Item = TcpSocket>) {
    for socket in sockets {
        pair.call(host, |tcp, out| tcp.close(socket, out)).unwrap();
    }
}

/// Connections that wait at a listener.
fn accepted(pair: &mut Pair, listener: TcpSocket) -> Vec<TcpSocket> {
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

/// A device that the process has for itself: nobody else answers for its closed ports, unless another
/// process receives there, too.
#[test]
fn exe_5_other_processes_flows_get_no_reset() {
    static WORDS: [AtomicU32; 2] = [const { AtomicU32::new(0) }; 2];
    let mut pair = pair();
    let place = Arc::new(Succession::new(0, &WORDS[0], &WORDS[1]));
    place.receive(true);
    pair.hosts[1].tcp.succeed(Arc::clone(&place));
    let client = begin(&mut pair);
    settle(&mut pair);
    assert_eq!(pair.hosts[0].tcp.take_error(client), Ok(None));
    assert_eq!(pair.hosts[1].tcp.counters().out_rsts.get(), 0);
    assert!(pair.hosts[1].tcp.counters().not_ours.get() > 0);
    place.set_has_older(false);
    let error = std::iter::repeat_with(|| {
        assert!(pair.step());
        pair.hosts[0].tcp.take_error(client).unwrap()
    });
    assert_eq!(error.flatten().next(), Some(TcpError::Refused));
    end(&mut pair, 0, [client]);
    pair.check_rest();
}

//! Connections from a port that the application has chosen, where one was before.

use forebay_stack::tcp::{TcpConfig, TcpError, TcpSocket};

use super::pair::{Faults, MTU, Pair};
use super::reuseport::{accepted, end, listen};

const CHOSEN: u16 = 5000;

/// Hosts with timestamps or without.
fn pair(timestamps: bool) -> Pair {
    let config = TcpConfig { timestamps, ..TcpConfig::default() };
    Pair::new(1, Faults { delay_us: 1_000, ..Faults::default() }, [config; 2])
}

/// Lets segments arrive, and no TIME-WAIT end.
fn settle(pair: &mut Pair) {
    while pair.next_us().is_some_and(|at_us| at_us < pair.now_us + 100_000) {
        pair.step();
    }
}

/// Connects host 0 to port 80 from the chosen port.
fn connect(pair: &mut Pair) -> Result<TcpSocket, TcpError> {
    let ends = (pair.address(0, CHOSEN), pair.address(1, 80));
    let tcp = &mut pair.hosts[0].tcp;
    let socket = tcp.socket().unwrap();
    tcp.bind(socket, ends.0).unwrap();
    match pair.call(0, |tcp, out| tcp.connect(socket, ends, MTU, out)) {
        Err(TcpError::InProgress) => Ok(socket),
        Err(error) => {
            end(pair, 0, [socket]);
            Err(error)
        }
        Ok(()) => panic!("without a handshake"),
    }
}

/// Leaves a connection from the chosen port in TIME-WAIT. Returns the number behind its FIN.
fn leave_time_wait(pair: &mut Pair) -> u32 {
    let listener = listen(pair, None);
    let client = connect(pair).unwrap();
    settle(pair);
    assert_eq!(connect(pair), Err(TcpError::NoPort), "there is such a connection");
    end(pair, 0, [client]);
    settle(pair);
    let servers = accepted(pair, listener);
    end(pair, 1, servers.into_iter().chain([listener]));
    settle(pair);
    assert_eq!(pair.hosts[0].tcp.time_wait_count(), 1);
    pair.last[0].0
}

#[test]
fn tcp_12_chosen_port_continues_time_wait() {
    let mut pair = pair(true);
    let end_of_first = leave_time_wait(&mut pair);
    let listener = listen(&mut pair, None);
    let client = connect(&mut pair).unwrap();
    assert_eq!(pair.last[0].0.wrapping_sub(end_of_first), 65_535 + 2);
    assert_eq!(pair.hosts[0].tcp.time_wait_count(), 0);
    settle(&mut pair);
    let servers = accepted(&mut pair, listener);
    assert_eq!(servers.len(), 1);
    end(&mut pair, 0, [client]);
    end(&mut pair, 1, servers.into_iter().chain([listener]));
    pair.check_rest();
}

#[test]
fn tcp_12_time_wait_without_timestamps_stays() {
    let mut pair = pair(false);
    leave_time_wait(&mut pair);
    assert_eq!(connect(&mut pair), Err(TcpError::NoPort));
    assert_eq!(pair.hosts[0].tcp.time_wait_count(), 1);
    pair.check_rest();
}

/// As in the kernel, whose `tcp_tw_reuse` is for loopback.
#[test]
fn tcp_12_chosen_for_it_time_wait_stays() {
    let mut pair = pair(true);
    leave_time_wait(&mut pair);
    let ends = (pair.address(0, CHOSEN), pair.address(1, 80));
    let socket = pair.hosts[0].tcp.socket().unwrap();
    let refused = pair.call(0, |tcp, out| tcp.connect(socket, ends, MTU, out));
    assert_eq!(refused, Err(TcpError::AddressInUse));
    assert_eq!(pair.hosts[0].tcp.time_wait_count(), 1);
    end(&mut pair, 0, [socket]);
    pair.check_rest();
}

//! Clients of Fast Open: what they send with a SYN, and when.

use super::*;

#[test]
fn tcp_50_lost_data_sent_with_ack() {
    let faults = Faults { delay_us: DELAY_US, ..Faults::default() };
    let mut pair = Pair::new(1, faults, [BOTH; 2]);
    let listener = listen(&mut pair, 16);
    learn(&mut pair, listener);
    while pair.step() {}
    // The listener no longer takes data, as one of another host behind the same address.
    pair.hosts[1].tcp.set_fast_open(listener, FastOpenOptions::default()).unwrap();
    let (client, sent) = begin(&mut pair, b"question");
    assert_eq!(sent, Ok(8));
    let began_us = pair.now_us;
    let server = accept(&mut pair, listener);
    let mut room = [0; 20];
    while pair.call(1, |tcp, out| tcp.read(server, &mut room, out)) != Ok(8) {
        assert!(pair.step());
    }
    assert_eq!(pair.now_us, began_us + 3 * DELAY_US, "as if they had not been in the SYN");
    assert_eq!(pair.hosts[0].tcp.counters().fast_open_active_fail.get(), 1);
    for (host, socket) in [(0, client), (1, server), (1, listener)] {
        pair.call(host, |tcp, out| tcp.close(socket, out)).unwrap();
    }
    pair.check_rest();
}

#[test]
fn tcp_50_black_hole_pauses_clients() {
    const PAUSE_US: u64 = 3_600_000_000;
    let config = TcpConfig { fast_open_blackhole_timeout_us: PAUSE_US, ..BOTH };
    let faults = Faults { delay_us: DELAY_US, ..Faults::default() };
    let mut pair = Pair::new(1, faults, [config; 2]);
    let listener = listen(&mut pair, 16);
    learn(&mut pair, listener);
    while pair.step() {}
    pair.faults.loss = 100;
    let (client, sent) = begin(&mut pair, b"question");
    assert_eq!(sent, Ok(8));
    while pair.hosts[0].tcp.counters().fast_open_blackhole.get() == 0 {
        assert!(pair.step());
    }
    pair.call(0, |tcp, out| tcp.close(client, out)).unwrap();
    pair.faults.loss = 0;
    let (client, sent) = begin(&mut pair, b"question");
    assert_eq!(sent, Err(TcpError::InProgress), "without data");
    pair.call(0, |tcp, out| tcp.close(client, out)).unwrap();
    pair.now_us += PAUSE_US;
    let (_, sent) = begin(&mut pair, b"question");
    assert_eq!(sent, Ok(8));
}

#[test]
fn tcp_50_calls_are_answered_as_the_kernels() {
    let faults = Faults { delay_us: DELAY_US, ..Faults::default() };
    let mut pair = Pair::new(1, faults, [BOTH, TcpConfig::KERNELS]);
    let listener = listen(&mut pair, 16);
    let ends = (pair.address(0, 0), pair.address(1, 80));
    let (client, sent) = begin(&mut pair, b"question");
    assert_eq!(sent, Err(TcpError::InProgress));
    let again = |tcp: &mut Tcp, out: &mut TcpOut<'_>| {
        tcp.connect_with_data(client, ends, MTU, b"question", WriteFlags::default(), out)
    };
    assert_eq!(pair.call(0, again), Err(TcpError::Already));
    accept(&mut pair, listener);
    assert_eq!(pair.call(0, again), Ok(8), "the outcome, and a write");
    assert_eq!(pair.call(0, again), Err(TcpError::IsConnected));
    pair.hosts[0].tcp.configure(TcpConfig { fast_open: FastOpen(0), ..BOTH });
    assert_eq!(begin(&mut pair, b"question").1, Err(TcpError::Unsupported));
    let socket = pair.hosts[0].tcp.socket().unwrap();
    let waits = FastOpenOptions { waits_for_data: true, ..Default::default() };
    assert_eq!(pair.hosts[0].tcp.set_fast_open(socket, waits), Err(TcpError::Unsupported));
}

/// Opens a connection of host 0, whose SYN waits for data.
fn client_awaiting_data(pair: &mut Pair) -> TcpSocket {
    let ends = (pair.address(0, 0), pair.address(1, 80));
    let client = pair.hosts[0].tcp.socket().unwrap();
    let waits = FastOpenOptions { waits_for_data: true, ..Default::default() };
    pair.hosts[0].tcp.set_fast_open(client, waits).unwrap();
    assert_eq!(pair.call(0, |tcp, out| tcp.connect(client, ends, MTU, out)), Ok(()));
    assert!(pair.hosts[0].tcp.readiness(client).unwrap().writable);
    assert!(pair.hosts[0].tcp.waits_for_data(client).unwrap());
    client
}

/// No error is about a SYN that was not sent, whoever guesses its number.
#[test]
fn tcp_50_error_before_syn_is_ignored() {
    let mut number = None;
    for _ in 0..2 {
        let faults = Faults { delay_us: DELAY_US, ..Faults::default() };
        let mut pair = Pair::new(1, faults, [BOTH; 2]);
        let listener = listen(&mut pair, 16);
        learn(&mut pair, listener);
        while pair.step() {}
        let client = client_awaiting_data(&mut pair);
        let flow = pair.hosts[0].tcp.flow(client).unwrap();
        let error = PathError::Unreachable {
            error: TcpError::Refused,
            ends_handshake: true,
            is_of_route: false,
            message: IcmpMessage::default(),
        };
        if let Some(number) = number {
            pair.call(0, |tcp, out| tcp.receive_error(&flow, Seq(number), error, out));
            assert_eq!(pair.hosts[0].tcp.counters().out_of_window_icmps.get(), 1);
        }
        let write = |tcp: &mut Tcp, out: &mut TcpOut<'_>| {
            tcp.write(client, b"question", WriteFlags::default(), out)
        };
        assert_eq!(pair.call(0, write), Ok(8));
        let sent = pair.last[0].0;
        assert_eq!(*number.get_or_insert(sent), sent, "the same in both rounds");
        pair.call(0, |tcp, out| tcp.receive_error(&flow, Seq(sent), error, out));
        assert_eq!(state(&pair, 0, client), State::Closed);
        assert_eq!(pair.call(0, write), Err(TcpError::Refused));
        for (host, socket) in [(0, client), (1, listener)] {
            pair.call(host, |tcp, out| tcp.close(socket, out)).unwrap();
        }
        pair.check_rest();
    }
}

/// A SYN that waits for data goes out with the first write.
#[test]
fn tcp_50_syn_waits_for_data() {
    let faults = Faults { delay_us: DELAY_US, ..Faults::default() };
    let mut pair = Pair::new(1, faults, [BOTH; 2]);
    let listener = listen(&mut pair, 16);
    learn(&mut pair, listener);
    while pair.step() {}
    let client = client_awaiting_data(&mut pair);
    assert!(!pair.step(), "nothing was sent");
    // Nobody else begins or ends what has not begun.
    let flow = pair.hosts[0].tcp.flow(client).unwrap();
    for flags in [SYN, RST, ACK, SYN | ACK, RST | ACK] {
        let forged = Forged::plain(flags, 0);
        let bytes = bytes_of(&forged, &mut pair, (flow.theirs, flow.ours), (7, 9)).unwrap();
        let (now_us, mut answers) = (pair.now_us, Vec::new());
        let packet = pair.hosts[0].packet(&bytes).unwrap();
        pair.hosts[0].deliver(packet, now_us, &mut answers);
        assert_eq!(answers.len(), usize::from(flags & (ACK | RST) == ACK), "{flags}");
        assert!(pair.hosts[0].tcp.waits_for_data(client).unwrap());
    }
    let write = |tcp: &mut Tcp, out: &mut TcpOut<'_>| {
        tcp.write(client, b"question", WriteFlags::default(), out)
    };
    assert_eq!(pair.call(0, write), Ok(8));
    let server = accept(&mut pair, listener);
    assert_eq!(pair.call(1, |tcp, out| tcp.read(server, &mut [0; 20], out)), Ok(8));
    for (host, socket) in [(0, client), (1, server), (1, listener)] {
        pair.call(host, |tcp, out| tcp.close(socket, out)).unwrap();
    }
    pair.check_rest();
}

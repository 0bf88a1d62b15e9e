//! Readers that are behind, for which a contended CPU receives in larger bursts.

#![allow(clippy::unwrap_used, reason = "tests and what they are built from")]

use etherparse::Icmpv4Type;
use forebay_rx::Handler;

use super::private::{Host, Lies, datagram, ethernet};

fn ping() -> Vec<u8> {
    let mut bytes = Vec::new();
    let request = Icmpv4Type::EchoRequest(etherparse::IcmpEchoHeader { id: 1, seq: 1 });
    ethernet().icmpv4(request).write(&mut bytes, &[1; 40]).unwrap();
    bytes
}

fn to_closed_port() -> Vec<u8> {
    let mut bytes = Vec::new();
    ethernet().udp(1000, 99).write(&mut bytes, &[1; 40]).unwrap();
    bytes
}

#[test]
fn exe_9_readers_behind_have_unread_datagrams() {
    let mut host = Host::new(16);
    let is_behind = |host: &mut Host, frames: &[Vec<u8>]| {
        frames.iter().for_each(|frame| {
            host.receive(std::slice::from_ref(frame), Lies::InOneFrame);
        });
        host.stack.are_readers_behind()
    };
    let next = || datagram(1000, &[2; 40]);
    assert!(!is_behind(&mut host, &[]), "there was no packet");
    assert!(host.consumer.arm());
    assert!(!is_behind(&mut host, &[next()]), "the reader slept");
    assert!(!is_behind(&mut host, &[next()]), "it has little to read");
    let account = host.consumer.account();
    account.set_rcvbuf(account.rmem() * 3);
    assert!(is_behind(&mut host, &[next()]));
    assert!(!is_behind(&mut host, &[]), "it is asked about the packets since");
    assert!(!is_behind(&mut host, &[next(), ping()]), "a peer waits for its answer");
    assert!(!is_behind(&mut host, &[to_closed_port(), next()]), "a peer is to be refused");
    assert!(!is_behind(&mut host, &[ping()]));
    assert!(is_behind(&mut host, &[next(), next()]));
}

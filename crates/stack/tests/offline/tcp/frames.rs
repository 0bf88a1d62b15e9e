//! Hosts without free frames for a while.

use forebay_buf::Frame;
use forebay_stack::tcp::{TcpConfig, TcpInfo, TcpSocket, WriteFlags};

use super::pair::{Faults, Pair};

const DELAY_US: u64 = 10_000;

fn info(pair: &Pair, host: usize, socket: TcpSocket) -> TcpInfo {
    pair.hosts[host].tcp.info(socket).unwrap().unwrap()
}

/// Takes all frames of a host but one, which the next packet arrives in.
fn take_frames(pair: &mut Pair, host: usize) -> Vec<Frame> {
    let pool = &mut pair.hosts[host].pool;
    let mut frames: Vec<_> = std::iter::from_fn(|| pool.allocate(1)).collect();
    frames.pop().into_iter().for_each(|frame| pool.put(frame));
    frames
}

/// An open connection, over which 1,000 bytes came for whose ACK there was no frame; the frames, and what the
/// server's window was before.
fn without_ack(pair: &mut Pair) -> (TcpSocket, TcpSocket, Vec<Frame>, u32) {
    let (client, server) = pair.open(80);
    let frames = take_frames(pair, 1);
    let window = info(pair, 1, server).receive_window_bytes;
    let write = pair.call(0, |tcp, out| tcp.write(client, &[7; 1000], WriteFlags::default(), out));
    assert_eq!(write, Ok(1000));
    while info(pair, 1, server).unread_bytes == 0 {
        assert!(pair.step());
    }
    (client, server, frames, window)
}

fn pair() -> Pair {
    let faults = Faults { delay_us: DELAY_US, ..Faults::default() };
    Pair::new(1, faults, [TcpConfig::default(); 2])
}

#[test]
fn tcp_6_ack_without_frame_follows() {
    let mut pair = pair();
    let (client, _, frames, _) = without_ack(&mut pair);
    frames.into_iter().for_each(|frame| pair.hosts[1].pool.put(frame));
    let came_us = pair.now_us;
    while info(&pair, 0, client).unacked_bytes > 0 {
        assert!(pair.step());
    }
    assert_eq!(pair.now_us, came_us + 200_000 + DELAY_US, "`TCP_DELACK_MAX`, and the path");
    assert_eq!(info(&pair, 0, client).tally.data_segs_out, 1, "nothing was sent again");
}

#[test]
fn tcp_6_ack_without_frames_backs_off() {
    let mut pair = pair();
    let (client, _, frames, _) = without_ack(&mut pair);
    let came_us = pair.now_us;
    let counters = pair.hosts[1].tcp.counters().clone();
    // Attempts behind the first: after 0.2 s, 0.6 s and 1.4 s. Segments that come again find no frame.
    while pair.next_us().is_some_and(|next_us| next_us < came_us + 1_300_000) {
        assert!(pair.step());
    }
    assert_eq!(counters.no_frame.get(), 3);
    frames.into_iter().for_each(|frame| pair.hosts[1].pool.put(frame));
    while info(&pair, 0, client).unacked_bytes > 0 {
        assert!(pair.step());
    }
}

#[test]
fn tcp_6_window_without_frame_is_not_told() {
    let mut pair = pair();
    let (_, server, frames, window) = without_ack(&mut pair);
    assert_eq!(info(&pair, 1, server).receive_window_bytes, window - 1000);
    frames.into_iter().for_each(|frame| pair.hosts[1].pool.put(frame));
}

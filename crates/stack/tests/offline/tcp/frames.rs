//! Hosts without free frames, or with full buffers, for a while.

use std::net::Shutdown;

use forebay_buf::frame::BEFORE_PACKET_BYTES;
use forebay_buf::pool::{ChunkClass, carve, region_bytes};
use forebay_buf::{Frame, Region};
use forebay_stack::tcp::{TcpConfig, TcpInfo, TcpOptions, TcpSocket, WriteFlags};

use super::forged::{Forged, say};
use super::pair::{Faults, Host, Pair};
use super::reuseport::{accepted, listen};

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

const SYN: u8 = 2;
const ACK: u8 = 16;

/// Connection from port 1000 with a receive buffer of this size, whose peer's first byte has number 1, and the number of
/// ours.
#[test]
fn tcp_6_failed_retransmission_sends_no_data() {
    let mut pair = pair();
    let (client, _) = pair.open(80);
    pair.faults.loss = 100;
    write(&mut pair, client, 1000);
    let sent = info(&pair, 0, client);
    let frames = take_frames(&mut pair, 0);
    let last = pair.hosts[0].pool.allocate(1);
    while pair.hosts[0].tcp.counters().no_frame.get() == 0 {
        assert!(pair.step());
    }
    let after = info(&pair, 0, client);
    assert_eq!(after.tally.data_segs_out, sent.tally.data_segs_out);
    assert_eq!(after.data_sent_us, sent.data_sent_us);
    assert_eq!(after.retransmitted, 0, "nothing is in flight");
    frames.into_iter().chain(last).for_each(|frame| pair.hosts[0].pool.put(frame));
    while pair.hosts[0].tcp.counters().retrans_segs.get() < 2 {
        assert!(pair.step());
    }
    assert_eq!(info(&pair, 0, client).data_sent_us, pair.now_us);
}

fn with_buffer(pair: &mut Pair, rcvbuf: u32) -> (TcpSocket, u32) {
    let listener = listen(pair, None);
    let options = TcpOptions { rcvbuf: Some(rcvbuf), ..TcpOptions::default() };
    pair.call(1, |tcp, out| tcp.set_options(listener, options, out)).unwrap();
    let (ours, _) = say(pair, 1000, &Forged::plain(SYN, 0), (0, 0)).unwrap();
    say(pair, 1000, &Forged::plain(ACK, 0), (1, ours + 1));
    (accepted(pair, listener)[0], ours + 1)
}

#[test]
fn tcp_6_collapse_spares_what_waits() {
    let mut pair = pair();
    let (_, ours) = with_buffer(&mut pair, 20_000);
    let counters = pair.hosts[1].tcp.counters().clone();
    say(&mut pair, 1000, &Forged::plain(ACK, 500), (5001, ours));
    // Each occupies a frame.
    for number in (0..100).map(|segment| 1 + segment * 200) {
        say(&mut pair, 1000, &Forged::plain(ACK, 200), (number, ours));
        if counters.rcv_collapsed.get() > 0 {
            break;
        }
    }
    assert_eq!((counters.rcv_collapsed.get(), counters.ofo_pruned.get()), (1, 0));
}

#[test]
fn tcp_6_read_buffer_opens_its_window() {
    let mut pair = pair();
    let (server, ours) = with_buffer(&mut pair, 12_000);
    let mut next = 1;
    let mut fill = |pair: &mut Pair, len: u32, count: u32| {
        for _ in 0..count {
            let segment = Forged::plain(ACK, usize::try_from(len).unwrap());
            say(pair, 1000, &segment, (next, ours));
            next += len;
        }
        let mut room = vec![0; 100_000];
        pair.call(1, |tcp, out| tcp.read(server, &mut room, out)).unwrap()
    };
    assert_eq!(fill(&mut pair, 1448, 2), 2 * 1448);
    pair.call(1, |tcp, out| tcp.set_route_mtu(server, 552, out)).unwrap();
    // Each occupies a frame: the last one finds a full buffer.
    assert_eq!(fill(&mut pair, 80, 7), 7 * 80);
    assert_eq!(pair.hosts[1].tcp.counters().rcv_collapsed.get(), 1);
    let told = info(&pair, 1, server);
    assert!(told.receive_threshold_bytes >= 1448, "room for a segment of the peer's: {told:?}");
}

const SMALL: u32 = 2048;
const MIDDLE: u32 = 16 << 10;
const LARGE: u32 = 68 << 10;

/// Hosts that send packets of several segments, from so many frames of each size.
fn segmenting(faults: Faults, middle: u32, large: u32) -> Pair {
    let wmem = (4 << 20, 4 << 20);
    let config = TcpConfig { gso_bytes: 64_000, wmem, ..TcpConfig::default() };
    let mut pair = Pair::new(1, faults, [config; 2]);
    let classes = [(SMALL, 8192), (MIDDLE, middle), (LARGE, large)];
    let share: Vec<_> =
        classes.map(|(chunk_bytes, chunks)| ChunkClass { chunk_bytes, chunks }).into();
    let region = Region::allocate(region_bytes(std::slice::from_ref(&share)));
    pair.hosts[0].pool = carve(region, &[share]).unwrap().remove(0);
    pair
}

/// Writes, and returns the sizes of the frames that the packets left in.
fn write(pair: &mut Pair, socket: TcpSocket, len: usize) -> Vec<u32> {
    let written =
        pair.call(0, |tcp, out| tcp.write(socket, &vec![7; len], WriteFlags::default(), out));
    assert_eq!(written, Ok(len));
    std::mem::take(&mut pair.hosts[0].left_in)
}

fn read_all(pair: &mut Pair, client: TcpSocket, server: TcpSocket) -> usize {
    let (mut total, mut room) = (0, vec![0; 1 << 20]);
    while info(pair, 0, client).unacked_bytes > 0 || info(pair, 0, client).unsent_bytes > 0 {
        assert!(pair.step());
        while info(pair, 1, server).unread_bytes > 0 {
            total += pair.call(1, |tcp, out| tcp.read(server, &mut room, out)).unwrap();
        }
    }
    total
}

/// A connection whose congestion window has grown.
fn grown(pair: &mut Pair) -> (TcpSocket, TcpSocket) {
    let (client, server) = pair.open(80);
    for _ in 0..20 {
        write(pair, client, 300_000);
        assert_eq!(read_all(pair, client, server), 300_000);
    }
    (client, server)
}

/// Takes all frames that are at least as large as this.
fn take_large(pair: &mut Pair, chunk_bytes: u32) -> Vec<Frame> {
    let pool = &mut pair.hosts[0].pool;
    std::iter::from_fn(|| pool.allocate(chunk_bytes - BEFORE_PACKET_BYTES)).collect()
}

#[test]
fn tcp_6_packets_fit_largest_free_frame() {
    let mut pair = segmenting(Faults { delay_us: 100, ..Faults::default() }, 16, 4);
    let (client, server) = grown(&mut pair);
    let large = write(&mut pair, client, 150_000);
    assert!(large.iter().all(|&size| size == LARGE), "{large:?}");
    read_all(&mut pair, client, server);
    let taken = take_large(&mut pair, LARGE);
    let middle = write(&mut pair, client, 150_000);
    assert!(middle.len() >= 10 && middle.iter().all(|&size| size == MIDDLE), "{middle:?}");
    read_all(&mut pair, client, server);
    let rest = take_large(&mut pair, MIDDLE);
    // One packet at most: nothing is in flight whose ACK would send on.
    let small = write(&mut pair, client, 150_000);
    assert!(small.len() <= 64_000 / 1448 && small.iter().all(|&size| size == SMALL), "{small:?}");
    assert!(write(&mut pair, client, 1_000).is_empty());
    taken.into_iter().chain(rest).for_each(|frame| pair.hosts[0].pool.put(frame));
    assert_eq!(read_all(&mut pair, client, server), 151_000);
}

/// Each write of several segments: by the kernel's rule, and with the segment that ends it by itself.
#[test]
fn tcp_6_pushed_segments_leave_alone() {
    for pushes_large_packets in [true, false] {
        for nodelay in [true, false] {
            let config =
                TcpConfig { gso_bytes: 64_000, pushes_large_packets, ..TcpConfig::default() };
            let faults = Faults { delay_us: 100, ..Faults::default() };
            let mut pair = Pair::new(1, faults, [config; 2]);
            let (client, server) = pair.open(80);
            let options = TcpOptions { nodelay, ..TcpOptions::default() };
            pair.call(0, |tcp, out| tcp.set_options(client, options, out)).unwrap();
            for len in [2 * 1448, 2 * 1448 + 1, 3 * 1448, 10_000] {
                let pushes_before = pair.hosts[0].small_pushes;
                write(&mut pair, client, len);
                assert_eq!(read_all(&mut pair, client, server), len);
                let Host { large_pushes, small_pushes, .. } = pair.hosts[0];
                if pushes_large_packets {
                    assert!(large_pushes > 0);
                } else {
                    assert_eq!((large_pushes, small_pushes), (0, pushes_before + 1), "{len}");
                }
            }
        }
    }
}

/// Segments that no write ends, more than the window takes at first, and an end behind them.
#[test]
fn tcp_6_end_leaves_alone() {
    for pushes_large_packets in [true, false] {
        let config = TcpConfig { gso_bytes: 64_000, pushes_large_packets, ..TcpConfig::default() };
        let mut pair = Pair::new(1, Faults { delay_us: 100, ..Faults::default() }, [config; 2]);
        let (client, server) = pair.open(80);
        let flags = WriteFlags { more_follows: true, ..WriteFlags::default() };
        let written = pair.call(0, |tcp, out| tcp.write(client, &[7; 14 * 1448], flags, out));
        pair.call(0, |tcp, out| tcp.shutdown(client, Shutdown::Write, out)).unwrap();
        assert_eq!(read_all(&mut pair, client, server), written.unwrap());
        assert_eq!(pair.hosts[0].large_pushes > 0, pushes_large_packets);
    }
}

/// Packets that are sent again, too.
#[test]
fn tcp_6_few_large_frames_lose_nothing() {
    let faults = Faults { delay_us: 100, loss: 3, ..Faults::default() };
    for (middle, large) in [(0, 1), (1, 1), (2, 0), (0, 0)] {
        let mut pair = segmenting(faults, middle, large);
        grown(&mut pair);
    }
}

//! Any segments and calls at an open connection and at a listener, in virtual time: nothing panics,
//! memory stays within its limits, and when all sockets are closed, all frames and all memory have
//! returned (TCP-11).
//!
//! Input: a byte of settings (see [`World::new`]), then events as `arbitrary` reads them.
#![no_main]
#![allow(clippy::unwrap_used, reason = "a fuzz target panics")]

#[path = "../../../crates/stack/tests/offline/tcp/forged.rs"]
#[allow(dead_code, reason = "the laws of the tests need more")]
mod forged; // segments that a stranger makes up
#[path = "../../../crates/stack/tests/offline/tcp/pair.rs"]
#[allow(dead_code, reason = "the laws of the tests need more")]
mod pair; //   two hosts with a path between them

use std::net::{Shutdown, SocketAddr};
use std::num::NonZeroU32;

use arbitrary::{Arbitrary, Unstructured};
use forebay_stack::tcp::{MtuProbing, ReadMode, TcpConfig, TcpSocket, WriteFlags};
use libfuzzer_sys::fuzz_target;

use self::forged::{Forged, bytes_of};
use self::pair::{Faults, Pair};

/// Events of one input, at most.
const EVENTS_MAX: usize = 200;
/// Ports of the connection and of the listener.
const PORT: u16 = 80;
const LISTENER_PORT: u16 = 81;
/// Frames for segments of each host.
const CHUNKS: u32 = 1024;
/// Memory of all buffers together, and packets that one connection may hold for its buffer of that
/// size.
const MEMORY_BYTES: u64 = 1 << 20;
const LEEWAY_BYTES: u64 = 1 << 20;

#[derive(Arbitrary, Debug)]
enum Event {
    /// A segment to the connection, or to the listener.
    Segment {
        to_listener: bool,
        port: u8,
        segment: Fields,
    },
    Write {
        len: u16,
        is_urgent: bool,
        more_follows: bool,
        ends_record: bool,
    },
    Read {
        len: u16,
        peeks: bool,
    },
    ReadUrgent,
    Accept,
    Shutdown {
        receive: bool,
        send: bool,
    },
    Options {
        bits: u8,
        value: u16,
    },
    /// Time goes on to the next event, or by these milliseconds.
    Step,
    Wait {
        ms: u16,
    },
}

/// Fields of a segment; its numbers count from those that are expected. From a length of 128 on, the
/// bytes of `options` are numbers of options that exist: see [`World::options_of`].
#[derive(Arbitrary, Debug)]
struct Fields {
    seq: i16,
    ack: i16,
    is_far: bool,
    flags: u8,
    window: u16,
    urgent: u16,
    options: [u8; 12],
    options_len: u8,
    len: u8,
}

fuzz_target!(|input: &[u8]| {
    let mut input = Unstructured::new(input);
    let mut world = World::new(u8::arbitrary(&mut input).unwrap_or(0));
    for _ in 0..EVENTS_MAX {
        let event = if input.is_empty() { None } else { Event::arbitrary(&mut input).ok() };
        let Some(event) = event else { break };
        world.happen(&event);
        world.check();
    }
    world.end();
});

struct World {
    pair: Pair,
    client: TcpSocket,
    server: TcpSocket,
    listener: TcpSocket,
    accepted: Vec<TcpSocket>,
    /// Ends of the connection, seen from the stranger.
    ends: (SocketAddr, SocketAddr),
    /// Timestamps of the last answer: its own, and the one that it echoes.
    timestamps: (u32, u32),
}

impl World {
    fn new(kind: u8) -> Self {
        let config = TcpConfig {
            timestamps: kind & 1 == 0,
            sack: kind & 2 == 0,
            window_scaling: kind & 4 == 0,
            asks_ecn: kind & 8 != 0,
            gso_bytes: if kind & 16 == 0 { 0 } else { 60_000 },
            mtu_probing: if kind & 64 == 0 { MtuProbing::Off } else { MtuProbing::Always },
            memory_bytes: MEMORY_BYTES,
            max_syn_backlog: 16,
            max_time_wait: 8,
            max_orphans: 4,
            ..TcpConfig::default()
        };
        let faults = Faults { delay_us: 1000, merges: kind & 32 != 0, ..Faults::default() };
        let mut pair = Pair::with_chunks(CHUNKS, kind.into(), faults, [config; 2]);
        let (client, server) = pair.open(PORT);
        let address = pair.address(1, LISTENER_PORT);
        let tcp = &mut pair.hosts[1].tcp;
        let listener = tcp.socket().unwrap();
        tcp.bind(listener, address).unwrap();
        tcp.listen(listener, 4).unwrap();
        let flow = tcp.flow(server).unwrap();
        let ends = (flow.theirs, flow.ours);
        Self { pair, client, server, listener, accepted: Vec::new(), ends, timestamps: (0, 0) }
    }

    /// Answers of any kind are fine: the connection may have been reset.
    fn happen(&mut self, event: &Event) {
        let Self { pair, server, listener, accepted, .. } = self;
        let server = *server;
        match *event {
            Event::Segment { to_listener, port, ref segment } => {
                self.inject(to_listener, port, segment);
            }
            Event::Write { len, is_urgent, more_follows, ends_record } => {
                let bytes = vec![1; len.into()];
                let flags =
                    WriteFlags { is_urgent, more_follows, ends_record, ..WriteFlags::default() };
                let _ = pair.call(1, |tcp, out| tcp.write(server, &bytes, flags, out));
            }
            Event::Read { len, peeks } => {
                let mut room = vec![0; len.into()];
                let _ = pair.call(1, |tcp, out| match peeks {
                    true => tcp.peek(server, &mut room, out),
                    false => tcp.read(server, &mut room, out),
                });
            }
            Event::ReadUrgent => {
                let _ = pair.call(1, |tcp, out| tcp.read_urgent(server, ReadMode::Take, out));
            }
            Event::Accept => {
                if let Ok((socket, _)) = pair.hosts[1].tcp.accept(*listener) {
                    accepted.push(socket);
                }
            }
            Event::Shutdown { receive, send } => {
                let how = match (receive, send) {
                    (true, true) => Shutdown::Both,
                    (true, false) => Shutdown::Read,
                    (false, true) => Shutdown::Write,
                    (false, false) => return,
                };
                let _ = pair.call(1, |tcp, out| tcp.shutdown(server, how, out));
            }
            Event::Options { bits, value } => self.change_options(bits, value),
            Event::Step => {
                pair.step();
            }
            Event::Wait { ms } => self.wait(u64::from(ms) * 1000),
        }
    }

    fn inject(&mut self, to_listener: bool, port: u8, segment: &Fields) {
        let options = self.options_of(segment);
        let Self { pair, ends: (theirs, ours), timestamps, .. } = self;
        let (mut theirs, mut ours) = (*theirs, *ours);
        let (seq, ack) = pair.last[1];
        if to_listener {
            ours.set_port(LISTENER_PORT);
            theirs.set_port(1000 + u16::from(port % 8));
        }
        let scale = if segment.is_far { 1 << 16 } else { 1 };
        let forged = Forged {
            seq: i32::from(segment.seq) * scale,
            ack: i32::from(segment.ack) * scale,
            flags: segment.flags,
            window: segment.window,
            urgent: segment.urgent,
            options,
            len: usize::from(segment.len) * 8,
        };
        let Some(bytes) = bytes_of(&forged, pair, (theirs, ours), (ack, seq)) else { return };
        let (now_us, mut sent) = (pair.now_us, Vec::new());
        let host = &mut pair.hosts[1];
        if let Some(packet) = host.packet(&bytes) {
            host.deliver(packet, now_us, &mut sent);
        }
        if let Some(answered) = sent.iter().filter_map(|packet| timestamps_of(packet)).next_back() {
            *timestamps = answered;
        }
    }

    /// Options of a segment: any bytes, or timestamps near those of the connection and blocks of
    /// SACK near what was sent last.
    fn options_of(&self, segment: &Fields) -> Vec<u8> {
        const HAS_BLOCKS: u8 = 64;
        let Fields { options, options_len, .. } = segment;
        if *options_len < 128 {
            return options[..usize::from(*options_len) % (options.len() + 1)].to_vec();
        }
        let near = |base: u32, by: u8| base.wrapping_add_signed(by.cast_signed().into());
        let (theirs, ours) = self.timestamps;
        let [value, echoed, ref edges @ ..] = *options;
        let mut bytes = vec![1, 1, 8, 10];
        bytes.extend(near(ours, value).to_be_bytes());
        bytes.extend(near(theirs, echoed).to_be_bytes());
        if options_len & HAS_BLOCKS > 0 {
            let count = 1 + options_len % 2;
            bytes.extend([1, 1, 5, 2 + 8 * count]);
            let (seq, _) = self.pair.last[1];
            for &[a, b, c, d] in edges.as_chunks().0.iter().take(count.into()) {
                let left = seq.wrapping_add_signed(i16::from_le_bytes([a, b]).into());
                let right = left.wrapping_add_signed(i16::from_le_bytes([c, d]).into());
                bytes.extend([left.to_be_bytes(), right.to_be_bytes()].concat());
            }
        }
        bytes
    }

    fn change_options(&mut self, bits: u8, value: u16) {
        let Self { pair, server, .. } = self;
        let server = *server;
        let Ok(mut options) = pair.hosts[1].tcp.options(server) else { return };
        options.nodelay = bits & 1 != 0;
        options.cork = bits & 2 != 0;
        options.keepalive = bits & 4 != 0;
        options.oob_inline = bits & 8 != 0;
        options.keepalive_idle_us = 1_000_000;
        options.user_timeout_us = if bits & 16 == 0 { 0 } else { u64::from(value) * 1000 };
        options.max_segment = (bits & 32 != 0).then_some(value.clamp(88, 32_767));
        options.window_clamp = NonZeroU32::new(value.into()).filter(|_| bits & 64 != 0);
        options.sndbuf = (bits & 128 != 0).then_some(value.max(4608).into());
        let _ = pair.call(1, |tcp, out| tcp.set_options(server, options, out));
        let _ = pair.call(1, |tcp, out| tcp.set_quick_acks(server, bits & 1 == 0, out));
    }

    fn wait(&mut self, us: u64) {
        let end_us = self.pair.now_us + us;
        for _ in 0..1000 {
            let next_us = self.pair.next_us().unwrap_or(u64::MAX);
            if next_us > end_us || !self.pair.step() {
                break;
            }
        }
        self.pair.now_us = self.pair.now_us.max(end_us);
    }

    fn check(&self) {
        for host in &self.pair.hosts {
            let held = host.tcp.memory_bytes();
            assert!(held <= MEMORY_BYTES + LEEWAY_BYTES, "{held} bytes are held");
        }
    }

    fn end(mut self) {
        let Self { pair, client, server, listener, accepted, .. } = &mut self;
        for socket in accepted.drain(..).chain([*server, *listener]) {
            pair.call(1, |tcp, out| tcp.close(socket, out)).unwrap();
        }
        pair.call(0, |tcp, out| tcp.close(*client, out)).unwrap();
        pair.check_rest();
    }
}

/// Timestamps of a segment that begins its options with them, as all do here.
fn timestamps_of(packet: &[u8]) -> Option<(u32, u32)> {
    const OPTIONS_AT: usize = 40;
    let &[1, 1, 8, 10, a, b, c, d, e, f, g, h] = packet.get(OPTIONS_AT..)?.first_chunk()? else {
        return None;
    };
    Some((u32::from_be_bytes([a, b, c, d]), u32::from_be_bytes([e, f, g, h])))
}

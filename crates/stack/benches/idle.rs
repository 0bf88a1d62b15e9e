//! Work and memory beside idle connections: `idle CONNECTIONS ROUNDS` opens connections to a listener,
//! and then sends requests of 64 bytes on some of them, which are read and answered. It prints the
//! memory of an idle connection and the time of a round: request, answer, and its ACK.
//!
//! `valgrind --tool=callgrind --toggle-collect='*request*'` counts the instructions of the rounds.

#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a program for developers")]

#[allow(dead_code, reason = "also for tests")]
#[path = "../tests/offline/tcp/pair.rs"]
mod pair; // the hosts

use std::time::Instant;

use etherparse::PacketBuilder;
use forebay_stack::tcp::{TcpConfig, TcpSocket};

use self::pair::Host;

/// Frames of the host.
const CHUNKS: u32 = 1024;
/// Connections that are active: a prime, so that rounds go through them in no order of memory.
const ACTIVE: u32 = 997;
/// First sequence number of each client.
const CLIENT_SEQ: u32 = 1000;
const MSS: u16 = 1460;
const PORT: u16 = 80;
const REQUEST_BYTES: u32 = 64;

fn main() {
    let numbers = std::env::args().skip(1).filter_map(|argument| argument.parse().ok());
    let numbers: Vec<u32> = numbers.collect();
    // `cargo bench` passes options of its own.
    let [connections, rounds] = numbers[..] else { return println!("{}", measured(1000, 1000)) };
    println!("{}", measured(connections, rounds));
}

/// Figures of a run, as JSON.
fn measured(connections: u32, rounds: u32) -> String {
    let before = resident_bytes();
    let mut server = Server::new(connections);
    (0..connections).for_each(|number| server.open(number));
    let bytes = (resident_bytes() - before) / u64::from(connections);
    let active = ACTIVE.min(connections);
    let mut streams: Vec<_> = (0..active)
        // Spread over all of them.
        .map(|at| Stream::new(u64::from(at) * u64::from(connections) / u64::from(active)))
        .collect();
    let began = Instant::now();
    for round in 0..rounds {
        let at = round.wrapping_mul(7919) % active;
        server.request(&mut streams[at as usize]);
    }
    let ns = began.elapsed().as_nanos() / u128::from(rounds);
    format!(r#"{{"connections":{connections},"bytes_each":{bytes},"ns_per_round":{ns}}}"#)
}

/// A host with a listener, and the connections that it has accepted.
struct Server {
    host: Host,
    listener: TcpSocket,
    now_us: u64,
    /// Socket of each client, and its first sequence number.
    clients: Vec<(TcpSocket, u32)>,
}

/// State of an active client.
struct Stream {
    client: u32,
    requests: u32,
}

impl Stream {
    fn new(client: u64) -> Self {
        Self { client: u32::try_from(client).unwrap(), requests: 0 }
    }
}

impl Server {
    fn new(connections: u32) -> Self {
        let config = TcpConfig { max_sockets: connections + 1, ..TcpConfig::default() };
        let mut host = Host::new(2, config, CHUNKS);
        let listener = host.tcp.socket().unwrap();
        host.tcp.bind(listener, (host.address, PORT).into()).unwrap();
        host.tcp.listen(listener, 16).unwrap();
        let clients = Vec::with_capacity(connections as usize);
        Self { host, listener, now_us: 1_000_000, clients }
    }

    /// Delivers a segment of a client, and returns what the host sends.
    fn deliver(&mut self, client: u32, seq: u32, ack: Option<u32>, payload: &[u8]) -> Vec<Vec<u8>> {
        let [a, b, c, d] = (0x0a00_0000 + client).to_be_bytes();
        let builder = PacketBuilder::ipv4([a, b, c, d], [192, 0, 2, 2], 64);
        let builder = builder.tcp(4000, PORT, seq, u16::MAX);
        let mut bytes = Vec::new();
        match ack {
            Some(ack) => builder.ack(ack).write(&mut bytes, payload).unwrap(),
            None => {
                let options = [etherparse::TcpOptionElement::MaximumSegmentSize(MSS)];
                let builder = builder.syn().options(&options).unwrap();
                builder.write(&mut bytes, payload).unwrap();
            }
        }
        let packet = self.host.packet(&bytes).unwrap();
        let mut sent = Vec::new();
        self.host.deliver(packet, self.now_us, &mut sent);
        sent
    }

    /// Opens a connection of a client, which stays idle.
    fn open(&mut self, client: u32) {
        self.now_us += 10;
        let answer = self.deliver(client, CLIENT_SEQ, None, &[]).remove(0);
        let first = u32::from_be_bytes(answer[24..28].try_into().unwrap());
        self.deliver(client, CLIENT_SEQ + 1, Some(first.wrapping_add(1)), &[]);
        let (socket, _) = self.host.tcp.accept(self.listener).unwrap();
        self.clients.push((socket, first));
        self.host.call(self.now_us, &mut Vec::new(), |tcp, out| tcp.advance(out));
    }

    /// A request of a client, its answer, and the ACK of that.
    #[inline(never)]
    fn request(&mut self, stream: &mut Stream) {
        self.now_us += 10;
        let (socket, first) = self.clients[stream.client as usize];
        let done = stream.requests * REQUEST_BYTES;
        let (seq, ack) = (CLIENT_SEQ + 1 + done, first.wrapping_add(1 + done));
        let (mut room, mut sent) = ([7; REQUEST_BYTES as usize], Vec::new());
        self.deliver(stream.client, seq, Some(ack), &room);
        let read =
            self.host.call(self.now_us, &mut sent, |tcp, out| tcp.read(socket, &mut room, out));
        assert_eq!(read, Ok(room.len()));
        let written = self.host.call(self.now_us, &mut sent, |tcp, out| {
            tcp.write(socket, &room, Default::default(), out)
        });
        assert_eq!(written, Ok(room.len()));
        self.deliver(stream.client, seq + REQUEST_BYTES, Some(ack + REQUEST_BYTES), &[]);
        self.host.call(self.now_us, &mut Vec::new(), |tcp, out| tcp.advance(out));
        stream.requests += 1;
    }
}

/// Memory of this process that is in use.
fn resident_bytes() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

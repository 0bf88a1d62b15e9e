//! Memory of idle connections, with all that the application and the engine have of them.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};

use etherparse::{PacketBuilder, PacketBuilderStep, TcpHeader, TcpOptionElement};
use forebay_rx::Packet;
use forebay_rx::hash::FlowHash;
use forebay_rx::packet::Arrival;
use forebay_rx::parse::{Link, Verify, parse_packet};
use forebay_rx::sink::{Sink, SinkCounters, SinkError};
use forebay_stack::network::Identity;
use forebay_stack::tcp::TcpOptions;
use forebay_testkit::memory::{CountingAllocator, heap};

use super::super::rig::{host, neighbour, own_address};
use super::super::shared::{CpuIndex, NetState};
use super::super::{Net, NetConfig};
use super::{TcpListener, TcpStream};

/// Connections, and their number from which on each has to be small: tables grow several times between them, and what
/// the host has of its own, without connections, weighs little by then.
const CONNECTIONS: u32 = 100_000;
const COUNTED_FROM: u32 = 50_000;
/// Heap of a connection, by [`heap`]: its own blocks and its part of all tables, with their free places.
const CONNECTION_BYTES: i64 = 1024;
/// First sequence number of each client.
const CLIENT_SEQ: u32 = 1000;
const PORT: u16 = 80;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Sink that remembers the sequence number of the last packet.
#[derive(Clone, Default)]
struct LastSeq(Arc<Mutex<u32>>, Arc<SinkCounters>);

impl Sink for LastSeq {
    fn send(&mut self, packets: &mut Vec<Packet>) -> Result<(), SinkError> {
        for packet in packets.drain(..) {
            // Behind an IPv4 header and the ports.
            let seq = packet.frame.data()[24..28].try_into().unwrap();
            *self.0.lock().unwrap() = u32::from_be_bytes(seq);
        }
        Ok(())
    }

    fn counters(&self) -> &Arc<SinkCounters> {
        &self.1
    }
}

/// Beginning of a segment of a client.
fn segment(client: u32, seq: u32) -> PacketBuilderStep<TcpHeader> {
    let IpAddr::V4(ours) = own_address(0) else { unreachable!() };
    let theirs = Ipv4Addr::from_bits(0x0a0a_0000 + client);
    let builder = PacketBuilder::ipv4(theirs.octets(), ours.octets(), 64);
    builder.tcp(4000, PORT, seq, u16::MAX)
}

/// A host with a listener.
struct Server {
    state: Arc<NetState>,
    on: Arc<Identity>,
    sent: LastSeq,
    listener: TcpListener,
    segments: Vec<Packet>,
}

impl Server {
    fn new() -> Self {
        let sent = LastSeq::default();
        let state = host(vec![vec![Box::new(sent.clone())]], NetConfig::TCP);
        let local = SocketAddr::new(own_address(0), PORT);
        let listener = TcpListener::bind(&Net(Arc::clone(&state)), local).unwrap();
        listener.set_nonblocking(true);
        let on = state.devices[0].identity.load_full();
        Self { state, on, sent, listener, segments: Vec::new() }
    }

    /// Delivers a segment of a client; without `ack`, its SYN.
    fn deliver(&mut self, client: u32, seq: u32, ack: Option<u32>) {
        let builder = segment(client, seq);
        let mut bytes = Vec::new();
        match ack {
            Some(ack) => builder.ack(ack).write(&mut bytes, &[]).unwrap(),
            None => {
                let options = [
                    TcpOptionElement::MaximumSegmentSize(1460),
                    TcpOptionElement::SelectiveAcknowledgementPermitted,
                ];
                builder.syn().options(&options).unwrap().write(&mut bytes, &[]).unwrap();
            }
        }
        self.receive(client, &bytes);
    }

    fn receive(&mut self, client: u32, bytes: &[u8]) {
        let len = u32::try_from(bytes.len()).unwrap();
        let mut transmitter = self.state.transmitter_of(CpuIndex(0));
        let mut frame = transmitter.pool().allocate(len).unwrap();
        frame.copy_from(bytes);
        let mut packet = Packet::received(frame, Arrival(0), len, Link::Ip);
        parse_packet(&mut packet, Verify::Checksums, transmitter.pool()).unwrap();
        drop(transmitter);
        packet.hash = FlowHash(client + 1);
        self.segments.push(packet);
        self.state.receive_segments(&self.on, CpuIndex(0), &mut self.segments);
    }

    /// Accepts a connection of a client, which stays idle but for its keep-alive timer.
    fn open(&mut self, client: u32) -> TcpStream {
        self.deliver(client, CLIENT_SEQ, None);
        let first = *self.sent.0.lock().unwrap();
        self.deliver(client, CLIENT_SEQ + 1, Some(first.wrapping_add(1)));
        let (stream, _) = self.listener.accept().unwrap();
        let set = |options: &mut TcpOptions| (options.keepalive, options.nodelay) = (true, true);
        stream.set_option(set).unwrap();
        stream
    }
}

#[test]
fn tcp_12_idle_connection_with_handle_is_small() {
    let mut server = Server::new();
    let mut streams = Vec::with_capacity(CONNECTIONS as usize);
    let (before, mut most) = (heap().bytes, 0);
    for client in 1..=CONNECTIONS {
        streams.push(server.open(client));
        if client >= COUNTED_FROM {
            most = most.max((heap().bytes - before) / i64::from(client));
        }
    }
    assert!(streams.iter().all(|stream| stream.info().unwrap().state.name() == "ESTAB"));
    let each = (heap().bytes - before) / i64::from(CONNECTIONS);
    eprintln!("{each} bytes each, {most} at most");
    assert!(most <= CONNECTION_BYTES, "{most} bytes each");
    assert!(most > 500, "nothing was counted");
}

/// A connection that was begun and never opened says why, as the calls that wait do.
#[test]
fn tcp_17_unopened_connection_tells_the_end() {
    let state = host(vec![vec![Box::new(LastSeq::default())]], NetConfig::TCP);
    let stream = TcpStream::begin_connect(&Net(Arc::clone(&state)), neighbour(0)).unwrap();
    assert!(stream.take_error().unwrap().is_none());
    state.end();
    assert_eq!(stream.take_error().unwrap_err().kind(), ErrorKind::BrokenPipe);
}

/// Nobody would be woken: the connection was readable before, by the byte ahead of the urgent one.
#[test]
fn tcp_17_urgent_byte_is_not_awaited() {
    let mut server = Server::new();
    let stream = server.open(1);
    let ack = server.sent.0.lock().unwrap().wrapping_add(1);
    for (seq, pointer, payload) in [(1, 2, b"a"), (2, 1, b"!")] {
        let mut bytes = Vec::new();
        let builder = segment(1, CLIENT_SEQ + seq).ack(ack).urg(pointer);
        builder.write(&mut bytes, payload).unwrap();
        server.receive(1, &bytes);
        assert_eq!(stream.peek_urgent().ok(), (seq == 2).then_some(b'!'));
        let urgent = stream.read_urgent();
        match seq {
            1 => assert_eq!(urgent.unwrap_err().kind(), ErrorKind::WouldBlock, "announced only"),
            _ => assert_eq!(urgent.unwrap(), b'!'),
        }
    }
}

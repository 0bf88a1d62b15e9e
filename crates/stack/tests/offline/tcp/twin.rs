//! Streams to and from another TCP, smoltcp's, over a bad path: as client and as server, every byte
//! arrives once and in order, and both ends come to an end.

use std::collections::{BTreeMap, VecDeque};
use std::net::{Shutdown, SocketAddr};

use forebay_stack::tcp::{Tcp, TcpConfig, TcpError, TcpSocket};
use proptest::prelude::*;
use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::phy::{self, Device, DeviceCapabilities, Medium};
use smoltcp::socket::tcp;
use smoltcp::time::Instant;
use smoltcp::wire::{HardwareAddress, IpAddress, IpCidr};

use super::pair::{Faults, Host, MTU};
use super::streams::byte_of;

/// Steps after which a stream counts as hanging.
const STEPS: u32 = 400_000;
const PORT: u16 = 80;
const TWINS_PORT: u16 = 40_000;
const TWINS_ADDRESS: [u8; 4] = [192, 0, 2, 2];
/// Frames for segments.
const CHUNKS: u32 = 4096;

/// Packets to and from the twin.
#[derive(Default)]
struct Wire {
    received: VecDeque<Vec<u8>>,
    sent: Vec<Vec<u8>>,
}

struct Received(Vec<u8>);

struct Sending<'a>(&'a mut Vec<Vec<u8>>);

impl phy::RxToken for Received {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, take: F) -> R {
        take(&self.0)
    }
}

impl phy::TxToken for Sending<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, fill: F) -> R {
        let mut packet = vec![0; len];
        let result = fill(&mut packet);
        self.0.push(packet);
        result
    }
}

impl Device for Wire {
    type RxToken<'a> = Received;
    type TxToken<'a> = Sending<'a>;

    fn receive(&mut self, _: Instant) -> Option<(Received, Sending<'_>)> {
        let packet = self.received.pop_front()?;
        Some((Received(packet), Sending(&mut self.sent)))
    }

    fn transmit(&mut self, _: Instant) -> Option<Sending<'_>> {
        Some(Sending(&mut self.sent))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        (capabilities.medium, capabilities.max_transmission_unit) = (Medium::Ip, MTU as usize);
        capabilities
    }
}

/// Progress of an end: bytes sent and received, and if the peer's end was seen.
#[derive(Clone, Copy, Default, Debug)]
struct Progress {
    sent: usize,
    has_closed: bool,
    received: usize,
    is_over: bool,
}

/// Host of ours and a twin, with a path between them.
struct Twins {
    host: Host,
    socket: TcpSocket,
    interface: Interface,
    wire: Wire,
    sockets: SocketSet<'static>,
    twin: SocketHandle,
    faults: Faults,
    random: u64,
    now_us: u64,
    /// Packets under way, by arrival and number; true to our host.
    path: BTreeMap<(u64, u64), (bool, Vec<u8>)>,
    count: u64,
}

impl Twins {
    fn new(seed: u64, faults: Faults, config: TcpConfig, buffers: [u16; 2]) -> Self {
        let mut host = Host::new(1, config, CHUNKS);
        let socket = host.tcp.socket().unwrap();
        let mut wire = Wire::default();
        let mut settings = Config::new(HardwareAddress::Ip);
        settings.random_seed = seed;
        let mut interface = Interface::new(settings, &mut wire, Instant::ZERO);
        let [a, b, c, d] = TWINS_ADDRESS;
        interface.update_ip_addrs(|addresses| {
            addresses.push(IpCidr::new(IpAddress::v4(a, b, c, d), 24)).unwrap();
        });
        let [receive, send] =
            buffers.map(|bytes| tcp::SocketBuffer::new(vec![0; usize::from(bytes).max(2000)]));
        let mut sockets = SocketSet::new(Vec::new());
        let twin = sockets.add(tcp::Socket::new(receive, send));
        let (path, count, now_us) = (BTreeMap::new(), 0, 0);
        let random = seed | 1;
        Self { host, socket, interface, wire, sockets, twin, faults, random, now_us, path, count }
    }

    /// A number below `limit` (xorshift).
    fn random(&mut self, limit: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % limit
    }

    fn twin(&mut self) -> &mut tcp::Socket<'static> {
        self.sockets.get_mut(self.twin)
    }

    /// Opens the connection, from our host or from the twin.
    fn open(&mut self, by_us: bool) {
        let there = SocketAddr::from((TWINS_ADDRESS, PORT));
        let here = SocketAddr::new(self.host.address, PORT);
        let mut sent = Vec::new();
        if by_us {
            self.twin().listen(PORT).unwrap();
            let (socket, from) = (self.socket, SocketAddr::new(here.ip(), 0));
            let begun = self.host.call(self.now_us, &mut sent, |tcp, out| {
                tcp.connect(socket, (from, there), MTU, out)
            });
            assert_eq!(begun, Err(TcpError::InProgress));
            return self.carry(false, sent);
        }
        let listener = self.socket;
        self.host.tcp.bind(listener, here).unwrap();
        self.host.tcp.listen(listener, 4).unwrap();
        let context = self.interface.context();
        let twin = self.sockets.get_mut::<tcp::Socket<'_>>(self.twin);
        twin.connect(context, (IpAddress::v4(192, 0, 2, 1), PORT), TWINS_PORT).unwrap();
        for _ in 0..STEPS {
            if let Ok((socket, _)) = self.host.tcp.accept(listener) {
                self.socket = socket;
                self.host
                    .call(self.now_us, &mut sent, |tcp, out| tcp.close(listener, out))
                    .unwrap();
                return self.carry(false, sent);
            }
            self.step();
        }
        panic!("the connection was not opened");
    }

    /// Sends packets along the path.
    fn carry(&mut self, to_us: bool, sent: Vec<Vec<u8>>) {
        for bytes in sent {
            if self.random(100) < self.faults.loss.into() {
                continue;
            }
            let copies = 1 + u64::from(self.random(100) < self.faults.repeat.into());
            for _ in 0..copies {
                let is_late = self.random(100) < self.faults.reorder.into();
                let extra_us =
                    if is_late { self.random(self.faults.delay_us * 2 + 1000) } else { 0 };
                let at_us = self.now_us + self.faults.delay_us + extra_us;
                self.count += 1;
                self.path.insert((at_us, self.count), (to_us, bytes.clone()));
            }
        }
    }

    fn instant(&self) -> Instant {
        Instant::from_micros(i64::try_from(self.now_us).unwrap())
    }

    fn poll_twin(&mut self) {
        let now = self.instant();
        let _ = self.interface.poll(now, &mut self.wire, &mut self.sockets);
        let sent = std::mem::take(&mut self.wire.sent);
        self.carry(true, sent);
    }

    /// Goes on to the next event.
    fn step(&mut self) {
        self.poll_twin();
        let now = self.instant();
        let twins = self.interface.poll_delay(now, &self.sockets);
        let twins_us = twins.map(|delay| self.now_us + delay.total_micros().max(1));
        let arrival_us = self.path.keys().next().map(|(at_us, _)| *at_us);
        let next_us = [self.host.tcp.next_timer_us(), twins_us, arrival_us];
        // The end of the twin's TIME-WAIT would take what its application has not read.
        let is_unread = self.twin().recv_queue() > 0;
        let limit_us = if is_unread { self.now_us + 1000 } else { u64::MAX };
        // Without an event, the ends wait for their applications.
        let next_us = next_us.into_iter().flatten().min().unwrap_or(self.now_us + 1000);
        let next_us = next_us.min(limit_us);
        self.now_us = self.now_us.max(next_us);
        let mut sent = Vec::new();
        while let Some(entry) = self.path.first_entry().filter(|entry| entry.key().0 <= self.now_us)
        {
            let (to_us, bytes) = entry.remove();
            if !to_us {
                self.wire.received.push_back(bytes);
            } else if let Some(packet) = self.host.packet(&bytes) {
                self.host.deliver(packet, self.now_us, &mut sent);
            }
        }
        self.host.call(self.now_us, &mut sent, Tcp::advance);
        self.carry(false, sent);
    }

    /// Random part of what is left to be written, and if this is the end.
    fn next_bytes(&mut self, progress: &Progress, len: usize) -> Vec<u8> {
        let most = usize::try_from(self.random(6000) + 1).unwrap();
        (progress.sent..len.min(progress.sent + most)).map(byte_of).collect()
    }

    /// Writes and reads at our end.
    fn use_ours(&mut self, progress: &mut Progress, (len, twins_len): (usize, usize)) {
        let (socket, now_us) = (self.socket, self.now_us);
        let mut sent = Vec::new();
        let bytes = self.next_bytes(progress, len);
        if self.random(3) > 0 && !progress.has_closed {
            let result = self.host.call(now_us, &mut sent, |tcp, out| match bytes.is_empty() {
                true => tcp.shutdown(socket, Shutdown::Write, out).map(|()| 0),
                false => tcp.write(socket, &bytes, Default::default(), out),
            });
            match result {
                Ok(written) => progress.sent += written,
                Err(TcpError::WouldBlock | TcpError::NotConnected) => {}
                Err(error) => panic!("a write failed: {error:?}"),
            }
            progress.has_closed = bytes.is_empty() && result.is_ok();
        }
        let mut room = vec![0; usize::try_from(self.random(9000) + 1).unwrap()];
        if self.random(4) > 0 && !progress.is_over {
            match self.host.call(now_us, &mut sent, |tcp, out| tcp.read(socket, &mut room, out)) {
                Ok(0) => progress.end(twins_len),
                Ok(read) => progress.take(&room[..read]),
                Err(TcpError::WouldBlock | TcpError::NotConnected) => {}
                Err(error) => panic!("a read failed: {error:?}"),
            }
        }
        self.carry(false, sent);
    }

    /// Writes and reads at the twin's end.
    fn use_twin(&mut self, progress: &mut Progress, (len, ours_len): (usize, usize)) {
        let bytes = self.next_bytes(progress, len);
        let (writes, reads) = (self.random(3) > 0, self.random(4) > 0);
        let mut room = vec![0; usize::try_from(self.random(9000) + 1).unwrap()];
        let twin = self.twin();
        if writes && twin.may_send() && !progress.has_closed {
            if !bytes.is_empty() {
                progress.sent += twin.send_slice(&bytes).unwrap();
            } else if twin.send_queue() == 0 {
                // In CLOSING, the twin does not send lost data again.
                twin.close();
                progress.has_closed = true;
            }
        }
        if reads && !progress.is_over {
            match twin.recv_slice(&mut room) {
                Ok(read) => progress.take(&room[..read]),
                Err(tcp::RecvError::Finished) => progress.end(ours_len),
                // A twin that is closed forgets that there was a FIN; else it is not open yet.
                Err(tcp::RecvError::InvalidState) if twin.state() == tcp::State::Closed => {
                    progress.end(ours_len);
                }
                Err(tcp::RecvError::InvalidState) => {}
            }
        }
    }
}

impl Progress {
    fn take(&mut self, bytes: &[u8]) {
        for (at, &byte) in bytes.iter().enumerate() {
            assert_eq!(byte, byte_of(self.received + at), "byte {}", self.received + at);
        }
        self.received += bytes.len();
    }

    fn end(&mut self, len: usize) {
        assert_eq!(self.received, len, "the end came early");
        self.is_over = true;
    }
}

/// Sends streams both ways, and checks that both arrive and that nothing is left.
fn run(mut twins: Twins, by_us: bool, [len, twins_len]: [usize; 2]) {
    twins.open(by_us);
    let (mut ours, mut others) = (Progress::default(), Progress::default());
    let mut steps = 0;
    while !(ours.is_over && others.is_over) {
        twins.use_ours(&mut ours, (len, twins_len));
        twins.use_twin(&mut others, (twins_len, len));
        twins.step();
        steps += 1;
        let info = twins.host.tcp.info(twins.socket);
        assert!(steps < STEPS, "hangs at {} us: {ours:?} {others:?} {info:?}", twins.now_us);
    }
    let (socket, mut sent) = (twins.socket, Vec::new());
    twins.host.call(twins.now_us, &mut sent, |tcp, out| tcp.close(socket, out)).unwrap();
    twins.carry(false, sent);
    let is_left = |host: &Host| host.tcp.socket_count() > 0 || host.tcp.time_wait_count() > 0;
    for _ in 0..STEPS {
        if !is_left(&twins.host) {
            break;
        }
        twins.step();
    }
    assert!(!is_left(&twins.host), "a socket is left: {:?}", twins.host);
    assert_eq!(twins.host.tcp.memory_bytes(), 0);
    twins.host.pool.flush();
    assert_eq!(twins.host.pool.in_use(), 0, "frames are away");
}

prop_compose! {
    fn faults()(
        loss in 0_u32..12, repeat in 0_u32..10, reorder in 0_u32..30, delay_us in 0_u64..60_000,
    ) -> Faults {
        Faults { loss, repeat, reorder, delay_us, ..Faults::default() }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn tcp_6_streams_with_a_twin_are_whole(
        seed: u64, faults in faults(), by_us: bool, lens: [u16; 2], buffers: [u16; 2],
        rmem in 4_000_u32..300_000, timestamps: bool, sack: bool, gso: bool,
    ) {
        let config = TcpConfig {
            timestamps,
            sack,
            rmem: (rmem, rmem * 4),
            gso_bytes: if gso { 60_000 } else { 0 },
            ..TcpConfig::default()
        };
        run(Twins::new(seed, faults, config, buffers), by_us, lens.map(usize::from));
    }
}

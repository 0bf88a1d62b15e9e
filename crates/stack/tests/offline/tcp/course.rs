//! Bulk streams of several connections through impaired paths, in virtual time.

use forebay_stack::tcp::{
    Algorithm, Tcp, TcpConfig, TcpError, TcpInfo, TcpOptions, TcpOut, TcpSocket,
};

use super::impaired_path::{ImpairedPath, Impairments, PassageCounts};
use super::pair::{Host, MTU};

/// Frames of a host: a full window of the largest course and what is not read yet.
const CHUNKS: u32 = 24 << 10;
/// Bytes of a call.
const CALL_BYTES: usize = 64 << 10;

/// Settings of a course.
#[derive(Clone, Copy, Debug)]
pub(super) struct CoursePlan {
    pub(super) seed: u64,
    /// Path of the data, and of the ACKs.
    pub(super) there: Impairments,
    pub(super) back: Impairments,
    pub(super) config: TcpConfig,
    /// Congestion control of each connection.
    pub(super) flows: &'static [Algorithm],
    pub(super) lasts_us: u64,
    /// Times at which the path takes ACKs: multiples of this, in µs, as many radios do; 0 for any time.
    pub(super) ack_turn_us: u64,
}

/// Result of a course.
#[derive(Debug)]
pub(super) struct CourseResult {
    /// Bytes that each connection's reader got.
    pub(super) bytes: Vec<u64>,
    pub(super) lasts_us: u64,
    pub(super) infos: Vec<TcpInfo>,
    /// Packets on the way of the data.
    pub(super) path: PassageCounts,
    /// Segments sent again, and time-outs.
    pub(super) retransmitted: u64,
    pub(super) timeouts: u64,
}

impl CourseResult {
    /// Goodput of all connections, in kbit/s.
    pub(super) fn goodput_kbps(&self) -> u64 {
        self.bytes.iter().sum::<u64>() * 8000 / self.lasts_us
    }
}

/// Two hosts and the paths between them.
struct Course {
    hosts: [Host; 2],
    now_ns: u64,
    paths: [ImpairedPath<Vec<u8>>; 2],
    ack_turn_us: u64,
}

/// Sends on all connections for as long as the plan says.
pub(super) fn run(plan: &CoursePlan) -> CourseResult {
    let mut course = Course::new(plan);
    let ends: Vec<_> = (80..).zip(plan.flows).map(|(port, &of)| course.open(port, of)).collect();
    let mut bytes = vec![0; ends.len()];
    let (began_ns, began) = (course.now_ns, course.counts());
    let block = vec![7; CALL_BYTES];
    let mut room = vec![0; CALL_BYTES];
    while course.now_ns - began_ns < plan.lasts_us * 1000 {
        for (&(client, server), bytes) in ends.iter().zip(&mut bytes) {
            while course.call(0, |tcp, out| tcp.write(client, &block, Default::default(), out))
                == Ok(CALL_BYTES)
            {}
            while let Ok(read) = course.call(1, |tcp, out| tcp.read(server, &mut room, out)) {
                *bytes += read as u64;
            }
        }
        course.step();
    }
    let ended = course.counts();
    let info = |client| course.hosts[0].tcp.info(client).unwrap().unwrap();
    CourseResult {
        bytes,
        lasts_us: (course.now_ns - began_ns) / 1000,
        infos: ends.iter().map(|&(client, _)| info(client)).collect(),
        path: course.paths[0].counts(),
        retransmitted: ended[0] - began[0],
        timeouts: ended[1] - began[1],
    }
}

impl Course {
    fn new(plan: &CoursePlan) -> Self {
        let CoursePlan { seed, there, back, config, .. } = *plan;
        Self {
            hosts: [1, 2].map(|last| Host::new(last, config, CHUNKS)),
            now_ns: 1_000_000,
            paths: [ImpairedPath::new(seed, there), ImpairedPath::new(seed + 1, back)],
            ack_turn_us: plan.ack_turn_us,
        }
    }

    /// Segments that the sender sent again, and its time-outs.
    fn counts(&self) -> [u64; 2] {
        let counters = self.hosts[0].tcp.counters();
        [counters.retrans_segs.get(), counters.timeouts.get()]
    }

    fn call<R>(&mut self, host: usize, act: impl FnOnce(&mut Tcp, &mut TcpOut<'_>) -> R) -> R {
        let mut sent = Vec::new();
        let result = self.hosts[host].call(self.now_ns / 1000, &mut sent, act);
        self.carry(host, sent);
        result
    }

    fn carry(&mut self, from: usize, sent: Vec<Vec<u8>>) {
        let turn_ns = self.ack_turn_us * 1000;
        let at_ns = match from {
            1 if turn_ns > 0 => self.now_ns.next_multiple_of(turn_ns),
            _ => self.now_ns,
        };
        for bytes in sent {
            // The outcome is among the counts.
            let _ = self.paths[from].offer(at_ns, bytes.len(), bytes);
        }
    }

    /// Goes on to the next event.
    fn step(&mut self) {
        let timers = self.hosts.iter().filter_map(|host| host.tcp.next_timer_us());
        let timers = timers.map(|at_us| at_us * 1000);
        let arrivals = self.paths.iter().filter_map(ImpairedPath::next_ns);
        let next_ns = timers.chain(arrivals).min().expect("a stream waits for something");
        self.now_ns = self.now_ns.max(next_ns);
        for from in 0..2 {
            let to = 1 - from;
            while let Some(bytes) = self.paths[from].take(self.now_ns) {
                let mut sent = Vec::new();
                let packet = self.hosts[to].packet(&bytes).expect("a host has frames enough");
                self.hosts[to].deliver(packet, self.now_ns / 1000, &mut sent);
                self.carry(to, sent);
            }
        }
        for host in 0..2 {
            self.call(host, Tcp::advance);
        }
    }

    /// Opens a connection from host 0 to host 1. A SYN may be lost.
    fn open(&mut self, port: u16, algorithm: Algorithm) -> (TcpSocket, TcpSocket) {
        let there = (self.hosts[1].address, port).into();
        let listener = self.hosts[1].tcp.socket().unwrap();
        self.hosts[1].tcp.bind(listener, there).unwrap();
        self.hosts[1].tcp.listen(listener, 16).unwrap();
        let client = self.hosts[0].tcp.socket().unwrap();
        let options = TcpOptions { congestion: Some(algorithm), ..TcpOptions::default() };
        self.call(0, |tcp, out| tcp.set_options(client, options, out)).unwrap();
        let here = (self.hosts[0].address, 0).into();
        let begun = self.call(0, |tcp, out| tcp.connect(client, (here, there), MTU, out));
        assert_eq!(begun, Err(TcpError::InProgress));
        loop {
            if let Ok((server, _)) = self.hosts[1].tcp.accept(listener) {
                return (client, server);
            }
            self.step();
        }
    }
}

//! Sockets on an interface that the kernel has too, with its addresses, neighbours and ports.

use std::io::ErrorKind;
use std::net::UdpSocket as KernelSocket;
use std::thread::sleep;
use std::time::Duration;

use forebay::net::{Datagrams, Net, NetConfig, NetEngine, Stack, UdpSocket};
use forebay_device::{Device, DeviceConfig, Via};
use forebay_engine::{Config, CpuThread};
use forebay_rx::CpuId;
use forebay_testkit::namespaces::cable::{Cable, Namespace};
use forebay_testkit::namespaces::command;

use crate::sockets::Trial;
use crate::sockets::rig::Running;

/// Looks at an address, one each 10 ms, until it may be used, at most.
const LOOKS_MAX: u32 = 6000;

/// Datagrams sent, one each 100 ms, until the neighbour is known again, at most.
const SENDS_MAX: u32 = 300;

pub(crate) const TRIALS: &[Trial] = &[
    ("af_xdp_sockets_beside_the_kernel", over_af_xdp),
    ("af_packet_sockets_silence_the_kernel", over_af_packet),
    ("first_datagram_waits_for_kernel_neighbour", first_goes_by_kernel),
    ("promise_8_taken_device_resolves_neighbours_itself", all_taken),
    ("promise_8_taken_device_ignores_kernels_neighbours", changed_before),
    ("promise_8_stale_neighbour_is_asked_again", changed_meanwhile),
    ("udp_26_proven_address_is_taken_up", proven_meanwhile),
    ("udp_27_source_is_the_routes", source_of_route),
    ("promise_13_datagrams_larger_than_frames_come_whole", larger_than_frames),
    ("port_is_ours_or_the_kernels", ports),
];

/// Two hosts connected by a veth; the near one is under test.
pub(crate) struct Hosts {
    pub(crate) near: Namespace,
    pub(crate) far: Namespace,
}

impl Hosts {
    pub(crate) fn new() -> Self {
        let hosts = Self { near: Namespace::new(), far: Namespace::new() };
        Cable { near: (&hosts.near, "ska"), far: (&hosts.far, "skb") }.lay();
        hosts.near.command("ip addr add 10.9.0.1/24 dev ska");
        hosts.far.command("ip addr add 10.9.0.2/24 dev skb");
        hosts
    }

    fn over(&self, via: Via) -> (Net, NetEngine) {
        self.taking(via, "udp:53")
    }

    pub(crate) fn taking(&self, via: Via, what: &str) -> (Net, NetEngine) {
        self.taking_by(via, what, &NetConfig::default())
    }

    pub(crate) fn taking_by(&self, via: Via, what: &str, net: &NetConfig) -> (Net, NetEngine) {
        self.near.run(|| {
            let mut config = DeviceConfig::new("ska", via);
            config.take = what.parse().unwrap();
            let mut devices = [Device::open(&config).unwrap()];
            Net::over(&Config::live(), net, &mut devices).unwrap()
        })
    }

    /// Sends a question from the far end, and returns the answer.
    fn ask(&self, question: &[u8]) -> std::io::Result<Vec<u8>> {
        self.far.run(|| {
            let client = KernelSocket::bind("10.9.0.2:0")?;
            client.connect("10.9.0.1:53")?;
            client.set_read_timeout(Some(Duration::from_secs(20)))?;
            client.send(question)?;
            let mut buffer = [0; 2000];
            let len = client.recv(&mut buffer)?;
            Ok(buffer[..len].to_vec())
        })
    }
}

/// Answers each datagram with its bytes reversed.
fn answer_on(cpu: &mut CpuThread<Stack>, sockets: &[(CpuId, UdpSocket)]) {
    let (_, socket) = sockets.iter().find(|(of, _)| *of == cpu.cpu()).unwrap();
    let mut batch = Datagrams::new();
    while socket.recv_batch_on(cpu, &mut batch, 64) > 0 {
        for datagram in &mut batch {
            let mut payload = datagram.payload().to_vec();
            payload.reverse();
            datagram.reply(&payload).unwrap();
        }
        socket.send_replies(&mut batch).unwrap();
    }
}

fn beside_the_kernel(via: Via) {
    let hosts = Hosts::new();
    let (net, engine) = hosts.over(via);
    let bind = |&cpu: &CpuId| (cpu, net.socket().reuse_port_on(cpu).bind("0.0.0.0:53").unwrap());
    let sockets: Vec<_> = hosts.near.run(|| net.cpus().iter().map(bind).collect());
    let answer = move |cpu: &mut CpuThread<Stack>| answer_on(cpu, &sockets);
    let running = hosts.near.run(|| Running::begin_with(engine, answer));
    // The kernel processes ARP.
    for question in 0..200u32 {
        let question = question.to_be_bytes();
        let mut answer = question.to_vec();
        answer.reverse();
        assert_eq!(hosts.ask(&question).unwrap(), answer);
    }
    let mut outcome = running.end();
    assert_eq!(net.frames_away(&mut outcome), 0);
}

fn over_af_xdp() {
    beside_the_kernel(Via::AfXdp);
}

/// The kernel receives a copy of each question too, and would answer port unreachable.
fn over_af_packet() {
    beside_the_kernel(Via::AfPacket);
}

fn first_goes_by_kernel() {
    let hosts = Hosts::new();
    let (net, engine) = hosts.over(Via::AfXdp);
    let socket = hosts.near.run(|| net.bind("0.0.0.0:53").unwrap());
    let running = hosts.near.run(|| Running::begin(engine));
    let far = hosts.far.run(|| KernelSocket::bind("10.9.0.2:0").unwrap());
    far.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let to = far.local_addr().unwrap();
    let mut buffer = [0; 100];
    for number in 0..100u32 {
        hosts.near.run(|| socket.send_to(&number.to_be_bytes(), to).unwrap());
        let (len, from) = far.recv_from(&mut buffer).unwrap();
        assert_eq!((&buffer[..len], from.port()), (&number.to_be_bytes()[..], 53));
    }
    hosts.near.run(|| command("ip neigh flush dev ska"));
    drop(socket);
    running.end();
}

/// The kernel receives nothing: neither ARP requests nor replies.
fn all_taken() {
    const BEHIND: &str = "192.0.2.1";
    let hosts = Hosts::new();
    hosts.far.command(&format!("ip addr add {BEHIND}/32 dev lo"));
    hosts.far.command("ip link set lo up");
    hosts.near.command("ip route add 192.0.2.0/24 via 10.9.0.2");
    let (net, engine) = hosts.taking(Via::AfXdp, "all");
    let socket = hosts.near.run(|| net.bind("0.0.0.0:53").unwrap());
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let running = hosts.near.run(|| Running::begin(engine));
    let mut buffer = [0; 100];
    for at in [BEHIND, "10.9.0.2"] {
        let far = hosts.far.run(|| KernelSocket::bind(format!("{at}:0")).unwrap());
        far.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        for number in 0..100u32 {
            let to = far.local_addr().unwrap();
            hosts.near.run(|| socket.send_to(&number.to_be_bytes(), to).unwrap());
            let (len, from) = far.recv_from(&mut buffer).unwrap();
            assert_eq!((&buffer[..len], from.port()), (&number.to_be_bytes()[..], 53));
            if number % 10 == 0 {
                hosts.far.command("ip neigh flush dev skb");
            }
            far.send_to(&buffer[..len], from).unwrap();
            assert_eq!(socket.recv(&mut buffer).unwrap(), len);
            assert_eq!(buffer[..len], number.to_be_bytes());
        }
    }
    drop(socket);
    let mut outcome = running.end();
    assert_eq!(net.frames_away(&mut outcome), 0);
}

/// The neighbour has another link-layer address than the kernel remembers, which does not hear of it.
fn changed_before() {
    let hosts = Hosts::new();
    hosts.near.command("ip neigh replace 10.9.0.2 lladdr 02:00:00:00:00:99 dev ska nud stale");
    let (net, engine) = hosts.taking(Via::AfXdp, "all");
    let socket = hosts.near.run(|| net.bind("0.0.0.0:53").unwrap());
    let running = hosts.near.run(|| Running::begin(engine));
    let far = hosts.far.run(|| KernelSocket::bind("10.9.0.2:0").unwrap());
    far.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let to = far.local_addr().unwrap();
    hosts.near.run(|| socket.send_to(b"first", to).unwrap());
    let mut buffer = [0; 100];
    assert_eq!(far.recv(&mut buffer).unwrap(), 5);
    drop(socket);
    running.end();
}

/// Only sockets of ours send to the neighbour: the kernel does not check it of its own accord.
fn changed_meanwhile() {
    let hosts = Hosts::new();
    for probing in ["delay_first_probe_time=1", "ucast_solicit=1", "retrans_time_ms=100"] {
        hosts.near.command(&format!("sysctl -qw net.ipv4.neigh.ska.{probing}"));
    }
    hosts.near.command("ip neigh replace 10.9.0.2 lladdr 02:00:00:00:00:99 dev ska nud stale");
    let (net, engine) = hosts.over(Via::AfXdp);
    let socket = hosts.near.run(|| net.bind("0.0.0.0:53").unwrap());
    let running = hosts.near.run(|| Running::begin(engine));
    let far = hosts.far.run(|| KernelSocket::bind("10.9.0.2:0").unwrap());
    far.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let to = far.local_addr().unwrap();
    let mut buffer = [0; 100];
    let arrives = |_: u32| {
        hosts.near.run(|| socket.send_to(b"again", to).unwrap());
        far.recv(&mut buffer).is_ok()
    };
    assert!((0..SENDS_MAX).any(arrives), "none has arrived");
    drop(socket);
    running.end();
}

/// The kernel is finding out whether the address is another host's when the run begins.
fn proven_meanwhile() {
    let hosts = Hosts::new();
    for of in ["all", "ska"] {
        hosts.near.command(&format!("sysctl -qw net.ipv6.conf.{of}.disable_ipv6=0"));
    }
    hosts.near.command("sysctl -qw net.ipv6.conf.ska.dad_transmits=8");
    hosts.near.command("ip addr add fd00::1/64 dev ska");
    let (net, engine) = hosts.taking(Via::AfXdp, "all");
    let bind = || hosts.near.run(|| net.bind("[fd00::1]:53"));
    assert_eq!(bind().unwrap_err().kind(), ErrorKind::AddrNotAvailable);
    let running = hosts.near.run(|| Running::begin(engine));
    let mut looks = 0..LOOKS_MAX;
    let socket = loop {
        looks.next().unwrap();
        match bind() {
            Ok(socket) => break socket,
            Err(error) => assert_eq!(error.kind(), ErrorKind::AddrNotAvailable),
        }
        sleep(Duration::from_millis(10));
    };
    drop(socket);
    running.end();
}

/// Neither the first address nor that of the default route.
fn source_of_route() {
    let hosts = Hosts::new();
    for own in ["10.9.0.7/24", "10.9.0.8/24"] {
        hosts.near.command(&format!("ip addr add {own} dev ska"));
    }
    hosts.near.command("ip route add default via 10.9.0.2 src 10.9.0.7");
    hosts.near.command("ip route add 198.51.100.0/24 via 10.9.0.2 src 10.9.0.8");
    let (net, engine) = hosts.over(Via::AfXdp);
    let socket = hosts.near.run(|| net.bind("0.0.0.0:53").unwrap());
    for (far, expected) in [("192.0.2.1:1", "10.9.0.7:53"), ("198.51.100.1:1", "10.9.0.8:53")] {
        hosts.near.run(|| socket.connect(far).unwrap());
        assert_eq!(socket.local_addr().to_string(), expected);
        hosts.near.run(|| socket.disconnect());
    }
    drop((socket, engine));
}

/// A fragmented datagram is too large for any frame, on either kind of device.
fn larger_than_frames() {
    for via in [Via::AfXdp, Via::AfPacket] {
        let hosts = Hosts::new();
        let (net, engine) = hosts.taking(via, "all");
        let socket = hosts.near.run(|| net.bind("0.0.0.0:53").unwrap());
        socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let running = hosts.near.run(|| Running::begin(engine));
        let far = hosts.far.run(|| KernelSocket::bind("10.9.0.2:0").unwrap());
        let (mut buffer, mut batch) = (vec![0; 1 << 16], Datagrams::new());
        for (number, len) in [2000, 5000, 20_001, 65_507].into_iter().cycle().take(40).enumerate() {
            let sent: Vec<_> =
                (number..number + len).map(|at| u8::try_from(at % 251).unwrap()).collect();
            far.send_to(&sent, "10.9.0.1:53").unwrap();
            if number % 3 == 0 {
                assert_eq!(socket.recv_batch(&mut batch, 9).unwrap(), 1);
                let datagram = batch.iter().next().unwrap();
                assert!(datagram.payload() == sent && datagram.segments().eq([&sent[..]]));
                continue;
            }
            if number % 3 == 1 {
                assert_eq!(socket.peek_from(&mut buffer).unwrap().0, len);
                assert!(buffer[..len] == sent);
            }
            assert_eq!(socket.recv(&mut buffer).unwrap(), len);
            assert!(buffer[..len] == sent);
        }
        drop((batch, socket));
        let mut outcome = running.end();
        assert_eq!(net.frames_away(&mut outcome), 0);
    }
}

fn ports() {
    let hosts = Hosts::new();
    let (net, engine) = hosts.over(Via::AfXdp);
    hosts.near.run(|| {
        let kernels = KernelSocket::bind("0.0.0.0:5353").unwrap();
        let refused = net.bind("0.0.0.0:5353").unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::AddrInUse);
        drop(kernels);
        let ours = net.bind("0.0.0.0:5353").unwrap();
        let refused = KernelSocket::bind("0.0.0.0:5353").unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::AddrInUse);
        drop(ours);
        KernelSocket::bind("0.0.0.0:5353").unwrap();
        let refused = net.bind("192.0.2.1:53").unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::AddrNotAvailable);
    });
    drop(engine);
}

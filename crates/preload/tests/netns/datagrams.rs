//! Several processes with UDP sockets at one address.

use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::net::UdpSocket;
use std::process::{ChildStdin, Command, Stdio};
use std::time::Duration;

use forebay_testkit::namespaces::cable::Namespace;

use super::{Hosts, NEAR, preloaded};

/// Three processes that answer each datagram with their number. One that is told to closes its socket, and binds anew once it is
/// to `open` it. The parent kills one, as it is told.
const CHILDREN: &str = "
import os, signal, socket, sys

def bind():
    it = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    it.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    it.bind(('::', 7))
    return it

def serve(number, orders, it):
    os.write(said[1], b'+')
    while True:
        data, peer = it.recvfrom(100)
        if data == b'close':
            it.close()
            os.write(said[1], b'-')
            os.read(orders, 1)
            it = bind()
            os.write(said[1], b'+')
        else:
            it.sendto(b'%d' % number, peer)

def run(socket):
    children = []
    for number in range(3):
        orders = os.pipe()
        process = os.fork()
        if process == 0:
            serve(number, orders[0], socket(number))
        children.append((process, orders[1]))
        os.read(said[0], 1)
    print('bound', flush=True)
    for line in sys.stdin:
        order, number = line.split()
        process, orders = children[int(number)]
        if order == 'kill':
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            children[int(number)] = None
        elif order == 'closed':
            os.read(said[0], 1)
        elif order == 'open':
            os.write(orders, b'x')
            os.read(said[0], 1)
        print(order, flush=True)
    for process, _ in filter(None, children):
        os.kill(process, signal.SIGKILL)

said = os.pipe()
";

/// Each process binds a socket of its own (`SO_REUSEPORT`).
const OWN: &str = "run(lambda _: bind())";

/// The second process is connected to one flow, at the same address or at that of the device.
const CONNECTED: &str = "
def connected(number):
    if number != 1:
        return bind()
    it = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    it.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    it.bind(('10.9.0.1', 7))
    it.connect(('10.9.0.2', 999))
    return it
run(connected)
";

/// The parent binds one socket, which all have. Each child gives up its capabilities before it uses the socket.
const INHERITED: &str = "
shared = bind()
def without_capabilities(_):
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    return shared
run(without_capabilities)
";

/// Flows that ask, each from a port of its own.
const FLOWS: u16 = 300;

/// Question that comes in three fragments.
const IN_FRAGMENTS: [u8; 4000] = [b'x'; 4000];

/// Longest wait for an answer, after which the flow asks again.
const AGAIN: Duration = Duration::from_millis(50);

/// Asks by each flow until there is an answer. Returns the servers that have answered, by flow, and the number of questions
/// that were answered twice.
fn ask_all(flows: &[UdpSocket], question: &[u8]) -> (Vec<u8>, usize) {
    let mut twice = 0;
    let mut ask = |flow: &UdpSocket| {
        let mut answer = [0; 8];
        let mut asked = 0;
        let served = loop {
            asked += 1;
            match flow.send(question).and_then(|_| flow.recv(&mut answer)) {
                Ok(1) => break answer[0] - b'0',
                Ok(len) => panic!("{len} bytes"),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // The kernel, which has the packets too, refuses one in the moment in which a socket of a `SO_REUSEPORT`
                // group is closed: so it does without this library, where another one of the group is open all the time.
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused),
            }
        };
        if asked == 1 {
            flow.set_nonblocking(true).unwrap();
            twice += usize::from(flow.recv(&mut answer).is_ok());
            flow.set_nonblocking(false).unwrap();
        } else {
            while flow.recv(&mut answer).is_ok() {}
        }
        served
    };
    let served = flows.iter().map(&mut ask).collect();
    (served, twice)
}

struct Servers<'a> {
    orders: ChildStdin,
    answers: Box<dyn BufRead + 'a>,
}

impl Servers<'_> {
    fn order(&mut self, order: &str) {
        writeln!(self.orders, "{order}").unwrap();
        self.await_line(order.split(' ').next().unwrap());
    }

    fn await_line(&mut self, expected: &str) {
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        assert_eq!(line.trim_end(), expected);
    }
}

/// Asks until these servers, and no others, have answered all flows twice in the same way, and each question once. Each
/// has a part.
fn settle(flows: &[UdpSocket], of: &[u8]) -> Vec<u8> {
    settle_by(b"which", flows, of)
}

/// As [`settle`], with another question.
fn settle_by(question: &[u8], flows: &[UdpSocket], of: &[u8]) -> Vec<u8> {
    let mut before = Vec::new();
    loop {
        let (served, twice) = ask_all(flows, question);
        let count = |server: &u8| served.iter().filter(|it| *it == server).count();
        let is_even = of.iter().all(|server| count(server) > flows.len() / of.len() / 2);
        let are_all = of.iter().map(count).sum::<usize>() == flows.len();
        if is_even && are_all && twice == 0 && served == before {
            return served;
        }
        before = served;
    }
}

/// Flows of the far host, each from a port of its own.
fn flows(hosts: &Hosts) -> Vec<UdpSocket> {
    hosts.far.run(|| {
        let flow = |_| {
            let flow = UdpSocket::bind("10.9.0.2:0").unwrap();
            flow.connect(NEAR).unwrap();
            flow.set_read_timeout(Some(AGAIN)).unwrap();
            flow
        };
        (0..FLOWS).map(flow).collect()
    })
}

/// Runs the program of servers, which `orders` directs.
fn direct(hosts: &Hosts, program: &str, orders: impl FnOnce(&mut Servers<'_>)) {
    direct_over("af_packet", hosts, program, orders);
}

fn direct_over(via: &str, hosts: &Hosts, program: &str, orders: impl FnOnce(&mut Servers<'_>)) {
    let config = format!("via={via} take=udp:7 spin=auto dev=exa");
    direct_by(&config, hosts, program, orders);
}

fn direct_by(config: &str, hosts: &Hosts, program: &str, orders: impl FnOnce(&mut Servers<'_>)) {
    let mut command = Command::new("python3");
    let command = preloaded(command.args(["-c", program]), config);
    let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = hosts.near.run(|| command.spawn().unwrap());
    let answers = Box::new(BufReader::new(child.stdout.take().unwrap()));
    let mut servers = Servers { orders: child.stdin.take().unwrap(), answers };
    servers.await_line("bound");
    orders(&mut servers);
    drop(servers);
    assert!(child.wait().unwrap().success());
}

pub(crate) fn are_divided() {
    let hosts = Hosts::new();
    let flows = flows(&hosts);
    direct(&hosts, &(CHILDREN.to_owned() + OWN), |servers| {
        // Until no bucket moves between them.
        while settle_by(&IN_FRAGMENTS, &flows, &[0, 1, 2]) != settle(&flows, &[0, 1, 2]) {}
        servers.order("kill 1");
        let served = settle(&flows, &[0, 2]);
        let of_2 = served.iter().position(|server| *server == 2).unwrap();
        flows[of_2].send(b"close").unwrap();
        servers.order("closed 2");
        settle(&flows, &[0]);
        servers.order("open 2");
        settle(&flows, &[0, 2]);
    });
}

/// Answers each datagram by its length.
const LENGTHS: &str = "
import socket
it = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
it.bind(('10.9.0.1', 7))
print('bound', flush=True)
while True:
    data, peer = it.recvfrom(10000)
    if data == b'end':
        break
    it.sendto(b'%d' % len(data), peer)
";

/// Fragments to ports that are not taken come, too, but the kernel's sockets have them, and the kernel refuses them.
pub(crate) fn fragments_are_joined() {
    ["af_packet", "af_xdp"].into_iter().for_each(join_fragments_over);
}

fn join_fragments_over(via: &str) {
    let hosts = Hosts::new();
    let kernels = hosts.near.run(|| UdpSocket::bind("10.9.0.1:8").unwrap());
    let far = hosts.far.run(|| UdpSocket::bind("10.9.0.2:9").unwrap());
    for socket in [&kernels, &far] {
        socket.set_read_timeout(Some(AGAIN)).unwrap();
    }
    let send = |to| far.send_to(&IN_FRAGMENTS, to).unwrap();
    direct_over(via, &hosts, LENGTHS, |_| {
        let mut data = [0; 5000];
        let ask = || {
            let mut answer = [0; 8];
            loop {
                send(NEAR);
                if let Ok(len) = far.recv(&mut answer) {
                    break assert_eq!(&answer[..len], b"4000");
                }
            }
        };
        while kernels.recv(&mut data).ok() != Some(IN_FRAGMENTS.len()) {
            send("10.9.0.1:8");
        }
        let refused = || icmp(&hosts.far, "InDestUnreachs");
        while refused() == 0 {
            send("10.9.0.1:10");
            ask(); // behind the others: fragments of one host take one way
        }
        ask();
        assert_eq!(refused(), icmp(&hosts.near, "OutDestUnreachs"), "the kernel's alone");
        far.send_to(b"end", NEAR).unwrap();
    });
}

/// A tunnel's packets from sockets of this machine have the sum of their pseudo headers alone, as a veth's.
pub(crate) fn sums_are_completed() {
    let hosts = Hosts::new();
    for (host, own, other, inner) in [
        (&hosts.near, "10.9.0.1", "10.9.0.2", "10.7.0.1"),
        (&hosts.far, "10.9.0.2", "10.9.0.1", "10.7.0.2"),
    ] {
        host.command(&format!(
            "ip link add vx type vxlan id 7 local {own} remote {other} dstport 4789"
        ));
        host.command(&format!("ip addr add {inner}/24 dev vx"));
        host.command("ip link set vx up");
    }
    let far = hosts.far.run(|| UdpSocket::bind("10.7.0.2:9").unwrap());
    far.set_read_timeout(Some(AGAIN)).unwrap();
    let program = LENGTHS.replace("10.9.0.1", "10.7.0.1");
    direct_by("via=af_xdp take=udp:7 spin=auto dev=vx", &hosts, &program, |_| {
        let mut answer = [0; 8];
        while far.recv(&mut answer).ok() != Some(1) {
            far.send_to(b"datagram", "10.7.0.1:7").unwrap();
        }
        far.send_to(b"end", "10.7.0.1:7").unwrap();
    });
}

/// Flows whose packets come by both queues of a device.
pub(crate) fn all_queues_are_taken() {
    for via in ["af_packet", "af_xdp"] {
        let hosts = Hosts::with_queues(2);
        let flows = flows(&hosts);
        direct_over(via, &hosts, LENGTHS, |_| {
            let (served, _) = ask_all(&flows, b"1");
            assert_eq!(served, vec![1; flows.len()], "{via}: the length of each question");
            flows[0].send(b"end").unwrap();
        });
    }
}

/// Counter of ICMP of a host's kernel.
fn icmp(host: &Namespace, name: &str) -> u64 {
    let snmp = host.run(|| fs::read_to_string("/proc/thread-self/net/snmp").unwrap());
    let mut lines = snmp.lines().filter(|line| line.starts_with("Icmp: "));
    let [names, counts] = [(); 2].map(|()| lines.next().unwrap());
    let at = names.split(' ').position(|it| it == name).unwrap();
    counts.split(' ').nth(at).unwrap().parse().unwrap()
}

pub(crate) fn flow_is_the_connecteds() {
    let hosts = Hosts::new();
    let others = flows(&hosts);
    let one = hosts.far.run(|| UdpSocket::bind("10.9.0.2:999").unwrap());
    one.connect(NEAR).unwrap();
    one.set_read_timeout(Some(AGAIN)).unwrap();
    direct(&hosts, &(CHILDREN.to_owned() + CONNECTED), |servers| {
        settle(&others, &[0, 2]);
        settle(std::slice::from_ref(&one), &[1]);
        servers.order("kill 0");
        settle(&others, &[2]);
        settle(std::slice::from_ref(&one), &[1]);
    });
}

/// The parent binds, and waits for no datagram: its children, which have no capabilities, have all.
pub(crate) fn are_the_childrens() {
    let hosts = Hosts::new();
    let flows = flows(&hosts);
    direct(&hosts, &(CHILDREN.to_owned() + INHERITED), |servers| {
        settle(&flows, &[0, 1, 2]);
        servers.order("kill 1");
        settle(&flows, &[0, 2]);
    });
}

/// Receives, and forks a child that sends by the socket, and would receive, too.
const SENDS: &str = "
import errno, os, socket
it = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
it.bind(('10.9.0.1', 7))
it.sendto(b'of the parent', ('10.9.0.2', 9))
print(it.recv(100).decode(), flush=True)
if os.fork() == 0:
    it.sendto(b'of the child', ('10.9.0.2', 9))
    try:
        it.recv(100)
    except OSError as error:
        print(errno.errorcode[error.errno], flush=True)
    os._exit(0)
os.wait()
print(it.recv(100).decode())
";

pub(crate) fn child_sends() {
    let hosts = Hosts::with_echo();
    let config = "via=af_packet take=udp:7 spin=auto dev=exa";
    let mut program = Command::new("python3");
    let (lines, told) = hosts.lines_and_errors(program.args(["-c", SENDS]), Some(config));
    assert_eq!(lines, ["of the parent", "EBADF", "of the child"]);
    assert!(told.contains("a UDP socket was read before a fork"), "{told}");
}

/// Binds and connects, and forks a child that asks and reads. Then the parent does, whose ring may have the child's answer,
/// too, which it takes if it looks after the child's end.
const CONNECTS: &str = "
import os, socket
it = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
it.bind(('10.9.0.1', 7))
it.connect(('10.9.0.2', 9))

def await_(what):
    while it.recv(100) != what:
        pass
    print(what.decode(), flush=True)

def ask(what):
    it.send(what)
    await_(what)

if os.fork() == 0:
    ask(b'of the child')
    os._exit(0)
os.wait()
ask(b'of the parent')
if os.fork() == 0:
    try:
        ask(b'not of the child')
    except OSError as error:
        print(error.errno, flush=True)
    os._exit(0)
os.wait()
await_(b'not of the child')
";

pub(crate) fn child_asks() {
    let hosts = Hosts::with_echo();
    let config = "via=af_packet take=udp:7 spin=auto dev=exa";
    let lines = hosts.lines(Command::new("python3").args(["-c", CONNECTS]), Some(config));
    let refused = format!("{}", rustix::io::Errno::BADF.raw_os_error());
    assert_eq!(lines, ["of the child", "of the parent", &refused, "not of the child"]);
}

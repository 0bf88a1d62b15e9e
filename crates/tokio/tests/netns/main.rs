//! Sockets on a tokio runtime, by the kernel's sockets at the far end of a cable.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod tcp; //  streams and listeners
mod http; // hyper, with curl
#[path = "../../examples/http/files.rs"]
mod files;
#[path = "../../examples/http/service.rs"]
mod service;

use std::future::Future;
use std::io::ErrorKind;
use std::net::{SocketAddr, UdpSocket as KernelSocket};
use std::sync::Arc;
use std::task::Poll;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use forebay::net::message::Transmit;
use forebay::net::{Net, NetConfig, NetEngine, Stack};
use forebay::{Config, Device, DeviceConfig, Outcome, Stopper, Via};
use forebay_testkit::namespaces::cable::{Cable, Namespace};
use forebay_testkit::namespaces::{missing, trial_inside};
use forebay_tokio::{Interest, TcpStream, UdpSocket};
use libtest_mimic::Arguments;
use rustix::net::sockopt::set_socket_recv_buffer_size_force;
use tokio::runtime::{Builder, Runtime};

const PORT: u16 = 7;

fn main() {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let missing = missing(&["ip"]);
    let trials = [
        ("udp_11_tasks_echo_over_af_xdp", (|| echo(Via::AfXdp)) as fn()),
        ("udp_11_tasks_echo_over_af_packet", || echo(Via::AfPacket)),
        ("udp_11_cancelled_calls_lose_nothing", cancelled),
        ("udp_11_names_block_no_task", names),
        ("udp_11_calls_answer_as_tokios", calls),
        ("udp_8_senders_wait_for_memory", senders_wait),
        ("udp_11_end_reaches_waiting_tasks", ended),
        ("tcp_17_tasks_echo_over_af_xdp", || tcp::echo(Via::AfXdp)),
        ("tcp_17_tasks_echo_over_af_packet", || tcp::echo(Via::AfPacket)),
        ("tcp_17_tasks_connect_and_close_twice", tcp::calls),
        ("tcp_17_tasks_without_descriptors_lose_nothing", tcp::few_descriptors),
        ("tcp_17_end_reaches_connecting_tasks", tcp::ended),
    ];
    let trials = trials.map(|(name, test)| trial_inside(name, missing.as_ref(), test));
    let no_curl = missing.clone().or_else(|| forebay_testkit::namespaces::missing(&["curl"]));
    let by_curl = [
        ("tcp_15_curl_over_af_packet", (|| http::curl(Via::AfPacket)) as fn()),
        ("tcp_15_curl_over_af_xdp", || http::curl(Via::AfXdp)),
    ];
    let by_curl = by_curl.map(|(name, test)| trial_inside(name, no_curl.as_ref(), test));
    libtest_mimic::run(&arguments, trials.into_iter().chain(by_curl).collect()).exit();
}

/// Two hosts on one cable. Ours has a running engine.
struct Hosts {
    near: Namespace,
    far: Namespace,
    net: Net,
    stopper: Stopper,
    /// Engine, until it is started.
    idle: Option<NetEngine>,
    engine: Option<JoinHandle<forebay::Result<Outcome<Stack>>>>,
}

impl Hosts {
    fn new(via: Via) -> Self {
        let mut hosts = Self::idle(via, &NetConfig::default());
        hosts.start();
        hosts
    }

    /// Two hosts of which ours has an engine that does not run yet.
    fn idle(via: Via, config: &NetConfig) -> Self {
        let (near, far) = (Namespace::new(), Namespace::new());
        Cable { near: (&near, "tka"), far: (&far, "tkb") }.lay();
        near.command("ip addr add 10.9.0.1/24 dev tka");
        far.command("ip addr add 10.9.0.2/24 dev tkb");
        near.command("ip neigh replace 10.9.0.2 lladdr 02:00:00:00:00:02 dev tka nud permanent");
        let (net, engine) = near.run(|| {
            let mut device = DeviceConfig::new("tka", via);
            device.take = format!("udp:{PORT},tcp:{PORT},tcp:80,tcp:32768-60999").parse().unwrap();
            let mut devices = [Device::open(&device).unwrap()];
            Net::over(&Config::live(), config, &mut devices).unwrap()
        });
        let stopper = engine.stopper();
        Self { near, far, net, stopper, idle: Some(engine), engine: None }
    }

    fn start(&mut self) {
        let engine = self.idle.take().unwrap();
        // Its CPUs ask the kernel for next hops, too.
        self.engine = Some(self.near.run(move || thread::spawn(move || engine.run())));
    }

    /// Creates a runtime whose threads are in the near namespace, so that their sends resolve
    /// neighbours there.
    fn runtime(&self) -> Runtime {
        let build = || Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        self.near.run(build)
    }

    fn socket(&self, runtime: &Runtime) -> UdpSocket {
        let net = &self.net;
        let socket = self.near.run(|| net.bind(("10.9.0.1", PORT)).unwrap());
        let _inside = runtime.enter();
        UdpSocket::new(socket).unwrap()
    }

    fn far_socket(&self) -> KernelSocket {
        let socket = self.far.run(|| KernelSocket::bind("10.9.0.2:0").unwrap());
        socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        socket.connect(("10.9.0.1", PORT)).map_err(|error| error.kind()).unwrap();
        socket
    }

    /// Ends the engine. No frame may be missing.
    fn end(self) {
        self.stopper.stop();
        let mut outcome = self.engine.unwrap().join().unwrap().unwrap();
        assert_eq!(self.net.frames_away(&mut outcome), 0);
    }
}

/// Several tasks read one socket and answer; each question is answered once.
fn echo(via: Via) {
    let hosts = Hosts::new(via);
    let runtime = hosts.runtime();
    let socket = Arc::new(hosts.socket(&runtime));
    let answer = |socket: Arc<UdpSocket>| async move {
        let mut buffer = [0; 2000];
        while let Ok((len, from)) = socket.recv_from(&mut buffer).await {
            socket.send_to(&buffer[..len], from).await.unwrap();
        }
    };
    let tasks: Vec<_> = (0..4).map(|_| runtime.spawn(answer(Arc::clone(&socket)))).collect();
    let ask = |far: KernelSocket| {
        let mut buffer = [0; 2000];
        for number in 0..500u32 {
            let question = [number.to_be_bytes().to_vec(), vec![7; number as usize]].concat();
            far.send(&question).unwrap();
            let len = far.recv(&mut buffer).unwrap();
            assert_eq!(&buffer[..len], question);
        }
    };
    let far: Vec<_> = (0..3).map(|_| hosts.far_socket()).collect();
    thread::scope(|scope| far.into_iter().for_each(|far| drop(scope.spawn(move || ask(far)))));
    tasks.iter().for_each(tokio::task::JoinHandle::abort);
    drop((socket, runtime));
    hosts.end();
}

/// Receiving is given up at random, before and after a datagram has come: none is lost, none read twice.
fn cancelled() {
    const COUNT: u32 = 20_000;
    /// Datagrams under way at once: fewer than the receive buffer holds.
    const WINDOW: u32 = 100;
    let hosts = Hosts::new(Via::AfXdp);
    let runtime = hosts.runtime();
    let (socket, far) = (hosts.socket(&runtime), hosts.far_socket());
    let reader = runtime.spawn(async move {
        let (mut next, mut buffer) = (0u32, [0; 16]);
        while next < COUNT {
            // Either may be polled first; the loser is dropped.
            let read = tokio::select! {
                read = socket.recv_from(&mut buffer) => Some(read.unwrap()),
                () = tokio::task::yield_now() => None,
            };
            let Some((len, from)) = read else { continue };
            assert_eq!((len, &buffer[..4]), (4, &next.to_be_bytes()[..]));
            next += 1;
            if next.is_multiple_of(WINDOW) {
                socket.send_to(b"go on", from).await.unwrap();
            }
        }
        socket
    });
    for number in 0..COUNT {
        far.send(&number.to_be_bytes()).unwrap();
        if (number + 1).is_multiple_of(WINDOW) {
            assert_eq!(far.recv(&mut [0; 10]).unwrap(), 5);
        }
    }
    drop(runtime.block_on(reader).unwrap());
    drop(runtime);
    hosts.end();
}

/// While names wait for the only thread that looks them up, tasks go on.
fn names() {
    let hosts = Hosts::new(Via::AfPacket);
    let mut builder = Builder::new_current_thread();
    let runtime = hosts.near.run(|| builder.enable_all().max_blocking_threads(1).build().unwrap());
    let socket = hosts.socket(&runtime);
    let (release, held) = std::sync::mpsc::channel::<()>();
    let (in_near, calls) = (&hosts.near, async {
        let blocking = tokio::task::spawn_blocking(move || held.recv().unwrap_err());
        let name = format!("localhost:{PORT}");
        let mut sends = std::pin::pin!(socket.send_to(b"name", name.as_str()));
        let mut connects = std::pin::pin!(socket.connect(name.as_str()));
        let mut opens = std::pin::pin!(TcpStream::connect(&hosts.net, name.as_str()));
        let first_poll = std::future::poll_fn(|cx| {
            let sends = sends.as_mut().poll(cx).is_pending();
            let connects = connects.as_mut().poll(cx).is_pending();
            Poll::Ready([sends, connects, opens.as_mut().poll(cx).is_pending()])
        });
        assert_eq!(first_poll.await, [true; 3], "looked up by the task itself");
        drop(release);
        blocking.await.unwrap();
        // A connection to this host itself is refused, once its address is known.
        assert_eq!(opens.await.unwrap_err().kind(), ErrorKind::Unsupported);
        let _ = (sends.await, connects.await); // as the names have IPv4 addresses or not
    });
    in_near.run(|| runtime.block_on(calls));
    drop((socket, runtime));
    hosts.end();
}

/// Calls have the same results as tokio's.
fn calls() {
    let hosts = Hosts::new(Via::AfPacket);
    let runtime = hosts.runtime();
    let (socket, far) = (hosts.socket(&runtime), hosts.far_socket());
    let from = far.local_addr().unwrap();
    let (in_near, asks) = (&hosts.near, async {
        let mut buffer = [0; 10];
        assert_eq!(socket.local_addr().unwrap(), SocketAddr::from(([10, 9, 0, 1], PORT)));
        assert_eq!(socket.peer_addr().unwrap_err().kind(), ErrorKind::NotConnected);
        assert_eq!(socket.try_recv_from(&mut buffer).unwrap_err().kind(), ErrorKind::WouldBlock);
        assert!(socket.ready(Interest::READABLE | Interest::WRITABLE).await.unwrap().is_writable());
        far.send(b"first").unwrap();
        socket.readable().await.unwrap();
        assert_eq!(socket.peek_from(&mut buffer).await.unwrap(), (5, from));
        assert_eq!(socket.try_peek_from(&mut buffer).unwrap(), (5, from));
        assert_eq!(socket.recv_from(&mut buffer).await.unwrap(), (5, from));
        far.send(b"second").unwrap();
        let mut room = forebay_tokio::ReadBuf::new(&mut buffer);
        let read = std::future::poll_fn(|cx| socket.poll_recv_from(cx, &mut room)).await.unwrap();
        assert_eq!((read, room.filled()), (from, &b"second"[..]));
        far.send(b"third").unwrap();
        let read = socket.recv_msg(&mut buffer).await.unwrap();
        assert_eq!((read.len, read.source, read.ttl, read.is_truncated), (5, from, 64, false));
        socket.writable().await.unwrap();
        let message = Transmit { gso_size: 2, ..Transmit::new(b"abcde", from) };
        assert_eq!(socket.send_msg(&message).await.unwrap(), 5);
        assert_eq!(socket.try_send_to(b"try", from).unwrap(), 3);
        assert_eq!(socket.try_send(b"whom").unwrap_err().kind(), ErrorKind::NotConnected);
        socket.connect(from).await.unwrap();
        assert_eq!(socket.send(b"peer").await.unwrap(), 4);
        let sent = std::future::poll_fn(|cx| socket.poll_send(cx, b"poll")).await.unwrap();
        assert_eq!((sent, socket.peer_addr().unwrap()), (4, from));
        for expected in [&b"ab"[..], b"cd", b"e", b"try", b"peer", b"poll"] {
            let len = far.recv(&mut buffer).unwrap();
            assert_eq!(&buffer[..len], expected);
        }
    });
    in_near.run(|| runtime.block_on(asks));
    drop((socket, runtime));
    hosts.end();
}

/// A sender without memory waits until the device has sent: no sooner, and then it is woken. All is sent, in
/// order.
fn senders_wait() {
    const COUNT: u32 = 2000;
    let config = NetConfig { send_frames: 64, ..NetConfig::default() };
    let mut hosts = Hosts::idle(Via::AfXdp, &config);
    let runtime = hosts.runtime();
    let (socket, far) = (hosts.socket(&runtime), hosts.far_socket());
    set_socket_recv_buffer_size_force(&far, 16 << 20).unwrap();
    let to = far.local_addr().unwrap();
    // Nobody takes from the queue to the device yet.
    let mut next = 0u32;
    let full = hosts.near.run(|| {
        loop {
            match socket.try_send_to(&next.to_be_bytes(), to) {
                Ok(_) => next += 1,
                Err(error) => break error.kind(),
            }
            assert!(next <= 1 << 20, "nothing bounds what is sent");
        }
    });
    assert_eq!(full, ErrorKind::WouldBlock);
    assert!(next <= 64 * 4, "bounded by the frames of all CPUs: {next}");
    let poll_once = std::future::poll_fn(|cx| Poll::Ready(socket.poll_send_ready(cx).is_ready()));
    assert!(!runtime.block_on(poll_once), "no room, and said so");
    let sender = runtime.spawn(async move {
        for number in next..COUNT {
            socket.send_to(&number.to_be_bytes(), to).await.unwrap();
        }
        socket
    });
    hosts.start();
    let mut buffer = [0; 16];
    for number in 0..COUNT {
        assert_eq!(far.recv(&mut buffer).unwrap(), 4);
        assert_eq!(buffer[..4], number.to_be_bytes());
    }
    drop(runtime.block_on(sender).unwrap());
    drop(runtime);
    hosts.end();
}

/// A task that waits is told when the engine ends.
fn ended() {
    let hosts = Hosts::new(Via::AfXdp);
    let runtime = hosts.runtime();
    let socket = hosts.socket(&runtime);
    let waiting = runtime.spawn(async move {
        let mut buffer = [0; 16];
        let error = socket.recv_from(&mut buffer).await.unwrap_err();
        (socket, error.kind())
    });
    runtime.block_on(std::future::poll_fn(|_| Poll::Ready(())));
    hosts.stopper.stop();
    let (socket, kind) = runtime.block_on(waiting).unwrap();
    assert_eq!(kind, ErrorKind::BrokenPipe);
    drop((socket, runtime));
    hosts.end();
}

/// Futures of calls are `Send`. The test checks that this compiles.
#[expect(dead_code, reason = "the compiler is the judge")]
fn futures_are_send(socket: &UdpSocket) {
    fn judge(_: impl Future + Send) {}
    judge(socket.recv_from(&mut []));
    judge(socket.send_to(&[], SocketAddr::from(([0; 4], 0))));
    judge(socket.connect("name:53"));
}

//! Streams and listeners, by the kernel's at the far end of a cable.

use std::future::poll_fn;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener as KernelListener, TcpStream as KernelStream};
use std::task::Poll;
use std::{iter, thread};

use forebay::Via;
use forebay_tokio::{TcpListener, TcpStream};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::Hosts;

const NEAR: ([u8; 4], u16) = ([10, 9, 0, 1], 7);
const FAR: ([u8; 4], u16) = ([10, 9, 0, 2], 80);
/// Address of which no answer comes.
const NOBODY: ([u8; 4], u16) = ([10, 9, 0, 3], 80);
/// Limit of descriptors, all of which are used.
const FEW: u64 = 256;

impl Hosts {
    fn listener(&self, runtime: &tokio::runtime::Runtime) -> TcpListener {
        let net = &self.net;
        let listener =
            self.near.run(|| forebay::net::TcpListener::bind(net, SocketAddr::from(NEAR)).unwrap());
        let _inside = runtime.enter();
        TcpListener::new(listener).unwrap()
    }
}

/// Tasks on both halves of several connections; a call that is cancelled loses nothing.
pub(crate) fn echo(via: Via) {
    let hosts = Hosts::new(via);
    let runtime = hosts.runtime();
    let listener = hosts.listener(&runtime);
    let served = runtime.spawn(async move {
        let mut tasks = Vec::new();
        for _ in 0..4 {
            // The first call ends before a connection comes.
            let (stream, _) = tokio::select! {
                biased;
                accepted = listener.accept() => accepted.unwrap(),
                () = std::future::ready(()) => listener.accept().await.unwrap(),
            };
            tasks.push(tokio::spawn(async move {
                let (mut from, mut to) = tokio::io::split(stream);
                tokio::io::copy(&mut from, &mut to).await.unwrap();
                to.shutdown().await.unwrap();
            }));
        }
        for task in tasks {
            task.await.unwrap();
        }
    });
    let far = &hosts.far;
    for _ in 0..4 {
        far.run(|| {
            let stream = KernelStream::connect(SocketAddr::from(NEAR)).unwrap();
            let sent: Vec<u8> = (0..=250).cycle().take(1_000_000).collect();
            thread::scope(|scope| {
                scope.spawn(|| {
                    (&stream).write_all(&sent).unwrap();
                    stream.shutdown(Shutdown::Write).unwrap();
                });
                let mut came = Vec::new();
                (&stream).read_to_end(&mut came).unwrap();
                assert!(came == sent, "bytes differ");
            });
        });
    }
    runtime.block_on(served).unwrap();
    drop(runtime);
    hosts.end();
}

/// Connecting, refusals, and ends that come twice.
pub(crate) fn calls() {
    let hosts = Hosts::new(Via::AfPacket);
    let runtime = hosts.runtime();
    let far = hosts.far.run(|| KernelListener::bind(SocketAddr::from(FAR)).unwrap());
    let net = hosts.net.clone();
    runtime.block_on(async {
        let to = SocketAddr::from(FAR);
        let connect = |to: SocketAddr| {
            let net = net.clone();
            // On a thread of the runtime, which is in the near namespace.
            tokio::spawn(async move { TcpStream::connect(&net, to).await })
        };
        let error = connect(SocketAddr::new(to.ip(), 81)).await.unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
        let mut stream = connect(to).await.unwrap().unwrap();
        let (mut kernels, _) = far.accept().unwrap();
        kernels.write_all(b"hello").unwrap();
        let mut came = [0; 3];
        assert_eq!(stream.peek(&mut came).await.unwrap(), 3);
        stream.read_exact(&mut came).await.unwrap();
        assert_eq!(&came, b"hel");
        drop(kernels);
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).await.unwrap();
        assert_eq!(rest, b"lo");
        stream.shutdown().await.unwrap();
        while stream.inner().info().is_some_and(|info| format!("{:?}", info.state) != "Closed") {
            tokio::task::yield_now().await;
        }
        stream.shutdown().await.unwrap();
    });
    drop((runtime, net));
    hosts.end();
}

/// Without descriptors, calls fail and leave no trace: a connection waits until there are some, and none is begun.
pub(crate) fn few_descriptors() {
    let hosts = Hosts::new(Via::AfPacket);
    let runtime = hosts.runtime();
    let listener = hosts.listener(&runtime);
    let far = hosts.far.run(|| KernelListener::bind(SocketAddr::from(FAR)).unwrap());
    let mut client = hosts.far.run(|| KernelStream::connect(SocketAddr::from(NEAR)).unwrap());
    client.write_all(b"question").unwrap();
    let net = hosts.net.clone();
    let before = getrlimit(Resource::Nofile);
    let limit = before.current.map_or(FEW, |limit| limit.min(FEW));
    let calls = async {
        setrlimit(Resource::Nofile, Rlimit { current: Some(limit), ..before }).unwrap();
        let held: Vec<_> = iter::from_fn(|| rustix::io::dup(&far).ok()).collect();
        let accepted = listener.accept().await.map(drop);
        let polled = poll_fn(|cx| Poll::Ready(listener.poll_accept(cx))).await;
        let connected = TcpStream::connect(&net, SocketAddr::from(FAR)).await.map(drop);
        drop(held);
        setrlimit(Resource::Nofile, before).unwrap();
        let Poll::Ready(polled) = polled else { panic!("the connection is lost") };
        for failed in [accepted, polled.map(drop), connected] {
            let error = failed.unwrap_err();
            assert_eq!(error.raw_os_error(), Some(Errno::MFILE.raw_os_error()), "{error}");
        }
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut came = [0; 8];
        stream.read_exact(&mut came).await.unwrap();
        assert_eq!(&came, b"question");
    };
    runtime.block_on(calls);
    far.set_nonblocking(true).unwrap();
    assert_eq!(far.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
    drop((runtime, listener, net));
    hosts.end();
}

/// A task that waits for its connection to open is told when the engine ends.
pub(crate) fn ended() {
    let hosts = Hosts::new(Via::AfPacket);
    hosts.near.command("ip neigh replace 10.9.0.3 lladdr 02:00:00:00:00:03 dev tka nud permanent");
    let runtime = hosts.runtime();
    let net = hosts.net.clone();
    let connect = async move { TcpStream::connect(&net, SocketAddr::from(NOBODY)).await.map(drop) };
    let waiting = runtime.spawn(connect);
    while hosts.net.flow_count() == 0 {
        thread::yield_now();
    }
    hosts.stopper.stop();
    let error = runtime.block_on(waiting).unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BrokenPipe);
    drop(runtime);
    hosts.end();
}

//! Equivalents of quinn's own transfer tests (quinn 0.11, src/tests.rs), with their names, over a socket of
//! ours at one end and the kernel's at the other, in both roles.

use std::sync::Arc;
use std::time::Duration;

use forebay::Via;
use forebay_quinn::Socket;
use quinn::{Connection, Endpoint, EndpointConfig, TokioRuntime, TransportConfig, VarInt};
use tokio::runtime::Runtime;

use crate::rig::{Hosts, PORT};
use crate::{Trial, tls};

pub(crate) const TRIALS: &[Trial] = &[
    ("udp_12_echo_v4", || echo(Args { streams: 1, bytes: 10 * 1024, ..Args::default() })),
    ("udp_12_echo_v6", || echo(Args { is_v6: true, bytes: 10 * 1024, ..Args::default() })),
    ("udp_12_echo_link_local", || {
        echo(Args { is_v6: true, is_link_local: true, bytes: 10 * 1024, ..Args::default() });
    }),
    ("udp_12_echo_dualstack", || echo(Args { is_dual: true, bytes: 10 * 1024, ..Args::default() })),
    ("udp_12_many_streams", || echo(Args { streams: 200, bytes: 20_000, ..Args::default() })),
    ("udp_12_stress_receive_window", || {
        echo(Args {
            receive_window: Some(37),
            streams: 50,
            bytes: 25 * 1024 + 11,
            ..Args::default()
        });
    }),
    ("udp_12_stress_stream_receive_window", || {
        let (stream_receive_window, bytes) = (Some(250), 10 * 1024 + 17);
        echo(Args { stream_receive_window, streams: 2, bytes, ..Args::default() });
    }),
    ("udp_12_stress_both_windows", || {
        let receive_window = Some(37);
        let (stream_receive_window, bytes) = (Some(250), 10 * 1024 + 17);
        echo(Args { receive_window, stream_receive_window, bytes, streams: 10, ..Args::default() });
    }),
    ("udp_12_large_transfer_both_ways", || {
        echo(Args { streams: 4, bytes: 4 << 20, ..Args::default() });
    }),
    ("udp_12_jumbo_packets_are_all_sent", jumbo),
    ("udp_12_two_datagram_readers", datagrams),
    ("udp_12_read_after_close", read_after_close),
    ("udp_12_rebind_recv", rebind),
];

/// Length of the headers of IPv4 and UDP.
const V4_HEADERS_BYTES: u16 = 28;

/// Transfer, as quinn's `EchoArgs`.
#[derive(Clone, Copy, Default)]
struct Args {
    is_v6: bool,
    /// True if the addresses are those of the link.
    is_link_local: bool,
    /// True if the server is bound to `[::]` and the client is of IPv4.
    is_dual: bool,
    streams: usize,
    bytes: usize,
    receive_window: Option<u32>,
    stream_receive_window: Option<u32>,
    /// MTU of the cable, used for all packets, if not Ethernet's.
    mtu: Option<u16>,
}

impl Args {
    /// Configuration of endpoints that receive packets of the MTU.
    fn endpoint(self) -> EndpointConfig {
        let mut config = EndpointConfig::default();
        if let Some(mtu) = self.mtu {
            config.max_udp_payload_size(mtu - V4_HEADERS_BYTES).unwrap();
        }
        config
    }
}

/// Place of our socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ours {
    Server,
    Client,
}

/// A server's endpoint and a client's, one over a socket of ours, and a connection between them.
struct Pair {
    hosts: Hosts,
    server: (Endpoint, Connection),
    client: (Endpoint, Connection),
    runtimes: [Runtime; 2],
    ours: Arc<Socket>,
}

impl Pair {
    fn new(role: Ours, args: Args) -> Self {
        let hosts = match args.mtu {
            Some(mtu) => Hosts::with_mtu(Via::AfPacket, mtu, |_, _| {}),
            None => Hosts::new(Via::AfXdp, |_, _| {}),
        };
        let runtimes = [Hosts::runtime(&hosts.near), Hosts::runtime(&hosts.far)];
        let (mut config, certificate) = tls::server().unwrap();
        let transport = Arc::new(transport(args));
        config.transport_config(Arc::clone(&transport));
        let mut client_config = tls::client(&certificate).unwrap();
        client_config.transport_config(transport);
        let any = if args.is_v6 || args.is_dual { "::" } else { "0.0.0.0" };
        let ours = hosts.near.run(|| {
            let _inside = runtimes[0].enter();
            let options = hosts.net.socket().recv_buffer_size(8 << 20);
            Arc::new(Socket::new(options.bind((any, PORT)).unwrap()).unwrap())
        });
        let config = |of| (role == of).then(|| config.clone());
        let near = {
            let _inside = runtimes[0].enter();
            let socket = Arc::clone(&ours);
            Endpoint::new_with_abstract_socket(
                args.endpoint(),
                config(Ours::Server),
                socket,
                Arc::new(TokioRuntime),
            )
            .unwrap()
        };
        let far = hosts.far.run(|| {
            let _inside = runtimes[1].enter();
            let at = std::net::SocketAddr::new(any.parse().unwrap(), PORT + 1);
            let socket = std::net::UdpSocket::bind(at).unwrap();
            let runtime = Arc::new(TokioRuntime);
            Endpoint::new(args.endpoint(), config(Ours::Client), socket, runtime).unwrap()
        });
        let [to_near, to_far] = match args.is_link_local {
            true => hosts.link_local_addresses(),
            false => [Hosts::near_address(args.is_v6), Hosts::far_address(args.is_v6)],
        };
        let ([near_runtime, far_runtime], [near_host, far_host]) =
            (&runtimes, [&hosts.near, &hosts.far]);
        let (server, client, to, connect_on, accept_on, host) = match role {
            Ours::Server => (near, far, to_near, far_runtime, near_runtime, far_host),
            Ours::Client => (far, near, to_far, near_runtime, far_runtime, near_host),
        };
        let acceptor = server.clone();
        let accepted =
            accept_on.spawn(async move { acceptor.accept().await.unwrap().await.unwrap() });
        let connecting = client.clone();
        let connected = host.run(|| {
            connect_on.block_on(async move {
                connecting.connect_with(client_config, to, tls::NAME).unwrap().await.unwrap()
            })
        });
        let accepted = accept_on.block_on(accepted).unwrap();
        Self { hosts, server: (server, accepted), client: (client, connected), runtimes, ours }
    }

    fn end(self) {
        let Self { hosts, server, client, runtimes, ours } = self;
        client.1.close(0u32.into(), b"done");
        drop((server.1, client.1));
        runtimes[0].block_on(async {
            server.0.wait_idle().await;
            client.0.wait_idle().await;
        });
        assert_eq!(ours.truncated(), 0);
        drop((server.0, client.0, ours, runtimes));
        hosts.end();
    }
}

fn transport(args: Args) -> TransportConfig {
    let mut transport = TransportConfig::default();
    transport.max_idle_timeout(Some(Duration::from_secs(20).try_into().unwrap()));
    transport.max_concurrent_bidi_streams(VarInt::from_u32(1000));
    if let Some(window) = args.receive_window {
        transport.receive_window(window.into());
    }
    if let Some(window) = args.stream_receive_window {
        transport.stream_receive_window(window.into());
    }
    if let Some(mtu) = args.mtu {
        transport.initial_mtu(mtu - V4_HEADERS_BYTES).mtu_discovery_config(None);
    }
    transport
}

/// Content of one stream: none is like another.
fn content(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| (at.wrapping_mul(0x9e37_79b1) >> 7).to_le_bytes()[seed % 3]).collect()
}

async fn answer(connection: Connection) {
    while let Ok((mut send, mut recv)) = connection.accept_bi().await {
        tokio::spawn(async move {
            // Of a closed connection nothing is to be answered.
            while let Ok(Some(chunk)) = recv.read_chunk(1 << 16, true).await {
                if send.write_chunk(chunk.bytes).await.is_err() {
                    return;
                }
            }
            let _ = send.finish();
        });
    }
}

/// Streams there and back, all at once: quinn's `run_echo`.
fn echo(args: Args) {
    for role in [Ours::Server, Ours::Client] {
        let pair = Pair::new(role, args);
        let [near, far] = &pair.runtimes;
        let (asks, answers) = if role == Ours::Server { (far, near) } else { (near, far) };
        let answering = answers.spawn(answer(pair.server.1.clone()));
        let connection = pair.client.1.clone();
        let asking = asks.spawn(async move {
            let streams = (0..args.streams.max(1)).map(|number| {
                let connection = connection.clone();
                tokio::spawn(async move {
                    let (mut send, mut recv) = connection.open_bi().await.unwrap();
                    let content = content(args.bytes, number);
                    let sent = content.clone();
                    let sending = tokio::spawn(async move {
                        send.write_all(&sent).await.unwrap();
                        send.finish().unwrap();
                    });
                    let back = recv.read_to_end(usize::MAX).await.unwrap();
                    sending.await.unwrap();
                    assert!(back == content, "stream {number} differs");
                })
            });
            for stream in streams.collect::<Vec<_>>() {
                stream.await.unwrap();
            }
        });
        asks.block_on(asking).unwrap();
        answering.abort();
        pair.end();
    }
}

/// Ten packets of a large MTU are longer than any payload of one send.
fn jumbo() {
    let pair = Pair::new(Ours::Server, Args { mtu: Some(9000), ..Args::default() });
    let [near, far] = &pair.runtimes;
    let (server, client) = (pair.server.1.clone(), pair.client.1.clone());
    let expected = content(8 << 20, 1);
    let sent = expected.clone();
    let sending = near.spawn(async move {
        let mut stream = server.open_uni().await.unwrap();
        stream.write_all(&sent).await.unwrap();
        stream.finish().unwrap();
    });
    let read = far.block_on(async {
        let mut stream = client.accept_uni().await.unwrap();
        stream.read_to_end(usize::MAX).await.unwrap()
    });
    near.block_on(sending).unwrap();
    assert!(read == expected, "what came differs");
    assert_eq!(pair.ours.unsent(), 0);
    pair.end();
}

/// Unreliable datagrams to two readers: each gets one.
fn datagrams() {
    for role in [Ours::Server, Ours::Client] {
        let pair = Pair::new(role, Args::default());
        let [near, far] = &pair.runtimes;
        let (to, from) = (pair.client.1.clone(), pair.server.1.clone());
        let (reads, sends) = if role == Ours::Server { (far, near) } else { (near, far) };
        let readers: Vec<_> = (0..2)
            .map(|_| {
                let to = to.clone();
                reads.spawn(async move { to.read_datagram().await.unwrap() })
            })
            .collect();
        sends.block_on(async { from.send_datagram(b"one"[..].into()).unwrap() });
        sends.block_on(async { from.send_datagram(b"two"[..].into()).unwrap() });
        let mut read: Vec<_> =
            readers.into_iter().map(|reader| reads.block_on(reader).unwrap()).collect();
        read.sort();
        assert_eq!(read, [&b"one"[..], b"two"]);
        pair.end();
    }
}

/// Content that was acknowledged before the connection was closed is read after it.
fn read_after_close() {
    const MESSAGE: &[u8] = b"goodbye!";
    for role in [Ours::Server, Ours::Client] {
        let pair = Pair::new(role, Args::default());
        let [near, far] = &pair.runtimes;
        let (reads, sends) = if role == Ours::Server { (far, near) } else { (near, far) };
        let server = pair.server.1.clone();
        sends.block_on(async {
            let mut stream = server.open_uni().await.unwrap();
            stream.write_all(MESSAGE).await.unwrap();
            stream.finish().unwrap();
            stream.stopped().await.unwrap(); // all was acknowledged
            server.close(0u32.into(), b"done");
        });
        let client = pair.client.1.clone();
        let read = reads.block_on(async {
            client.closed().await;
            let mut stream = client.accept_uni().await.unwrap();
            stream.read_to_end(usize::MAX).await.unwrap()
        });
        assert_eq!(read, MESSAGE);
        pair.end();
    }
}

/// The kernel's client takes another port, and hears the server, which did not know of it before.
fn rebind() {
    const MESSAGE: &[u8] = b"hello";
    let pair = Pair::new(Ours::Server, Args::default());
    let [near, far] = &pair.runtimes;
    pair.hosts.far.run(|| {
        let _inside = far.enter();
        let other = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
        pair.client.0.rebind(other).unwrap();
    });
    let (server, client) = (pair.server.1.clone(), pair.client.1.clone());
    let reading = far.spawn(async move {
        let mut stream = client.accept_uni().await.unwrap();
        stream.read_to_end(100).await.unwrap()
    });
    near.block_on(async move {
        let mut stream = server.open_uni().await.unwrap();
        stream.write_all(MESSAGE).await.unwrap();
        stream.finish().unwrap();
    });
    assert_eq!(far.block_on(reading).unwrap(), MESSAGE);
    pair.end();
}

//! Clients that change their address while they read: the example's, ten times in one file.

use forebay::Via;
use forebay::net::EndpointIndex;
use forebay_quinn::EndpointGroup;
use ring::digest::{SHA256, digest};

use crate::fetch::fetch;
use crate::rig::Hosts;
use crate::serve::Server;
use crate::{Trial, tls};

pub(crate) const TRIALS: &[Trial] = &[
    ("udp_12_moving_client_keeps_its_endpoint", || moves(Via::AfXdp)),
    ("udp_12_moving_client_keeps_its_endpoint_copied", || moves(Via::AfPacket)),
    ("udp_12_group_refuses_what_cannot_be", refused),
];

const FILE_BYTES: usize = 24 << 20;
const MOVES: u32 = 10;

/// Several clients, one after the other, each with another endpoint perhaps: whatever its addresses, its
/// datagrams reach the endpoint that it began with, and the file is whole.
fn moves(via: Via) {
    const CLIENTS: u64 = 6;
    let folder = tempfile::tempdir().unwrap();
    let content: Vec<u8> = (0..FILE_BYTES).map(|at| (at >> 3).to_le_bytes()[at % 3]).collect();
    std::fs::write(folder.path().join("file"), &content).unwrap();
    let expected = digest(&SHA256, &content);
    let (config, certificate) = tls::server().unwrap();
    let mut server = None;
    let hosts = Hosts::new(via, |net, engine| {
        let local = Hosts::near_address(false);
        let group = EndpointGroup::new(net, local, EndpointGroup::ID_BYTES).unwrap();
        engine.control().set("flow_key", &group.flow_key()).unwrap();
        server = Some(Server::start(net, &group, folder.path(), &config).unwrap());
    });
    let server = server.unwrap();
    let runtime = Hosts::runtime(&hosts.far);
    let counted = || -> Vec<(u64, u64)> {
        let counts = server.counts();
        counts.iter().map(|(_, counts)| (counts.connections, counts.socket.queued)).collect()
    };
    for client in 0..CLIENTS {
        let before = counted();
        let fetched = hosts.far.run(|| {
            runtime.block_on(async {
                let mut endpoint = quinn::Endpoint::client("10.9.0.2:0".parse().unwrap()).unwrap();
                endpoint.set_default_client_config(tls::client(&certificate).unwrap());
                fetch(&endpoint, Hosts::near_address(false), "file", MOVES)
                    .await
                    .map_err(|error| error.to_string())
            })
        });
        let fetched = fetched.unwrap();
        assert_eq!((fetched.moves, fetched.len), (MOVES, FILE_BYTES as u64), "client {client}");
        assert_eq!(fetched.sha256, expected.as_ref(), "client {client}");
        let after = counted();
        let grown: Vec<_> =
            after.iter().zip(&before).map(|(now, then)| (now.0 - then.0, now.1 - then.1)).collect();
        let of_connection: Vec<_> =
            grown.iter().filter(|(connections, _)| *connections > 0).collect();
        assert_eq!(of_connection.len(), 1, "one endpoint's: {grown:?}");
        let others: u64 = grown.iter().filter(|grown| grown.0 == 0).map(|grown| grown.1).sum();
        assert_eq!(others, 0, "no datagram went elsewhere: {grown:?}");
    }
    let counts = server.counts();
    assert_eq!(counts.iter().map(|(_, counts)| counts.connections).sum::<u64>(), CLIENTS);
    for (at, (cpu, counts)) in counts.iter().enumerate() {
        let here = counts.socket.by_cpu.get(at).copied().unwrap_or(0);
        eprintln!(
            "{cpu}: {} connections, {here} of {} datagrams delivered there",
            counts.connections, counts.socket.queued
        );
        assert_eq!(counts.socket.rcvbuf_errors, 0);
    }
    hosts.stop();
    server.end();
    drop(runtime);
    hosts.end();
}

fn refused() {
    let hosts = Hosts::new(Via::AfPacket, |_, _| {});
    let group = |port, id_bytes| EndpointGroup::new(&hosts.net, ([0; 4], port).into(), id_bytes);
    for (port, id_bytes) in [(0, 12), (4433, 7), (4433, 21), (4433, 0)] {
        assert!(group(port, id_bytes).is_err(), "{port} {id_bytes}");
    }
    let group = group(4433, 20).unwrap();
    assert_eq!(group.flow_key(), "auto,quic:4433:20");
    hosts.control.set("flow_key", &group.flow_key()).unwrap();
    assert_eq!(hosts.control.knob("flow_key").unwrap(), "auto,quic:4433:20");
    let runtime = Hosts::runtime(&hosts.near);
    hosts.near.run(|| {
        let _inside = runtime.enter();
        drop((group.bind(EndpointIndex(0)).unwrap(), group.bind(EndpointIndex(1)).unwrap()));
    });
    drop(runtime);
    hosts.end();
}

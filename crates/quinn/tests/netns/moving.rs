//! Clients that change their address while they read: the example's, ten times in one file.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use forebay::Via;
use forebay::net::connection_id::EndpointIndex;
use forebay_quinn::EndpointGroup;
use ring::digest::{SHA256, digest};

use crate::fetch::fetch;
use crate::rig::Hosts;
use crate::serve::Server;
use crate::{Trial, tls};

pub(crate) const TRIALS: &[Trial] = &[
    ("udp_12_moving_client_keeps_its_endpoint", || moves(Via::AfXdp, false)),
    ("udp_12_moving_client_keeps_its_endpoint_copied", || moves(Via::AfPacket, false)),
    ("udp_12_steering_changes_keep_the_endpoint", || moves(Via::AfXdp, true)),
    ("udp_12_group_refuses_what_cannot_be", refused),
];

const FILE_BYTES: usize = 16 << 20;
const MOVES: u32 = 10;

/// Several clients, one after the other, each with another endpoint perhaps: whatever its addresses, its
/// datagrams reach the endpoint that it began with, and the file is whole. In a storm, masks and flow keys change
/// all the while.
fn moves(via: Via, is_storm: bool) {
    const CLIENTS: u64 = 4;
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
    let storm = is_storm.then(|| Storm::begin(&hosts));
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
    let changes = storm.map(Storm::end);
    let counts = server.counts();
    assert_eq!(counts.iter().map(|(_, counts)| counts.connections).sum::<u64>(), CLIENTS);
    for (at, (cpu, counts)) in counts.iter().enumerate() {
        let here = counts.socket.by_cpu.get(at).copied().unwrap_or(0);
        eprintln!(
            "{cpu}: {} connections, {here} of {} datagrams delivered there",
            counts.connections, counts.socket.queued
        );
        assert_eq!(counts.socket.rcvbuf_errors, 0);
        // All but the first ones after each move, and what was on its way.
        assert!(is_storm || here * 5 >= counts.socket.queued * 4, "its own CPU's");
    }
    eprintln!("{changes:?} changes of steering");
    hosts.stop();
    server.end();
    drop(runtime);
    hosts.end();
}

/// A thread that changes how packets are steered, again and again.
struct Storm {
    is_over: Arc<AtomicBool>,
    thread: JoinHandle<u64>,
}

impl Storm {
    fn begin(hosts: &Hosts) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let (over, control) = (Arc::clone(&is_over), hosts.control.clone());
        let keys = ["auto", "auto,quic:4433:12", "outer", "inner,quic:4433:12"];
        let thread = thread::spawn(move || {
            let mut changes = 0;
            while !over.load(Ordering::Relaxed) {
                for (key, mask) in keys.iter().zip(["1", "2", "3", "0"]) {
                    control.set("flow_key", key).unwrap();
                    control.set("rps_cpus", mask).unwrap();
                    changes += 2;
                    thread::sleep(Duration::from_millis(5));
                }
            }
            changes
        });
        Self { is_over, thread }
    }

    fn end(self) -> u64 {
        self.is_over.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
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

//! The service over a TAP, with the kernel's sockets as clients.

use std::net::UdpSocket;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use forebay::net::{Addresses, Net, NetConfig};
use forebay_device::{Device, DeviceConfig, Via};
use forebay_engine::Config;
use forebay_testkit::namespaces::ip;

use crate::answer::answer;
use crate::queries::{clients, names, query};
use crate::serve::Server;
use crate::{ZONE, zone_of};

/// Queries in flight per client.
const WINDOW: usize = 16;

/// Checks that every answer arrives, equals the composed one, and that answers to a client's socket
/// arrive in the order of its queries.
pub(crate) fn over_a_tap() {
    let mut devices = [Device::open(&DeviceConfig::new("dns", Via::Tap)).unwrap()];
    ip("addr add 10.9.0.1/24 dev dns");
    ip("link set dns up");
    ip("neigh replace 10.9.0.2 lladdr 02:00:00:00:00:02 dev dns nud permanent");
    let own = vec![Addresses::parse_prefix("10.9.0.2/24").unwrap()];
    let addresses = vec![Addresses::Own { mac: Some([2, 0, 0, 0, 0, 2]), addresses: own }];
    let config = Config::live();
    let (net, engine) =
        Net::over(&config, &NetConfig { addresses, ..NetConfig::default() }, &mut devices).unwrap();
    let zone = Arc::new(zone_of(ZONE));
    let listen = "10.9.0.2:53".parse().unwrap();
    let server = Server::bind(Arc::clone(&zone), &net, config.cpus.cpus(), listen).unwrap();
    let server = Arc::new(server);
    let (stopper, serving) = (engine.stopper(), Arc::clone(&server));
    let running = thread::spawn(move || engine.run_with(move |cpu| serving.serve(cpu)));
    let queries: Vec<_> = names()
        .iter()
        .flat_map(|name| clients().into_iter().map(|client| query(name, 1, client.as_deref())))
        .collect();
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| ask(&queries, |query, room| answer(&zone, query, room)));
        }
    });
    stopper.stop();
    let outcome = running.join().unwrap().unwrap();
    assert!(outcome.errors.is_empty(), "{:?}", outcome.errors);
    assert_eq!(outcome.frames_away, 0);
    let answers: u64 = server.served().iter().map(|(_, served, _)| served.answers).sum();
    assert_eq!(answers, 4 * queries.len() as u64);
}

/// Sends all queries from one socket.
fn ask(queries: &[Vec<u8>], answer: impl Fn(&[u8], &mut [u8]) -> Option<usize>) {
    let client = UdpSocket::bind("0.0.0.0:0").unwrap();
    client.connect("10.9.0.2:53").unwrap();
    client.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let (mut got, mut due) = ([0; 1500], [0; 1500]);
    let mut id = 0_u16;
    for queries in queries.chunks(WINDOW) {
        let numbered = queries.iter().map(|query| {
            id = id.wrapping_add(1);
            [&id.to_be_bytes()[..], &query[2..]].concat()
        });
        let numbered: Vec<_> = numbered.collect();
        for query in &numbered {
            client.send(query).unwrap();
        }
        for query in &numbered {
            let got_len = client.recv(&mut got).unwrap();
            let due_len = answer(query, &mut due).unwrap();
            assert_eq!(got[..got_len], due[..due_len], "to {query:02x?}");
        }
    }
}

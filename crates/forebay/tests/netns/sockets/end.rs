//! Datagrams still queued when a run ends.

use std::net::SocketAddrV4;
use std::thread;
use std::time::Duration;

use forebay::net::{Net, NetConfig};
use forebay_stack::network::NetworkDrop;
use rustix::net::{AddressFamily, SendFlags, SocketType, ipproto, sendto, socket};

use crate::sockets::Trial;
use crate::sockets::rig::{OURS, Running, client, over_tap};

pub(crate) const TRIALS: &[Trial] = &[("promise_2_waiting_frames_return_at_end", waiting)];

fn waiting() {
    const FRAGMENTS: u64 = 40;
    const TO_NOBODY: u64 = 5;
    let (net, engine) = over_tap(&NetConfig::default());
    let lazy = net.bind(format!("{OURS}:7")).unwrap();
    let dying = net.bind(format!("{OURS}:8")).unwrap();
    let running = Running::begin(engine);
    let (to_lazy, to_dying) = (client(lazy.local_addr()), client(dying.local_addr()));
    for number in 0..100u32 {
        to_lazy.send(&number.to_be_bytes()).unwrap();
        to_dying.send(&number.to_be_bytes()).unwrap();
    }
    let reader = thread::spawn(move || {
        // The other datagrams are in the reader's hands or in the queue when the thread dies.
        dying.recv(&mut [0; 4]).unwrap();
        std::panic::resume_unwind(Box::new("it dies"));
    });
    assert!(reader.join().is_err());
    for id in 0..FRAGMENTS {
        send_first_fragment(u16::try_from(id).unwrap());
    }
    for _ in 0..TO_NOBODY {
        lazy.send_to(b"anybody?", "10.9.0.77:7").unwrap();
    }
    let reassembled = |net: &Net| {
        net.counters().iter().map(|counters| counters.ip.reasm_reqds.get()).sum::<u64>()
    };
    while reassembled(&net) < FRAGMENTS || lazy.counts().queued < 100 {
        thread::sleep(Duration::from_millis(1));
    }
    let mut outcome = running.end();
    let counts = lazy.counts();
    assert_eq!(outcome.frames_away as u64, counts.queued, "what may still be read");
    let given_up = |counters: &forebay_stack::network::NetworkCounters| {
        counters.drops.get(NetworkDrop::FragReasmTimeout)
    };
    assert_eq!(net.counters().iter().map(|it| given_up(it)).sum::<u64>(), FRAGMENTS);
    // Packets wait for at most three seconds, which may have passed.
    let drops = net.neighbour_drops();
    let sum = drops.neigh_queuefull + drops.neigh_failed + drops.neigh_dead;
    assert_eq!(sum, TO_NOBODY);
    // After the end, a packet for an unknown neighbour is not queued.
    lazy.send_to(b"anybody?", "10.9.0.77:7").unwrap_or_default();
    drop(lazy);
    assert_eq!(net.frames_away(&mut outcome), 0);
}

/// Sends only the first fragment of a datagram.
fn send_first_fragment(id: u16) {
    const DATA_BYTES: usize = 64;
    let mut bytes = vec![0; 20 + DATA_BYTES];
    bytes[0] = 0x45;
    bytes[4..6].copy_from_slice(&(id + 1).to_be_bytes());
    bytes[6] = 0x20; // more fragments
    (bytes[8], bytes[9]) = (64, 17);
    bytes[12..16].copy_from_slice(&[10, 9, 0, 1]);
    bytes[16..20].copy_from_slice(&[10, 9, 0, 2]);
    let raw = socket(AddressFamily::INET, SocketType::RAW, Some(ipproto::RAW)).unwrap();
    let to: SocketAddrV4 = format!("{OURS}:0").parse().unwrap();
    // The kernel fills in the length and the checksum.
    assert_eq!(sendto(&raw, &bytes, SendFlags::empty(), &to).unwrap(), bytes.len());
}

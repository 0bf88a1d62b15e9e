//! Host of a stack for tests: devices with the same addresses, a clock that stands, sockets that are never closed.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use forebay_buf::pool::{ChunkClass, carve, region_bytes};
use forebay_buf::{Pool, Region};
use forebay_rx::{Packet, RxQueue};
use forebay_stack::Host;
use forebay_stack::network::neighbours::Neighbours;
use forebay_stack::network::{Identity, TcpPathError};
use forebay_stack::socket::SocketId;
use forebay_stack::socket::queue::SocketQueue;
use forebay_stack::socket::reclaim::{ReclaimPolicy, SharedPolicy};
use forebay_stack::socket::table::{Binding, SocketTable};

/// Packets sent by a host's stack.
#[derive(Clone, Debug, Default)]
pub struct SentPackets(Arc<Mutex<Vec<Packet>>>);

impl SentPackets {
    /// Takes all packets sent so far.
    pub fn take(&self) -> Vec<Packet> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

/// Host with these addresses on each device, at time 1 ns unless that is changed.
#[derive(Debug)]
pub struct FixedHost {
    identity: Arc<Identity>,
    /// Number of devices: 1, unless that is changed. Queues belong to them in turn.
    pub devices: usize,
    table: Arc<SocketTable>,
    /// Indexed by [`SocketId::index`].
    sockets: Vec<Arc<SocketQueue>>,
    neighbours: Mutex<Neighbours>,
    /// Buffer policy for slow readers.
    pub policy: Arc<SharedPolicy>,
    /// Packets that the stack sent.
    pub sent: SentPackets,
    /// Time, in ns.
    pub now_ns: Arc<AtomicU64>,
    /// Memory for packets that no batch causes: 8 frames, unless that is changed.
    pub pool: Mutex<Pool>,
}

impl FixedHost {
    /// Creates a host with these sockets; the queue of each is at the index of its id.
    pub fn new(identity: Identity, bound: Vec<Binding>, sockets: Vec<Arc<SocketQueue>>) -> Self {
        Self {
            identity: Arc::new(identity),
            devices: 1,
            table: Arc::new(SocketTable::new(bound, 1)),
            sockets,
            neighbours: Mutex::new(Neighbours::new([1; 16])),
            policy: Arc::default(),
            sent: SentPackets::default(),
            now_ns: Arc::new(AtomicU64::new(1)),
            pool: Mutex::new(pool()),
        }
    }
}

/// Packet memory of 8 frames.
fn pool() -> Pool {
    let share = vec![ChunkClass { chunk_bytes: 512, chunks: 8 }];
    let region = Region::allocate(region_bytes(std::slice::from_ref(&share)));
    carve(region, &[share]).unwrap().remove(0)
}

impl Host for FixedHost {
    fn now_ns(&self) -> u64 {
        self.now_ns.load(Ordering::Relaxed)
    }

    fn table(&mut self) -> &Arc<SocketTable> {
        &self.table
    }

    fn socket(&self, socket: SocketId) -> Option<Arc<SocketQueue>> {
        self.sockets.get(socket.index()).cloned()
    }

    fn sockets_closed(&self) -> u64 {
        0
    }

    fn policy(&self) -> ReclaimPolicy {
        self.policy.load()
    }

    fn device_of(&self, queue: RxQueue) -> usize {
        usize::from(queue.0) % self.devices
    }

    fn device_count(&self) -> usize {
        self.devices
    }

    fn with_pool(&self, act: &mut dyn FnMut(&mut Pool)) {
        act(&mut self.pool.lock().unwrap());
    }

    fn identity(&self, _device: usize) -> Arc<Identity> {
        Arc::clone(&self.identity)
    }

    fn neighbours(&self, _device: usize) -> MutexGuard<'_, Neighbours> {
        self.neighbours.lock().unwrap()
    }

    fn send(&mut self, _device: usize, packets: &mut Vec<Packet>) {
        self.sent.0.lock().unwrap().append(packets);
    }

    fn receive_segments(&mut self, _on: &Identity, segments: &mut Vec<Packet>) {
        unreachable!("the network layer takes no TCP: {segments:?}")
    }

    fn receive_path_error(&mut self, about: &TcpPathError) {
        unreachable!("the network layer takes no TCP: {about:?}")
    }

    fn learn_path_mtu(&self, _destination: IpAddr, _mtu_bytes: u32) {}

    fn tick(&mut self, _now_ns: u64) {}

    fn sleep_max_ns(&mut self) -> Option<u64> {
        None
    }
}

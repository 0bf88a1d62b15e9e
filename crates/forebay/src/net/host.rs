//! The host of one CPU's stack: Linux's clock and neighbours, the sockets of [`Net`](super::Net),
//! the sinks.

use std::fmt;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, MutexGuard};

use arc_swap::{ArcSwap, Cache};
use forebay_buf::Pool;
use forebay_rx::{Packet, RxQueue};
use forebay_stack::Host;
use forebay_stack::network::neighbours::Neighbours;
use forebay_stack::network::{Identity, TcpPathError};
use forebay_stack::socket::SocketId;
use forebay_stack::socket::queue::SocketQueue;
use forebay_stack::socket::reclaim::ReclaimPolicy;
use forebay_stack::socket::table::SocketTable;
use forebay_sys::clock::Clock;

use super::following::Follower;
use super::shared::{CpuIndex, NetState};
use super::tcp::TcpTicks;

/// Host of the stack of one CPU.
pub(super) struct CpuHost {
    index: CpuIndex,
    shared: Arc<NetState>,
    table: Cache<Arc<ArcSwap<SocketTable>>, Arc<SocketTable>>,
    clock: Clock,
    ticks: TcpTicks,
    /// `None` if another CPU follows the kernel.
    follower: Option<Follower>,
}

impl CpuHost {
    pub(super) fn new(index: CpuIndex, shared: Arc<NetState>) -> Self {
        let table = Cache::new(Arc::clone(&shared.table));
        let (clock, ticks) =
            (shared.tcp.clock().clone(), TcpTicks::new(index, Arc::clone(&shared)));
        let follower = Follower::of(index, &shared);
        Self { index, shared, table, clock, ticks, follower }
    }
}

impl Host for CpuHost {
    fn now_ns(&self) -> u64 {
        self.clock.now_ns()
    }

    fn table(&mut self) -> &Arc<SocketTable> {
        self.table.load()
    }

    fn socket(&self, socket: SocketId) -> Option<Arc<SocketQueue>> {
        self.shared.directory.find(socket)
    }

    fn sockets_closed(&self) -> u64 {
        self.shared.directory.closed()
    }

    fn policy(&self) -> ReclaimPolicy {
        self.shared.policy.load()
    }

    fn device_of(&self, queue: RxQueue) -> usize {
        self.shared.device_of(queue)
    }

    fn device_count(&self) -> usize {
        self.shared.devices.len()
    }

    fn with_pool(&self, act: &mut dyn FnMut(&mut Pool)) {
        act(self.shared.transmitter_of(self.index).pool());
    }

    fn identity(&self, device: usize) -> Arc<Identity> {
        self.shared.devices[device].identity.load_full()
    }

    fn neighbours(&self, device: usize) -> MutexGuard<'_, Neighbours> {
        self.shared.devices[device].learned()
    }

    fn send(&mut self, device: usize, packets: &mut Vec<Packet>) {
        let mtu = self.shared.routes().identity(device).mtu;
        let dropped = |to| self.shared.unsent.count_discard(to);
        self.shared.transmitter_of(self.index).gather_answers(device, mtu, packets, dropped);
        // Ignored: a device that is gone ends its source.
        let _ = self.shared.flush(self.index, device);
    }

    fn receive_segments(&mut self, on: &Identity, segments: &mut Vec<Packet>) {
        self.shared.receive_segments(on, self.index, segments);
    }

    fn receive_path_error(&mut self, about: &TcpPathError) {
        self.shared.receive_path_error(about);
    }

    fn learn_path_mtu(&self, destination: IpAddr, mtu_bytes: u32) {
        self.shared.path_mtus.learn(destination, mtu_bytes, self.clock.now_ns());
    }

    fn tick(&mut self, now_ns: u64) {
        self.ticks.tick(now_ns);
        if let Some(follower) = &mut self.follower {
            follower.tick(now_ns);
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.follower.as_ref()?.descriptor()
    }

    fn sleep_max_ns(&mut self) -> Option<u64> {
        let timers_ns = self.ticks.sleep_max_ns();
        let follow_ns = self.follower.as_ref().and_then(Follower::sleep_max_ns);
        timers_ns.into_iter().chain(follow_ns).min()
    }
}

impl fmt::Debug for CpuHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuHost({})", self.index.0)
    }
}

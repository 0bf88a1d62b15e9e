//! The host of one CPU's stack: Linux's clock and neighbours, the sockets of [`Net`](super::Net),
//! the sinks.

use std::fmt;
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

use super::identities;
use super::shared::{CpuIndex, NetState};
use super::tcp::TcpTicks;

/// CPU that looks whether tentative addresses may be used.
const LOOKING_CPU: CpuIndex = CpuIndex(0);

/// Interval of its first looks, in ns, and the longest one: without a carrier an address stays tentative.
const LOOK_NS: u64 = 500_000_000;
const LOOK_MAX_NS: u64 = 32_000_000_000;

/// Looks before the interval doubles, each time.
const LOOKS: u32 = 8;

/// Host of the stack of one CPU.
pub(super) struct CpuHost {
    index: CpuIndex,
    shared: Arc<NetState>,
    table: Cache<Arc<ArcSwap<SocketTable>>, Arc<SocketTable>>,
    clock: Clock,
    ticks: TcpTicks,
    /// Time of the next look for tentative addresses, and looks since there were none.
    next_look_ns: u64,
    looks: u32,
}

impl CpuHost {
    pub(super) fn new(index: CpuIndex, shared: Arc<NetState>) -> Self {
        let table = Cache::new(Arc::clone(&shared.table));
        let (clock, ticks) =
            (shared.tcp.clock().clone(), TcpTicks::new(index, Arc::clone(&shared)));
        Self { index, shared, table, clock, ticks, next_look_ns: 0, looks: 0 }
    }

    /// Interval of looks for tentative addresses; `None` if there are none, or another CPU looks.
    fn look_interval_ns(&mut self) -> Option<u64> {
        if self.index != LOOKING_CPU || !identities::has_tentative(&self.shared.devices) {
            (self.next_look_ns, self.looks) = (0, 0);
            return None;
        }
        Some((LOOK_NS << (self.looks / LOOKS).min(u64::BITS / 2)).min(LOOK_MAX_NS))
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

    fn tick(&mut self, now_ns: u64) {
        self.ticks.tick(now_ns);
        if let Some(interval_ns) = self.look_interval_ns()
            && now_ns >= self.next_look_ns
        {
            let has_changed = identities::refresh_tentative(&self.shared.devices);
            self.next_look_ns = now_ns.saturating_add(interval_ns);
            self.looks = if has_changed { 0 } else { self.looks.saturating_add(1) };
        }
    }

    fn sleep_max_ns(&mut self) -> Option<u64> {
        let timers_ns = self.ticks.sleep_max_ns();
        let look_ns =
            self.look_interval_ns().map(|_| self.next_look_ns.saturating_sub(self.clock.now_ns()));
        timers_ns.into_iter().chain(look_ns).min()
    }
}

impl fmt::Debug for CpuHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuHost({})", self.index.0)
    }
}

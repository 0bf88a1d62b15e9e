//! A host over the sinks of a test, without devices or an engine.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::Duration;

use arc_swap::ArcSwap;
use etherparse::{PacketBuilderStep, UdpHeader};
use forebay_buf::pool::{ChunkClass, carve, region_bytes};
use forebay_buf::{Pool, Region};
use forebay_engine::{Arrived, BusyPoll, Config, Engine, Flows};
use forebay_rx::packet::Arrival;
use forebay_rx::parse::{Link, Verify, parse};
use forebay_rx::sink::{Sink, SinkCounters, SinkError};
use forebay_rx::{CpuId, Packet};
use forebay_stack::network::{Identity, Prefix};
use forebay_stack::socket::reclaim::SharedPolicy;
use forebay_stack::tcp::TcpConfig;
use forebay_sys::cpu_list::CpuList;

use super::neighbours::DeviceNeighbours;
use super::routes::Gateways;
use super::shared::{CpuIndex, NetDevice, NetParts, NetState};
use super::transmit::{Between, Gathered, SentMarks, TransmitQueue};
use super::{EndOnDrop, NetEngine, stacks};

/// Own address of each device: 10.9.0.1/24, 10.9.1.1/24 and so on.
pub(super) fn own_address(device: usize) -> IpAddr {
    IpAddr::from([10, 9, u8::try_from(device).unwrap(), 1])
}

/// Neighbour on each device.
pub(super) fn neighbour(device: usize) -> SocketAddr {
    SocketAddr::from(([10, 9, u8::try_from(device).unwrap(), 2], 4000))
}

/// A host with these transmit queues, one for each CPU: a sink for each device.
pub(super) fn host(queues: Vec<Vec<Box<dyn Sink>>>, tcp: TcpConfig) -> Arc<NetState> {
    let devices = (0..queues[0].len()).map(device).collect();
    host_on(devices, queues, tcp, |_| DeviceNeighbours::NoLink)
}

/// A device that only this process has.
pub(super) fn device(device: usize) -> NetDevice {
    let addresses = vec![Prefix { address: own_address(device), bits: 24 }];
    NetDevice {
        name: format!("test{device}"),
        identity: ArcSwap::from_pointee(Identity { addresses, mtu: 1500, ..Identity::default() }),
        kernels: None,
        interface: None,
        mtu_max: u32::MAX,
        gateways: Gateways::default(),
        learned: Arc::default(),
    }
}

/// A host with these devices, and next hops on them.
pub(super) fn host_on(
    devices: Vec<NetDevice>,
    queues: Vec<Vec<Box<dyn Sink>>>,
    tcp: TcpConfig,
    neighbours: impl Fn(&NetDevice) -> DeviceNeighbours,
) -> Arc<NetState> {
    let counters = queues.iter().map(|_| Arc::default()).collect();
    let state = Arc::new(NetState::new(NetParts {
        cpus: (0..queues.len()).map(|cpu| CpuId(u16::try_from(cpu).unwrap())).collect(),
        queues: (0..devices.len()).collect(),
        devices,
        following: None,
        policy: SharedPolicy::default(),
        no_copy_cache: None,
        rmem_default: 1 << 20,
        rmem_max: 1 << 20,
        seed: 1,
        tcp,
        counters,
        division: None,
    }));
    let with_next_hops = |sinks: Vec<Box<dyn Sink>>| {
        let hops = state.devices.iter().map(&neighbours);
        let paths = sinks.into_iter().zip(hops).collect();
        let (of_all, clock) = (state.for_transmitters(), state.tcp.clock().clone());
        TransmitQueue::new(pool(64), true, of_all, clock, paths)
    };
    let queues = queues.into_iter().map(with_next_hops).collect();
    state.complete(queues, Flows::default(), pool(1));
    state
}

/// An engine without devices, on the CPUs of a host, whose packets would go to its sockets.
pub(super) fn engine_of(state: &Arc<NetState>) -> NetEngine {
    let config = Config { cpus: CpuList::new(state.cpus().to_vec()), ..Config::live() };
    let caches = state.cpus().iter().map(|_| None).collect();
    let mut stacks = stacks(state, caches, None).into_iter();
    let engine = Engine::over(&config, &mut [], |_| stacks.next().unwrap()).unwrap();
    NetEngine { engine, shared: EndOnDrop(Arc::clone(state)) }
}

/// Gathers a datagram on a CPU, for the neighbour on a device.
pub(super) fn gather_to(state: &NetState, (cpu, device): (usize, usize), len: usize) {
    let source = SocketAddr::new(own_address(device), 53);
    let between = Between { source, destination: neighbour(device) };
    let on = state.routes().identity(device);
    let (payload, marks) = (vec![7; len], SentMarks::default());
    let mut transmitter = state.transmitter_of(CpuIndex(cpu));
    let gathered = transmitter.gather(device, &on, between, None, &payload, marks);
    assert_eq!(gathered.unwrap(), Gathered::Yes);
}

/// Frames of 2 KiB.
pub(super) fn pool(chunks: u32) -> Pool {
    let share = vec![ChunkClass { chunk_bytes: 2048, chunks }];
    let region = Region::allocate(region_bytes(std::slice::from_ref(&share)));
    carve(region, &[share]).unwrap().remove(0)
}

/// A datagram of three bytes.
pub(super) fn received(
    pool: &mut Pool,
    link: Link,
    builder: PacketBuilderStep<UdpHeader>,
) -> Packet {
    let mut bytes = Vec::new();
    builder.write(&mut bytes, &[7; 3]).unwrap();
    let len_bytes = u32::try_from(bytes.len()).unwrap();
    let mut frame = pool.allocate(len_bytes).unwrap();
    frame.copy_from(&bytes);
    let mut packet = Packet::received(frame, Arrival(1), len_bytes, link);
    packet.headers = parse(&bytes, len_bytes, link, Verify::Checksums);
    packet
}

/// Turns that take some time, and find packets, but none for who waits. Those after the first are too many.
#[derive(Default)]
pub(super) struct PacketsForOthers(AtomicU32);

impl PacketsForOthers {
    /// Time of a turn.
    pub(super) const TURN: Duration = Duration::from_millis(1);
}

impl BusyPoll for PacketsForOthers {
    fn before_wait(&self) -> Arrived {
        thread::sleep(Self::TURN);
        assert_eq!(self.0.fetch_add(1, Ordering::Relaxed), 0, "turned after the time-out");
        Arrived::Packets
    }

    fn is_moderated(&self) -> bool {
        false
    }

    fn resume(&self) {}

    fn after_wait(&self) {}

    fn suspend(&self) {}
}

/// Sink that records what it sends, and is told by a barrier when its first call begins and may end.
#[derive(Default)]
pub(super) struct Recording {
    pub(super) lens: Arc<Mutex<Vec<usize>>>,
    pub(super) gate: Option<Arc<Barrier>>,
    pub(super) counters: Arc<SinkCounters>,
}

impl Sink for Recording {
    fn send(&mut self, packets: &mut Vec<Packet>) -> Result<(), SinkError> {
        if let Some(gate) = self.gate.take() {
            gate.wait();
            gate.wait();
        }
        let lens = packets.iter().map(|packet| packet.view().payload().len());
        self.lens.lock().unwrap().extend(lens);
        Ok(())
    }

    fn counters(&self) -> &Arc<SinkCounters> {
        &self.counters
    }
}

//! Messages to a back end over the socket (the vhost-user protocol as documented by QEMU), with
//! crate vhost.
//!
//! The crate waits for an answer without limit, even across read time-outs. Callers must therefore
//! shut the connection down when an answer takes too long.

use std::fmt;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use forebay_sys::PeerEvent;
use forebay_sys::virtio::RingAddresses;
use vhost::vhost_user::message::{
    FrontendReq, MAX_MSG_SIZE, VhostUserHeaderFlag, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtio_bindings::virtio_config::VIRTIO_F_RING_PACKED;
use virtio_bindings::virtio_net::{VIRTIO_NET_F_HASH_REPORT, VIRTIO_NET_F_MQ, VIRTIO_NET_F_MTU};

use super::commands::{CommandAnswer, Commands, Known, Remarks};
use super::config::{HASH_CONFIG_BYTES, MTU_CONFIG_BYTES, VirtioNetConfig};
use super::control::{CONTROL_QUEUE_SIZE, ControlPlace, PostedCommand};
use super::features::{Features, RequestedFeatures, VHOST_USER_F_PROTOCOL_FEATURES};
use super::port::{PairEvents, PortSession};

/// Addresses of the two rings of a queue pair in one layout.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PairRings {
    /// Ring of received packets.
    pub(super) rx: RingAddresses,
    /// Ring of sent packets.
    pub(super) tx: RingAddresses,
}

/// Rings of one queue pair. All their bytes are zeroed before a back end is set up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct QueueRings {
    /// Number of entries of each ring.
    pub(super) size: u16,
    /// Addresses as split rings.
    pub(super) split: PairRings,
    /// Addresses as packed rings; `None` if packed rings are not requested.
    pub(super) packed: Option<PairRings>,
}

/// The one memory region that the device gets: guest-physical addresses equal this process's
/// addresses.
#[derive(Debug)]
pub(super) struct MemoryTable {
    /// Descriptor of the memory's file, mapped from its beginning.
    pub(super) descriptor: OwnedFd,
    /// Address of the mapping.
    pub(super) base_address: u64,
    /// Length in bytes.
    pub(super) len_bytes: u64,
}

/// Resources and settings for setting a device up.
#[derive(Debug)]
pub(super) struct SessionPlan {
    pub(super) memory: MemoryTable,
    pub(super) queues: Vec<QueueRings>,
    pub(super) control: ControlPlace,
    pub(super) requested: RequestedFeatures,
}

/// Failed message and the reason, as in `GET_FEATURES: peer disconnected`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct FrontendFailure {
    message: &'static str,
    why: String,
}

impl FrontendFailure {
    fn of<E: fmt::Display>(message: &'static str) -> impl FnOnce(E) -> Self {
        move |why| Self { message, why: why.to_string() }
    }
}

impl fmt::Display for FrontendFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.message, self.why)
    }
}

/// Back end that is set up.
pub(super) struct BackendChannel {
    vhost: Frontend,
    /// Indices of the rings that the back end knows.
    rings: Vec<usize>,
    /// True if the back end understands `SET_VRING_ENABLE`.
    has_enable: bool,
    /// True if the back end acknowledges each message (`REPLY_ACK`).
    acknowledges: bool,
    commands: Commands,
}

/// Messages that describe rings, and the agreements that they depend on.
#[derive(Clone, Copy)]
struct RingMessages<'a> {
    vhost: &'a Frontend,
    stream: &'a UnixStream,
    features: Features,
    acknowledges: bool,
}

/// Maximum number of rings: a message names a ring by eight bits (`SET_VRING_KICK`).
const RINGS_MAX: u64 = 1 << 8;

/// VRING_BASE of a reset packed ring: index 0 and wrap counter 1, of available descriptors in the
/// lower half, and of used ones in the upper half.
const PACKED_BASE: u32 = 1 << 15 | 1 << 31;

impl BackendChannel {
    /// Sets a device up, from the first message to starting all queues (INIT1) and to the commands
    /// that configure them.
    pub(super) fn set_up(
        stream: &UnixStream,
        plan: &mut SessionPlan,
        number: u64,
    ) -> Result<(Self, PortSession), FrontendFailure> {
        let own = stream.try_clone().map_err(FrontendFailure::of("dup"))?;
        let mut vhost = Frontend::from_stream(own, RINGS_MAX);
        vhost.set_owner().map_err(FrontendFailure::of("SET_OWNER"))?;
        let offered = vhost.get_features().map_err(FrontendFailure::of("GET_FEATURES"))?;
        let protocol = agree_on_protocol(&mut vhost, offered)?;
        let (features, config) = agree_on_features(stream, offered, protocol, plan)?;
        let has_many =
            features.has(VIRTIO_NET_F_MQ) && protocol.contains(VhostUserProtocolFeatures::MQ);
        let queue_pairs = if has_many { queue_pairs(stream)? } else { 1 };
        let known = Known { features, config, queue_pairs };
        let most = usize::try_from(known.queue_pairs_max()).unwrap_or(usize::MAX);
        let pairs = plan.queues.len().min(most);
        vhost.set_features(features.bits()).map_err(FrontendFailure::of("SET_FEATURES"))?;
        set_memory(&vhost, &plan.memory)?;
        let events = (0..pairs).map(|_| PairEvents::new()).collect::<std::io::Result<Vec<_>>>();
        let mut events = events.map_err(FrontendFailure::of("eventfd"))?;
        let acknowledges = protocol.contains(VhostUserProtocolFeatures::REPLY_ACK);
        let messages = RingMessages { vhost: &vhost, stream, features, acknowledges };
        for (pair, (rings, events)) in plan.queues.iter().zip(&events).enumerate() {
            messages.set_pair(pair, rings, &events.call)?;
        }
        let has_enable = features.has(VHOST_USER_F_PROTOCOL_FEATURES);
        let rings = (0..2 * pairs).collect();
        let key = plan.requested.device_hash.then_some(plan.control.hash_key);
        let commands = Commands::new(known, pairs, key);
        let mut front = Self { vhost, rings, has_enable, acknowledges, commands };
        for (pair, events) in events.iter().enumerate() {
            front.start(2 * pair, &events.rx_kick)?;
            front.start(2 * pair + 1, &events.tx_kick)?;
        }
        if !front.give_commands(stream, &mut plan.control, known)? {
            (1..pairs).try_for_each(|pair| front.disable(pair))?;
            events.truncate(1);
        }
        Ok((front, PortSession { number, features, mtu: config.mtu, pairs: events }))
    }

    /// Sends the session's commands over the control queue, if the device has one. Returns whether
    /// the device may use more than one queue pair.
    fn give_commands(
        &mut self,
        stream: &UnixStream,
        place: &mut ControlPlace,
        known: Known,
    ) -> Result<bool, FrontendFailure> {
        let ring = known.control_ring().filter(|_| !self.commands.list.is_empty());
        let Some(ring) = ring.map(usize::from) else { return Ok(true) };
        if let Some(why) = place.given_up() {
            self.commands.withdraw(&why);
            return Ok(true);
        }
        let answers = self.exchange(stream, place, ring, known.features);
        // A device that violates the protocol is stopped like any other (VQ11), or is cut off.
        let answers = answers.inspect_err(|failure| {
            place.failed(failure.to_string());
            let _ = self.stop();
        })?;
        place.worked();
        Ok(self.commands.take_answers(&answers))
    }

    /// Posts the commands, and waits for their answers.
    fn exchange(
        &mut self,
        stream: &UnixStream,
        place: &mut ControlPlace,
        ring: usize,
        features: Features,
    ) -> Result<Vec<CommandAnswer>, FrontendFailure> {
        let posted = place.post(features, &self.commands.list);
        self.begin_control(stream, ring, &posted, features)?;
        posted.answers(stream).map_err(FrontendFailure::of("control queue"))
    }

    /// Sets up and enables the control queue.
    fn begin_control(
        &mut self,
        stream: &UnixStream,
        ring: usize,
        posted: &PostedCommand<'_>,
        features: Features,
    ) -> Result<(), FrontendFailure> {
        // The kick eventfd is signalled before the device receives it.
        let events = PeerEvent::happened().and_then(|kick| Ok((kick, PeerEvent::new()?)));
        let (kick, call) = events.map_err(FrontendFailure::of("eventfd"))?;
        let (vhost, acknowledges) = (&self.vhost, self.acknowledges);
        let messages = RingMessages { vhost, stream, features, acknowledges };
        messages.set_ring(ring, CONTROL_QUEUE_SIZE, posted.addresses())?;
        messages.set_call(ring, &call)?;
        self.rings.push(ring);
        self.start(ring, &kick)
    }

    /// Enables a ring, and passes its kick, which is signalled already. The kick comes last: some
    /// back ends forget a kick of a ring that is not enabled.
    fn start(&mut self, ring: usize, kick: &PeerEvent) -> Result<(), FrontendFailure> {
        self.enable(ring, true)?;
        set_kick(&self.vhost, ring, kick)
    }

    /// Returns the remarks on the session for reports.
    pub(super) fn remarks(&self) -> &Remarks {
        &self.commands.remarks
    }

    /// Disables both rings of a queue pair, if the back end understands that.
    pub(super) fn disable(&mut self, pair: usize) -> Result<(), FrontendFailure> {
        self.enable(2 * pair, false)?;
        self.enable(2 * pair + 1, false)
    }

    /// Stops the receive ring of a queue pair, and returns when the device has stopped: it handles
    /// messages in order, and has answered a later one.
    pub(super) fn stop_receiving(&mut self, pair: usize) -> Result<(), FrontendFailure> {
        if self.has_enable {
            self.enable(2 * pair, false)?;
            self.vhost.get_features().map(drop).map_err(FrontendFailure::of("GET_FEATURES"))
        } else {
            let stopped = self.vhost.get_vring_base(2 * pair);
            stopped.map(drop).map_err(FrontendFailure::of("GET_VRING_BASE"))
        }
    }

    /// Stops all rings: with its answer for each ring, the device uses none of the memory any more
    /// (VQ11).
    pub(super) fn stop(&self) -> Result<(), FrontendFailure> {
        for &ring in &self.rings {
            self.vhost.get_vring_base(ring).map_err(FrontendFailure::of("GET_VRING_BASE"))?;
        }
        Ok(())
    }

    /// Enables or disables a ring. Without protocol features, a ring is enabled from its first kick
    /// on.
    fn enable(&mut self, ring: usize, enabled: bool) -> Result<(), FrontendFailure> {
        if !self.has_enable {
            return Ok(());
        }
        let done = self.vhost.set_vring_enable(ring, enabled);
        done.map_err(FrontendFailure::of("SET_VRING_ENABLE"))
    }
}

/// Negotiates the protocol features. An answer to each message is requested if possible
/// (`REPLY_ACK`), so that the back end reports what it refuses.
fn agree_on_protocol(
    vhost: &mut Frontend,
    offered: u64,
) -> Result<VhostUserProtocolFeatures, FrontendFailure> {
    if offered >> VHOST_USER_F_PROTOCOL_FEATURES & 1 == 0 {
        return Ok(VhostUserProtocolFeatures::empty());
    }
    let known =
        vhost.get_protocol_features().map_err(FrontendFailure::of("GET_PROTOCOL_FEATURES"))?;
    let wanted = VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::CONFIG;
    let agreed = known & wanted;
    vhost.set_protocol_features(agreed).map_err(FrontendFailure::of("SET_PROTOCOL_FEATURES"))?;
    if agreed.contains(VhostUserProtocolFeatures::REPLY_ACK) {
        vhost.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    }
    Ok(agreed)
}

/// Negotiates the device features. The device's configuration is read first, if an offered feature
/// depends on it.
fn agree_on_features(
    stream: &UnixStream,
    offered: u64,
    protocol: VhostUserProtocolFeatures,
    plan: &SessionPlan,
) -> Result<(Features, VirtioNetConfig), FrontendFailure> {
    let offers = |bit: u32| offered >> bit & 1 == 1;
    let has_many = offers(VIRTIO_NET_F_MQ) && plan.queues.len() > 1;
    let config = if !protocol.contains(VhostUserProtocolFeatures::CONFIG) {
        VirtioNetConfig::default()
    } else if offers(VIRTIO_NET_F_HASH_REPORT) && plan.requested.device_hash {
        net_config(stream, HASH_CONFIG_BYTES)?
    } else if offers(VIRTIO_NET_F_MTU) || has_many {
        net_config(stream, MTU_CONFIG_BYTES)?
    } else {
        VirtioNetConfig::default()
    };
    let usable = if config.mtu.is_some() { u64::MAX } else { !(1 << VIRTIO_NET_F_MTU) };
    let features = Features::negotiate(offered & usable, plan.requested);
    let features = features.map_err(FrontendFailure::of("features"))?;
    let mtu = config.mtu.filter(|_| features.has(VIRTIO_NET_F_MTU));
    Ok((features, VirtioNetConfig { mtu, ..config }))
}

/// Sends the memory table: the one region, at this process's addresses.
fn set_memory(vhost: &Frontend, memory: &MemoryTable) -> Result<(), FrontendFailure> {
    let region = VhostUserMemoryRegionInfo {
        guest_phys_addr: memory.base_address,
        memory_size: memory.len_bytes,
        userspace_addr: memory.base_address,
        mmap_offset: 0,
        mmap_handle: memory.descriptor.as_raw_fd(),
    };
    vhost.set_mem_table(&[region]).map(drop).map_err(FrontendFailure::of("SET_MEM_TABLE"))
}

impl RingMessages<'_> {
    /// Sends both rings of a pair, with their call.
    fn set_pair(
        self,
        pair: usize,
        rings: &QueueRings,
        call: &PeerEvent,
    ) -> Result<(), FrontendFailure> {
        let packed = rings.packed.filter(|_| self.features.has(VIRTIO_F_RING_PACKED));
        let PairRings { rx, tx } = packed.unwrap_or(rings.split);
        for (ring, addresses) in [(2 * pair, rx), (2 * pair + 1, tx)] {
            self.set_ring(ring, rings.size, addresses)?;
            self.set_call(ring, call)?;
        }
        Ok(())
    }

    /// Sends the size, base and addresses of a reset ring.
    fn set_ring(
        self,
        ring: usize,
        size: u16,
        addresses: RingAddresses,
    ) -> Result<(), FrontendFailure> {
        let addresses = VringConfigData {
            queue_max_size: size,
            queue_size: size,
            flags: 0,
            desc_table_addr: addresses.descriptors,
            used_ring_addr: addresses.device,
            avail_ring_addr: addresses.driver,
            log_addr: None,
        };
        let numbered = self.vhost.set_vring_num(ring, size);
        numbered.map_err(FrontendFailure::of("SET_VRING_NUM"))?;
        self.set_base(ring)?;
        let placed = self.vhost.set_vring_addr(ring, &addresses);
        placed.map_err(FrontendFailure::of("SET_VRING_ADDR"))
    }

    /// Sends the base of a reset ring. Crate vhost has no room for the upper half of a packed
    /// ring's.
    fn set_base(self, ring: usize) -> Result<(), FrontendFailure> {
        let base = if self.features.has(VIRTIO_F_RING_PACKED) { PACKED_BASE } else { 0 };
        let ring = u32::try_from(ring).unwrap_or(u32::MAX);
        let body = [ring, base].map(u32::to_ne_bytes);
        let request = FrontendReq::SET_VRING_BASE;
        let told = tell(self.stream, request, body.as_flattened(), self.acknowledges);
        told.map_err(FrontendFailure::of("SET_VRING_BASE"))
    }

    fn set_call(self, ring: usize, call: &PeerEvent) -> Result<(), FrontendFailure> {
        let call = call.handle().map_err(FrontendFailure::of("dup"))?;
        let set = self.vhost.set_vring_call(ring, &call);
        set.map_err(FrontendFailure::of("SET_VRING_CALL"))
    }
}

fn set_kick(vhost: &Frontend, ring: usize, kick: &PeerEvent) -> Result<(), FrontendFailure> {
    let kick = kick.handle().map_err(FrontendFailure::of("dup"))?;
    vhost.set_vring_kick(ring, &kick).map_err(FrontendFailure::of("SET_VRING_KICK"))
}

/// Asks for the number of queue pairs. Crate vhost takes the answer to be a number of rings, and
/// then rejects the second ring of a pair. For QEMU and DPDK the answer is a number of pairs.
fn queue_pairs(stream: &UnixStream) -> Result<u64, FrontendFailure> {
    const MESSAGE: &str = "GET_QUEUE_NUM";
    let answer =
        ask(stream, FrontendReq::GET_QUEUE_NUM, &[]).map_err(FrontendFailure::of(MESSAGE))?;
    let pairs = answer.first_chunk().map(|bytes| u64::from_ne_bytes(*bytes));
    match pairs {
        Some(0) | None => Err(FrontendFailure::of(MESSAGE)("it has no queues")),
        Some(pairs) => Ok(pairs),
    }
}

/// Reads `len_bytes` of the device's configuration, from its beginning. A back end that cannot
/// provide them answers with fewer.
fn net_config(stream: &UnixStream, len_bytes: usize) -> Result<VirtioNetConfig, FrontendFailure> {
    /// `offset`, `size`, `flags` (struct vhost_user_config).
    const WHICH_BYTES: usize = 4 + 4 + 4;
    let size = u32::try_from(len_bytes).unwrap_or(u32::MAX);
    let mut request = vec![0; WHICH_BYTES + len_bytes];
    request[4..8].copy_from_slice(&size.to_ne_bytes());
    let answer = ask(stream, FrontendReq::GET_CONFIG, &request);
    let answer = answer.map_err(FrontendFailure::of("GET_CONFIG"))?;
    Ok(VirtioNetConfig::from_bytes(answer.get(WHICH_BYTES..).unwrap_or_default()))
}

/// Version of the protocol, in the flags of every message.
const VERSION: u32 = 1;

/// Sends a message, and waits for its acknowledgement if the back end acknowledges messages.
fn tell(
    stream: &UnixStream,
    request: FrontendReq,
    body: &[u8],
    acknowledges: bool,
) -> Result<(), String> {
    if !acknowledges {
        return send(stream, request, 0, body);
    }
    send(stream, request, VhostUserHeaderFlag::NEED_REPLY.bits(), body)?;
    let answer = receive(stream, request)?;
    match <[u8; 8]>::try_from(answer).map(u64::from_ne_bytes) {
        Ok(0) => Ok(()),
        Ok(error) => Err(format!("the back end refused it: {error}")),
        Err(answer) => Err(format!("its answer has {} bytes, not eight", answer.len())),
    }
}

/// Sends a request and reads its answer. Used where crate vhost expects an answer as long as the
/// request, and waits for the rest of a shorter one.
fn ask(stream: &UnixStream, request: FrontendReq, body: &[u8]) -> Result<Vec<u8>, String> {
    send(stream, request, 0, body)?;
    receive(stream, request)
}

fn send(
    mut stream: &UnixStream,
    request: FrontendReq,
    flags: u32,
    body: &[u8],
) -> Result<(), String> {
    let len_bytes = u32::try_from(body.len()).unwrap_or(u32::MAX);
    let header = [u32::from(request), VERSION | flags, len_bytes].map(u32::to_ne_bytes);
    let message = [header.as_flattened(), body].concat();
    stream.write_all(&message).map_err(|error| error.to_string())
}

/// Reads the answer to a request.
fn receive(mut stream: &UnixStream, request: FrontendReq) -> Result<Vec<u8>, String> {
    let (code, reply) = (u32::from(request), VhostUserHeaderFlag::REPLY.bits());
    let mut header = [[0; 4]; 3];
    stream.read_exact(header.as_flattened_mut()).map_err(|error| error.to_string())?;
    let [of, flags, len_bytes] = header.map(u32::from_ne_bytes);
    let len_bytes = usize::try_from(len_bytes).unwrap_or(usize::MAX);
    // An answer to another message would be misread, and a huge length would exhaust memory.
    if of != code || flags & (reply | 3) != reply | VERSION || len_bytes > MAX_MSG_SIZE {
        return Err(format!("its answer is of message {of}, flags {flags:#x}, {len_bytes} bytes"));
    }
    let mut answer = vec![0; len_bytes];
    stream.read_exact(&mut answer).map_err(|error| error.to_string())?;
    Ok(answer)
}

//! Messages to a back end over the socket (the vhost-user protocol, as QEMU's documentation has
//! it), by crate vhost.
//!
//! The crate waits for an answer without end: it goes on where a time-out interrupts it. So whoever
//! calls here sees to it that the connection is cut when an answer takes too long.

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
use super::features::{Features, OfferedFeatures, VHOST_USER_F_PROTOCOL_FEATURES};
use super::port::{PairEvents, PortSession};

/// The two rings of a queue pair in one layout.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PairRings {
    /// Ring of received packets.
    pub(super) rx: RingAddresses,
    /// Ring of sent packets.
    pub(super) tx: RingAddresses,
}

/// The rings of one queue pair. All bytes of them are as new when a session begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct QueueRings {
    /// The entries of each.
    pub(super) size: u16,
    /// Addresses if they are split.
    pub(super) split: PairRings,
    /// Addresses if they are packed. None: packed rings are not asked for.
    pub(super) packed: Option<PairRings>,
}

/// The one region of memory that the device gets: guest-physical addresses are our own.
#[derive(Debug)]
pub(super) struct MemoryTable {
    /// The file behind it, mapped from its beginning.
    pub(super) descriptor: OwnedFd,
    /// Address at which it is mapped.
    pub(super) base_address: u64,
    /// Length in bytes.
    pub(super) len_bytes: u64,
}

/// Settings that a device is set up with.
#[derive(Debug)]
pub(super) struct SessionPlan {
    pub(super) memory: MemoryTable,
    pub(super) queues: Vec<QueueRings>,
    pub(super) control: ControlPlace,
    pub(super) desired_cpus: OfferedFeatures,
}

/// Message that failed, and the reason: as in `GET_FEATURES: peer disconnected`.
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

/// A back end that is set up.
pub(super) struct BackendChannel {
    vhost: Frontend,
    /// The rings that it was told of.
    rings: Vec<usize>,
    /// Commands that leave a ring alone are understood.
    has_enable: bool,
    commands: Commands,
}

/// As many as a message can name, by eight bits (`SET_VRING_KICK`).
const RINGS_MAX: u64 = 1 << 8;

/// VRING_BASE of a packed ring that is as new: index 0, wrap counter 1.
const PACKED_BASE: u16 = 1 << 15;

impl BackendChannel {
    /// Sets a device up, from its first message to all queues being enabled (INIT1), and to its
    /// knowing how they are used.
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
        for (pair, (rings, events)) in plan.queues.iter().zip(&events).enumerate() {
            set_pair(&vhost, pair, rings, events, features)?;
        }
        let has_enable = features.has(VHOST_USER_F_PROTOCOL_FEATURES);
        let rings = (0..2 * pairs).collect();
        let key = plan.desired_cpus.device_hash.then_some(plan.control.hash_key);
        let commands = Commands::new(known, pairs, key);
        let mut front = Self { vhost, rings, has_enable, commands };
        for ring in 0..2 * pairs {
            front.enable(ring, true)?;
        }
        if !front.give_commands(stream, &mut plan.control, known)? {
            (1..pairs).try_for_each(|pair| front.disable(pair))?;
            events.truncate(1);
        }
        Ok((front, PortSession { number, features, mtu: config.mtu, pairs: events }))
    }

    /// Tells the device how its queues are used, by the control queue if it has one. Returns whether it
    /// may use more than one queue pair.
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
        // A device that lies is stopped like any other (VQ11), or is cut off.
        let answers = answers.inspect_err(|failure| {
            place.failed(failure.to_string());
            let _ = self.stop();
        })?;
        place.worked();
        Ok(self.commands.take_answers(&answers))
    }

    /// Gives the commands, and waits for what comes of them.
    fn exchange(
        &mut self,
        stream: &UnixStream,
        place: &mut ControlPlace,
        ring: usize,
        features: Features,
    ) -> Result<Vec<CommandAnswer>, FrontendFailure> {
        let posted = place.post(features, &self.commands.list);
        self.begin_control(ring, &posted, features)?;
        posted.answers(stream).map_err(FrontendFailure::of("control queue"))
    }

    /// Has the device take up the control queue.
    fn begin_control(
        &mut self,
        ring: usize,
        posted: &PostedCommand<'_>,
        features: Features,
    ) -> Result<(), FrontendFailure> {
        // It is kicked before it has the event.
        let events = PeerEvent::happened().and_then(|kick| Ok((kick, PeerEvent::new()?)));
        let (kick, call) = events.map_err(FrontendFailure::of("eventfd"))?;
        set_ring(&self.vhost, ring, CONTROL_QUEUE_SIZE, posted.addresses(), features)?;
        set_call(&self.vhost, ring, &call)?;
        self.rings.push(ring);
        // The kick comes last: there are back ends that forget one of a ring that is not enabled.
        self.enable(ring, true)?;
        set_kick(&self.vhost, ring, &kick)
    }

    /// Facts of it for reports.
    pub(super) fn remarks(&self) -> &Remarks {
        &self.commands.remarks
    }

    /// Has the device leave a queue pair alone, if it can be told.
    pub(super) fn disable(&mut self, pair: usize) -> Result<(), FrontendFailure> {
        self.enable(2 * pair, false)?;
        self.enable(2 * pair + 1, false)
    }

    /// Has the device give a queue pair no more, and returns when it has: it takes one message after
    /// the other, and has answered one that came later.
    pub(super) fn stop_receiving(&mut self, pair: usize) -> Result<(), FrontendFailure> {
        if self.has_enable {
            self.enable(2 * pair, false)?;
            self.vhost.get_features().map(drop).map_err(FrontendFailure::of("GET_FEATURES"))
        } else {
            let stopped = self.vhost.get_vring_base(2 * pair);
            stopped.map(drop).map_err(FrontendFailure::of("GET_VRING_BASE"))
        }
    }

    /// Has the device stop: it has answered for every ring that it uses none of the memory any more
    /// (VQ11).
    pub(super) fn stop(&self) -> Result<(), FrontendFailure> {
        for &ring in &self.rings {
            self.vhost.get_vring_base(ring).map_err(FrontendFailure::of("GET_VRING_BASE"))?;
        }
        Ok(())
    }

    /// Without the protocol's features a ring is enabled from its first kick on.
    fn enable(&mut self, ring: usize, enabled: bool) -> Result<(), FrontendFailure> {
        if !self.has_enable {
            return Ok(());
        }
        let done = self.vhost.set_vring_enable(ring, enabled);
        done.map_err(FrontendFailure::of("SET_VRING_ENABLE"))
    }
}

/// Settles how both sides speak. An answer to each message is asked for where that can be had: a back
/// end that refuses something says so then.
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

/// Settles what both sides can. The device's configuration is read if it says something of that.
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
    } else if offers(VIRTIO_NET_F_HASH_REPORT) && plan.desired_cpus.device_hash {
        net_config(stream, HASH_CONFIG_BYTES)?
    } else if offers(VIRTIO_NET_F_MTU) || has_many {
        net_config(stream, MTU_CONFIG_BYTES)?
    } else {
        VirtioNetConfig::default()
    };
    let usable = if config.mtu.is_some() { u64::MAX } else { !(1 << VIRTIO_NET_F_MTU) };
    let features = Features::negotiate(offered & usable, plan.desired_cpus);
    let features = features.map_err(FrontendFailure::of("features"))?;
    let mtu = config.mtu.filter(|_| features.has(VIRTIO_NET_F_MTU));
    Ok((features, VirtioNetConfig { mtu, ..config }))
}

/// The one region, at our own addresses.
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

/// Tells of both rings of a pair. The kick comes last: a back end may begin with it.
fn set_pair(
    vhost: &Frontend,
    pair: usize,
    rings: &QueueRings,
    events: &PairEvents,
    features: Features,
) -> Result<(), FrontendFailure> {
    let packed = rings.packed.filter(|_| features.has(VIRTIO_F_RING_PACKED));
    let PairRings { rx, tx } = packed.unwrap_or(rings.split);
    let both = [(2 * pair, rx, &events.rx_kick), (2 * pair + 1, tx, &events.tx_kick)];
    for (ring, addresses, kick) in both {
        set_ring(vhost, ring, rings.size, addresses, features)?;
        set_call(vhost, ring, &events.call)?;
        set_kick(vhost, ring, kick)?;
    }
    Ok(())
}

/// Tells where a ring is, which is as new.
fn set_ring(
    vhost: &Frontend,
    ring: usize,
    size: u16,
    addresses: RingAddresses,
    features: Features,
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
    let base = if features.has(VIRTIO_F_RING_PACKED) { PACKED_BASE } else { 0 };
    vhost.set_vring_num(ring, size).map_err(FrontendFailure::of("SET_VRING_NUM"))?;
    vhost.set_vring_base(ring, base).map_err(FrontendFailure::of("SET_VRING_BASE"))?;
    vhost.set_vring_addr(ring, &addresses).map_err(FrontendFailure::of("SET_VRING_ADDR"))
}

fn set_call(vhost: &Frontend, ring: usize, call: &PeerEvent) -> Result<(), FrontendFailure> {
    let call = call.handle().map_err(FrontendFailure::of("dup"))?;
    vhost.set_vring_call(ring, &call).map_err(FrontendFailure::of("SET_VRING_CALL"))
}

fn set_kick(vhost: &Frontend, ring: usize, kick: &PeerEvent) -> Result<(), FrontendFailure> {
    let kick = kick.handle().map_err(FrontendFailure::of("dup"))?;
    vhost.set_vring_kick(ring, &kick).map_err(FrontendFailure::of("SET_VRING_KICK"))
}

/// Number of queue pairs of the back end. The crate takes the answer for a number of rings, and then
/// refuses us the second of a pair; to QEMU and DPDK it is one of pairs.
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

/// So many bytes of the device's configuration, from its beginning. A back end that cannot say them
/// answers with fewer.
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

/// One question and its answer. For what the crate reads in its own way: it takes an answer for as long
/// as the question was, and waits for the rest of a shorter one.
fn ask(mut stream: &UnixStream, request: FrontendReq, body: &[u8]) -> Result<Vec<u8>, String> {
    const VERSION: u32 = 1;
    let reply = VhostUserHeaderFlag::REPLY.bits();
    let code = u32::from(request);
    let len_bytes = u32::try_from(body.len()).unwrap_or(u32::MAX);
    let header = [code, VERSION, len_bytes].map(u32::to_ne_bytes);
    let message = [header.as_flattened(), body].concat();
    stream.write_all(&message).map_err(|error| error.to_string())?;
    let mut header = [[0; 4]; 3];
    stream.read_exact(header.as_flattened_mut()).map_err(|error| error.to_string())?;
    let [of, flags, len_bytes] = header.map(u32::from_ne_bytes);
    let len_bytes = usize::try_from(len_bytes).unwrap_or(usize::MAX);
    if of != code || flags & (reply | 3) != reply | VERSION || len_bytes > MAX_MSG_SIZE {
        return Err(format!("its answer is of message {of}, flags {flags:#x}, {len_bytes} bytes"));
    }
    let mut answer = vec![0; len_bytes];
    stream.read_exact(&mut answer).map_err(|error| error.to_string())?;
    Ok(answer)
}

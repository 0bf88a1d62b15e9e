//! A vhost-user back end: the device's side of the socket.
//!
//! The test's own thread drives the back end: every wait serves the socket meanwhile.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use vhost::vhost_user::message::{FrontendReq, VhostUserProtocolFeatures as Protocol};
use virtio_bindings::virtio_config::{VIRTIO_F_RING_PACKED, VIRTIO_F_VERSION_1};
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6,
    VIRTIO_NET_F_HASH_REPORT, VIRTIO_NET_F_MQ, VIRTIO_NET_F_MRG_RXBUF,
};
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;

use crate::back_end::control::Control;
use crate::back_end::memory::Memory;
use crate::back_end::messages::{Message, Oddity, reply, reply_oddly};
use crate::back_end::ring::{Carries, Place, Ring, is_readable};

/// Time limit for events that must happen. No statement about speed.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// Time limit of a front end for its back end to be set up.
const CONTROL_TIMEOUT: Duration = Duration::from_secs(2);

/// `VHOST_USER_F_PROTOCOL_FEATURES`.
const PROTOCOL_FEATURES: u64 = 1 << 30;

/// Length of `virtio_net_config` (virtio 1.2, 5.1.4).
const CONFIG_BYTES: usize = 24;

/// Bit 8 of a message with a descriptor: no descriptor is passed.
const NO_DESCRIPTOR: u64 = 1 << 8;

/// Returns a feature as a bit mask.
pub(crate) const fn bit(feature: u32) -> u64 {
    1 << feature
}

/// Features and behaviour of a back end.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Offer {
    pub(crate) features: u64,
    pub(crate) protocol: u64,
    pub(crate) queue_pairs: u64,
    pub(crate) mtu: u16,
    /// `VIRTIO_NET_RSS_HASH_TYPE_*`.
    pub(crate) hash_types: u32,
    /// Behaviour on commands, if `CTRL_VQ` is offered.
    pub(crate) control: Control,
    /// True if the device wants no kicks, which it says once, as it gets a ring's addresses.
    pub(crate) polls: bool,
    /// Request on which the back end fails, and how.
    pub(crate) fails: Option<(FrontendReq, Failure)>,
}

/// Kind of failure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Failure {
    /// Closes the connection.
    Close,
    /// Sends no answer.
    Silence,
    /// Answers with that many bytes of 0xff.
    Nonsense(usize),
    /// Answers with this defect.
    But(Oddity),
}

impl Offer {
    /// Features of DPDK's back end, as far as they matter here.
    pub(crate) fn usual() -> Self {
        let features = [
            VIRTIO_F_VERSION_1,
            VIRTIO_NET_F_MRG_RXBUF,
            VIRTIO_NET_F_GUEST_CSUM,
            VIRTIO_NET_F_GUEST_TSO4,
            VIRTIO_NET_F_GUEST_TSO6,
            VIRTIO_NET_F_CSUM,
        ];
        let features = features.into_iter().fold(PROTOCOL_FEATURES, |all, one| all | bit(one));
        let protocol = Protocol::MQ | Protocol::REPLY_ACK | Protocol::CONFIG;
        Self {
            features,
            protocol: protocol.bits(),
            queue_pairs: 1,
            mtu: 1500,
            hash_types: 0x1ff,
            control: Control::Serves,
            polls: false,
            fails: None,
        }
    }

    pub(crate) fn with(mut self, feature: u32) -> Self {
        self.features |= bit(feature);
        self
    }

    pub(crate) fn without(mut self, feature: u32) -> Self {
        self.features &= !bit(feature);
        self
    }

    pub(crate) fn packed(self) -> Self {
        self.with(VIRTIO_F_RING_PACKED)
    }

    pub(crate) fn pairs(self, queue_pairs: u64) -> Self {
        Self { queue_pairs, ..self.with(VIRTIO_NET_F_MQ) }
    }
}

/// The front end closed the socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Closed;

/// Path at which back ends listen, one after the other.
pub(crate) struct Site {
    directory: TempDir,
    listener: Option<UnixListener>,
}

impl Site {
    pub(crate) fn new() -> Self {
        let mut site = Self { directory: tempfile::tempdir().unwrap(), listener: None };
        site.listen();
        site
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.directory.path().join("vhost.sock")
    }

    /// Begins to listen, on a new socket.
    pub(crate) fn listen(&mut self) {
        self.leave();
        self.listener = Some(UnixListener::bind(self.path()).unwrap());
    }

    /// Stops listening, and removes the socket's file.
    pub(crate) fn leave(&mut self) {
        self.desert();
        // A test may have moved or removed the file.
        let _ = std::fs::remove_file(self.path());
    }

    /// Stops listening as a killed process does: the socket's file stays.
    pub(crate) fn desert(&mut self) {
        self.listener = None;
    }

    /// Waits for a front end, and serves it until all of its queues are in use. A front end gives up a back end
    /// that this machine lets wait for longer than its limit, and comes again.
    pub(crate) fn meet(&self, offer: Offer) -> Backend {
        let mut offers = std::iter::repeat(offer);
        offers.find_map(|offer| self.try_meet(offer)).expect("the offers do not end")
    }

    fn try_meet(&self, offer: Offer) -> Option<Backend> {
        let began = Instant::now();
        let mut backend = self.accept(offer);
        let came_up = backend.come_up();
        assert!(came_up.is_ok() || began.elapsed() >= CONTROL_TIMEOUT, "{:?}", backend.log);
        came_up.ok().map(|()| backend)
    }

    /// Waits until a front end can be accepted.
    pub(crate) fn await_front_end(&self) -> &UnixListener {
        let listener = self.listener.as_ref().unwrap();
        assert!(is_readable(listener, DEADLINE), "no front end came");
        listener
    }

    /// Waits for a front end.
    pub(crate) fn accept(&self, offer: Offer) -> Backend {
        let listener = self.await_front_end();
        Backend::new(listener.accept().unwrap().0, offer)
    }
}

/// Connects to a front end that listens, or will listen, at `path`.
pub(crate) fn connect(path: &Path, offer: Offer) -> Backend {
    let began = Instant::now();
    loop {
        match UnixStream::connect(path) {
            Ok(stream) => return Backend::new(stream, offer),
            Err(error) => assert!(began.elapsed() < DEADLINE, "no front end listens: {error}"),
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// Back end connected to a front end.
pub(crate) struct Backend {
    pub(crate) offer: Offer,
    stream: UnixStream,
    /// Requests received, in order.
    pub(crate) log: Vec<FrontendReq>,
    /// Features accepted by the front end.
    pub(crate) features: u64,
    protocol: u64,
    pub(crate) memory: Option<Memory>,
    /// Rings of the queue pairs, and the control ring.
    vrings: Vec<Vring>,
    /// Commands received, as in the ring.
    pub(crate) commands: Vec<Vec<u8>>,
    /// Available buffers of each rx ring that were taken and not used yet.
    pub(crate) stock: Vec<std::collections::VecDeque<crate::back_end::ring::Chain>>,
}

/// Setup of a ring so far.
#[derive(Debug, Default)]
struct Vring {
    size: u16,
    base: u32,
    areas: Option<[u64; 3]>,
    kick: Option<OwnedFd>,
    call: Option<OwnedFd>,
    is_enabled: bool,
    /// Set once the ring is in use.
    ring: Option<Ring>,
}

impl Backend {
    fn new(stream: UnixStream, offer: Offer) -> Self {
        let pairs = usize::try_from(offer.queue_pairs.clamp(1, 64)).unwrap();
        Self {
            vrings: (0..=2 * pairs).map(|_| Vring::default()).collect(),
            commands: Vec::new(),
            stock: vec![std::collections::VecDeque::new(); pairs],
            offer,
            stream,
            log: Vec::new(),
            features: 0,
            protocol: 0,
            memory: None,
        }
    }

    pub(crate) fn has(&self, feature: u32) -> bool {
        self.features & bit(feature) > 0
    }

    /// Returns the length of the virtio-net header: 12, or 20 with a hash.
    pub(crate) fn header_bytes(&self) -> usize {
        if self.has(VIRTIO_NET_F_HASH_REPORT) { 20 } else { 12 }
    }

    /// Returns a ring in use; rx queues have even indices.
    pub(crate) fn ring(&mut self, index: usize) -> &mut Ring {
        self.vrings[index].ring.as_mut().unwrap_or_else(|| panic!("ring {index} is not in use"))
    }

    pub(crate) fn is_up(&self, index: usize) -> bool {
        self.vrings[index].ring.is_some()
    }

    pub(crate) fn is_enabled(&self, index: usize) -> bool {
        self.vrings[index].is_enabled
    }

    /// Returns the index of the control ring, behind those of all queue pairs (5.1.2).
    pub(crate) fn control_ring(&self) -> usize {
        self.vrings.len() - 1
    }

    /// Serves until the rings of all queue pairs are in use.
    pub(crate) fn come_up(&mut self) -> Result<(), Closed> {
        let rings = self.control_ring();
        self.wait("its rings", |backend| (0..rings).all(|ring| backend.is_up(ring)))
    }

    /// Serves until `is_so` holds, or the front end has closed.
    pub(crate) fn wait(
        &mut self,
        what: &str,
        mut is_so: impl FnMut(&mut Self) -> bool,
    ) -> Result<(), Closed> {
        let began = Instant::now();
        while !is_so(self) {
            self.serve(Duration::from_millis(1))?;
            assert!(began.elapsed() < DEADLINE, "waited in vain for {what}; so far {:?}", self.log);
        }
        Ok(())
    }

    /// Serves until the front end closes.
    pub(crate) fn serve_to_end(&mut self) {
        assert_eq!(self.wait("the end", |_| false), Err(Closed));
    }

    /// Serves pending messages, after waiting for one at most that long.
    pub(crate) fn serve(&mut self, at_most: Duration) -> Result<(), Closed> {
        let mut at_most = at_most;
        while is_readable(&self.stream, at_most) {
            let message = Message::receive(&self.stream).ok_or(Closed)?;
            self.log.push(message.request);
            match self.offer.fails {
                Some((request, Failure::But(oddity))) if request == message.request => {
                    if let Some(answer) = self.answer(message) {
                        reply_oddly(&self.stream, request, &answer, oddity);
                    }
                }
                Some((request, failure)) if request == message.request => {
                    self.fail(request, failure)?;
                }
                _ => {
                    let request = message.request;
                    if let Some(answer) = self.answer(message) {
                        reply(&self.stream, request, &answer);
                    }
                }
            }
            at_most = Duration::ZERO;
        }
        (0..self.vrings.len()).for_each(|ring| self.start(ring));
        self.serve_commands();
        Ok(())
    }

    /// Ends the session.
    pub(crate) fn close(&self) {
        // An error means that the front end has closed before.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }

    /// Sends unsolicited bytes, as many as fit without blocking.
    pub(crate) fn say_unasked(&mut self, bytes: usize) {
        self.stream.set_nonblocking(true).unwrap();
        // The front end may be gone, or not read: then fewer bytes are sent.
        let _ = (&self.stream).write_all(&vec![0x41; bytes]);
        self.stream.set_nonblocking(false).unwrap();
    }

    fn fail(&mut self, request: FrontendReq, failure: Failure) -> Result<(), Closed> {
        match failure {
            Failure::Silence | Failure::But(_) => return Ok(()),
            Failure::Nonsense(bytes) => {
                // As an answer with features, 0xff offers all of them.
                (self.offer.features, self.offer.protocol) = (u64::MAX, u64::MAX);
                reply(&self.stream, request, &vec![0xff; bytes]);
            }
            Failure::Close => {}
        }
        if failure == Failure::Close {
            self.close();
            return Err(Closed);
        }
        Ok(())
    }

    /// Handles a message, and returns the answer if there is one.
    fn answer(&mut self, message: Message) -> Option<Vec<u8>> {
        let (request, needs_reply) = (message.request, message.needs_reply);
        let answer = match request {
            FrontendReq::GET_FEATURES => Some(self.offer.features.to_ne_bytes().to_vec()),
            FrontendReq::GET_PROTOCOL_FEATURES => Some(self.offer.protocol.to_ne_bytes().to_vec()),
            FrontendReq::GET_QUEUE_NUM => Some(self.offer.queue_pairs.to_ne_bytes().to_vec()),
            FrontendReq::GET_CONFIG => Some(self.config(message)),
            FrontendReq::GET_VRING_BASE => Some(self.stop(&message)),
            _ => {
                self.note(message);
                None
            }
        };
        let acknowledges = self.protocol & Protocol::REPLY_ACK.bits() > 0;
        answer.or_else(|| (needs_reply && acknowledges).then(|| 0u64.to_ne_bytes().to_vec()))
    }

    /// Handles a request without an answer.
    fn note(&mut self, message: Message) {
        match message.request {
            FrontendReq::SET_OWNER | FrontendReq::SET_VRING_ERR => {}
            FrontendReq::SET_FEATURES => {
                self.features = message.u64_at(0);
                let unoffered = self.features & !self.offer.features;
                assert_eq!(unoffered, 0, "FEAT1: accepted and never offered: {unoffered:#x}");
            }
            FrontendReq::SET_PROTOCOL_FEATURES => {
                self.protocol = message.u64_at(0);
                assert_eq!(self.protocol & !self.offer.protocol, 0, "FEAT1: of the protocol");
            }
            FrontendReq::SET_MEM_TABLE => self.memory = Some(Memory::of_table(message)),
            _ => self.note_of_ring(message),
        }
    }

    fn note_of_ring(&mut self, mut message: Message) {
        let index = usize::try_from(message.u32_at(0) & 0xff).unwrap();
        let value = message.u32_at(4);
        let is_packed = self.has(VIRTIO_F_RING_PACKED);
        if index == self.control_ring() {
            if self.offer.control == Control::Missing {
                return self.close();
            }
            // Only the kick passed with the ring counts. Back ends by rust-vmm forget it while the
            // ring is disabled.
            let is_kick = message.request == FrontendReq::SET_VRING_KICK;
            assert!(!is_kick || self.is_enabled(index), "kicked before it is enabled");
        }
        let vring = &mut self.vrings[index];
        let descriptor = |message: &mut Message| {
            assert_eq!(message.u64_at(0) & NO_DESCRIPTOR, 0, "polling was not asked for");
            message.descriptors.pop()
        };
        match message.request {
            FrontendReq::SET_VRING_NUM => vring.size = value.try_into().unwrap(),
            FrontendReq::SET_VRING_BASE => vring.base = value,
            FrontendReq::SET_VRING_KICK => vring.kick = descriptor(&mut message),
            FrontendReq::SET_VRING_CALL => vring.call = descriptor(&mut message),
            FrontendReq::SET_VRING_ENABLE => vring.is_enabled = value > 0,
            FrontendReq::SET_VRING_ADDR => {
                let memory = self.memory.as_ref().expect("the memory table before rings");
                let area = |at| memory.guest_of_user(message.u64_at(at));
                let areas = [area(8), area(24), area(16)];
                assert_eq!(memory.read_array(areas[2]), [0; 4], "VQ10: flags and used index");
                if self.offer.polls {
                    // `VIRTQ_USED_F_NO_NOTIFY`; `RING_EVENT_FLAGS_DISABLE` behind an offset.
                    memory.store(areas[2] + if is_packed { 2 } else { 0 }, 1);
                }
                vring.areas = Some(areas);
            }
            request => panic!("{request:?} was not to be expected"),
        }
        self.start(index);
    }

    /// Takes a ring into use, once its setup is complete and it was kicked: until then it is stopped
    /// ("Ring states" of the protocol). The kick is read only then.
    fn start(&mut self, index: usize) {
        let is_packed = self.has(VIRTIO_F_RING_PACKED);
        let event_idx = self.has(VIRTIO_RING_F_EVENT_IDX);
        let carries = match index {
            _ if index == self.control_ring() => Carries::Commands,
            _ if index.is_multiple_of(2) => Carries::Received,
            _ => Carries::Sent,
        };
        let vring = &mut self.vrings[index];
        let Vring { size, base, areas: Some(areas), kick: Some(kick), call: Some(call), .. } =
            vring
        else {
            return;
        };
        // Without protocol features a ring is enabled from the start.
        let negotiated = self.features & PROTOCOL_FEATURES > 0;
        let is_stopped = !is_readable(kick, Duration::ZERO);
        if vring.ring.is_some() || (negotiated && !vring.is_enabled) || is_stopped {
            return;
        }
        rustix::io::read(&*kick, &mut [0u8; 8]).unwrap();
        let memory = self.memory.clone().expect("the memory table before rings");
        let (size, base, areas) = (*size, *base, *areas);
        let place = Place { memory, size, base, areas, event_idx, carries };
        let ends = [kick, call].map(|end| end.try_clone().unwrap());
        vring.ring = Some(Ring::new(place, is_packed, ends));
    }

    /// Stops a ring, and returns its base.
    fn stop(&mut self, message: &Message) -> Vec<u8> {
        let index = message.u32_at(0);
        let vring = &mut self.vrings[usize::try_from(index).unwrap()];
        let base = vring.ring.take().map_or(vring.base, |ring| ring.base());
        (vring.kick, vring.call) = (None, None);
        [index, base].into_iter().flat_map(u32::to_ne_bytes).collect()
    }

    /// Returns the requested part of the device's configuration.
    fn config(&self, message: Message) -> Vec<u8> {
        let mut config = [0; CONFIG_BYTES];
        let pairs = u16::try_from(self.offer.queue_pairs.min(0x8000)).unwrap();
        config[8..10].copy_from_slice(&pairs.to_le_bytes());
        config[10..12].copy_from_slice(&self.offer.mtu.to_le_bytes());
        config[17] = 40;
        config[20..].copy_from_slice(&self.offer.hash_types.to_le_bytes());
        let mut answer = message.payload;
        let offset = usize::try_from(u32::from_ne_bytes(*answer.first_chunk().unwrap())).unwrap();
        for (at, byte) in answer[12..].iter_mut().enumerate() {
            *byte = config.get(offset + at).copied().unwrap_or(0);
        }
        answer
    }
}

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use back_end::{BackEnd, CONFIG, MQ, Offer, PATIENCE, REPLY_ACK};
use forebay_sys::interface::{LinkState, LinkStatus};
use forebay_sys::virtio::{RingAddresses, SharedMemory};
use rustix::fs::{MemfdFlags, OFlags, fcntl_setfl, memfd_create};
use tempfile::TempDir;
use vhost::vhost_user::message::FrontendReq;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_net::VIRTIO_NET_F_MTU;

use super::super::frontend::PairRings;
use super::super::memory::MemoryPlan;
use super::*;
use crate::config::virtio::VirtioOptions;

mod back_end;
mod run_end;

/// Address at which the shared memory would be mapped.
const BASE: u64 = 0x7000_0000_0000;

struct Place {
    directory: TempDir,
    facts: Facts,
}

impl Place {
    fn new() -> Self {
        Self { directory: tempfile::tempdir().unwrap(), facts: Facts::default() }
    }

    fn path(&self) -> std::path::PathBuf {
        self.directory.path().join("v.sock")
    }

    fn listen(&self) -> UnixListener {
        UnixListener::bind(self.path()).unwrap()
    }

    fn start(&self, role: Role, pairs: usize) -> Result<(VhostSession, Vec<Port>)> {
        let descriptor = memfd_create("rings", MemfdFlags::CLOEXEC).unwrap();
        File::from(descriptor.try_clone().unwrap()).set_len(1 << 20).unwrap();
        let options = VirtioOptions::default();
        let memory = SharedMemory::new(MemoryPlan::of(&options).len_bytes(0)).unwrap();
        VhostSession::start(VhostSessionConfig {
            path: &self.path(),
            role,
            requested: RequestedFeatures::default(),
            memory: MemoryTable { descriptor, base_address: BASE, len_bytes: 1 << 20 },
            queues: (0..pairs).map(rings).collect(),
            places: Vec::new(),
            control: MemoryPlan::of(&options).control(&memory, 0),
            facts: self.facts.clone(),
        })
    }

    /// Starts a session thread of one queue pair, with a back end that is set up.
    fn up(&self, listener: &UnixListener) -> (VhostSession, Port, BackEnd) {
        let (link, mut ports) = self.start(Role::Connect, 1).unwrap();
        let mut port = ports.remove(0);
        let back_end = set_up(listener, 1);
        wait_for_session(&mut port, 1);
        (link, port, back_end)
    }

    fn fact(&self, name: &str) -> String {
        self.facts.all().get(name).cloned().unwrap_or_default()
    }
}

/// Rings of a queue pair, at addresses that identify them.
fn rings(pair: usize) -> QueueRings {
    let at = |part: u64| BASE + u64::try_from(pair).unwrap() * 0x10000 + part * 0x1000;
    let ring = |first| RingAddresses {
        descriptors: at(first),
        driver: at(first + 1),
        device: at(first + 2),
    };
    QueueRings { size: 256, split: PairRings { rx: ring(0), tx: ring(3) }, packed: None }
}

fn set_up(listener: &UnixListener, pairs: usize) -> BackEnd {
    let mut back_end = BackEnd::accept(listener, Offer::default());
    assert!(back_end.answer_until(FrontendReq::SET_VRING_KICK, 2 * pairs));
    back_end
}

/// Waits for an effect of another thread.
fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < PATIENCE, "waited in vain until {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

fn wait_for_session(port: &mut Port, number: u64) {
    wait_until("a session begins", || port.session().is_some_and(|it| it.number == number));
}

fn wait_for_end(port: &mut Port) {
    wait_until("the session ends", || port.session().is_none());
}

#[test]
fn init_1_setup_precedes_ring_use() {
    use FrontendReq as Of;
    let place = Place::new();
    let listener = place.listen();
    let (_link, mut ports) = place.start(Role::Connect, 2).unwrap();
    let mut back_end = BackEnd::accept(&listener, Offer::default());
    assert!(back_end.answer_until(Of::SET_VRING_KICK, 3));
    // The last ring's message was received and not answered.
    back_end.be_silent_at(Of::SET_VRING_KICK);
    assert!(ports.iter_mut().all(|port| port.session().is_none()));
    back_end.say(Of::SET_VRING_KICK, &[0; 8]);
    ports.iter_mut().for_each(|port| wait_for_session(port, 1));

    let said: Vec<_> = back_end.log.iter().map(|message| message.of).collect();
    let first = |of| said.iter().position(|&it| it == of).unwrap();
    let order =
        [Of::SET_OWNER, Of::GET_FEATURES, Of::SET_FEATURES, Of::SET_MEM_TABLE, Of::SET_VRING_NUM];
    assert!(order.map(first).is_sorted(), "{said:?}");
    let said_of_rings = [
        Of::SET_VRING_NUM,
        Of::SET_VRING_BASE,
        Of::SET_VRING_ADDR,
        Of::SET_VRING_CALL,
        Of::SET_VRING_ENABLE,
        Of::SET_VRING_KICK,
    ];
    for ring in 0..4 {
        let of_ring = |message: &&back_end::Message| {
            let is_of_a_ring = said_of_rings.contains(&message.of);
            is_of_a_ring && message.word(0) == ring
        };
        let said: Vec<_> = back_end.log.iter().filter(of_ring).map(|message| message.of).collect();
        assert_eq!(said, said_of_rings, "ring {ring}");
    }
    let accepted = back_end.log[first(Of::SET_FEATURES)].number();
    assert_eq!(ports[0].session().unwrap().features.bits(), accepted);
    assert_eq!(ports[0].session().unwrap().mtu, Some(9000));
    let kicks = back_end.log.iter().filter(|message| message.of == Of::SET_VRING_KICK);
    let kicks = kicks.flat_map(|message| &message.descriptors);
    assert_eq!(kicks.filter(|kick| is_readable(kick.as_fd())).count(), 4, "all rings are started");
}

#[test]
fn dead_back_end_is_replaced() {
    let place = Place::new();
    let listener = place.listen();
    let (link, mut port, back_end) = place.up(&listener);
    let status = |state, losses: u32| {
        let expected = LinkStatus { state, carrier_losses: losses };
        wait_until("the link follows", || link.back_end().status() == expected);
    };
    status(LinkState::Running, 0);
    drop(back_end);
    wait_for_end(&mut port);
    status(LinkState::NoCarrier, 1);
    // A front end that did not wait for the release would connect at once.
    listener.set_nonblocking(true).unwrap();
    thread::sleep(3 * RECONNECT_PAUSE);
    assert!(listener.accept().is_err(), "the rings are still in use");
    port.released();
    listener.set_nonblocking(false).unwrap();
    let _next = set_up(&listener, 1);
    wait_for_session(&mut port, 2);
    assert_eq!(place.fact("sessions"), "2");
    assert_eq!(place.fact("last_end"), "the back end closed the connection");
}

/// Each session is over as soon as it has begun.
#[test]
fn closing_back_end_is_met_later() {
    let begun = Instant::now();
    let place = Place::new();
    let listener = place.listen();
    let (_link, mut port, mut back_end) = place.up(&listener);
    for number in 2..=5 {
        drop(back_end);
        wait_for_end(&mut port);
        port.released();
        back_end = set_up(&listener, 1);
        wait_for_session(&mut port, number);
    }
    assert!(begun.elapsed() >= 4 * RECONNECT_PAUSE);
}

#[test]
fn restarted_back_end_is_found() {
    let place = Place::new();
    let listener = place.listen();
    let (link, mut port, back_end) = place.up(&listener);
    assert!(!link.back_end().news().is_waiting, "one is connected");
    // A dead back end leaves its socket's file, at which no process listens.
    drop((back_end, listener));
    wait_for_end(&mut port);
    port.released();
    wait_until("it is missed", || place.fact("link").contains("refused"));
    wait_until("it is waited for", || link.back_end().news().is_waiting);
    std::fs::remove_file(place.path()).unwrap();
    wait_until("its file is missed", || place.fact("link").contains("No such file"));
    let listener = place.listen();
    let _next = set_up(&listener, 1);
    wait_for_session(&mut port, 2);
}

#[test]
fn old_back_end_cannot_reach_session() {
    let place = Place::new();
    let listener = place.listen();
    let (_link, mut port, mut old) = place.up(&listener);
    let call = event_of(&mut old, FrontendReq::SET_VRING_CALL);
    rustix::io::write(&call, &1_u64.to_ne_bytes()).unwrap();
    assert!(port.acknowledge_call() && !port.acknowledge_call());
    let kick = event_of(&mut old, FrontendReq::SET_VRING_KICK);
    rustix::io::read(&kick, &mut [0; 8]).unwrap();
    assert!(port.kick_rx());
    assert!(is_readable(kick.as_fd()));

    drop(old);
    wait_for_end(&mut port);
    port.released();
    let _next = set_up(&listener, 1);
    wait_for_session(&mut port, 2);
    rustix::io::write(&call, &1_u64.to_ne_bytes()).unwrap();
    assert!(!is_readable(port.call()) && !port.acknowledge_call());
}

fn event_of(back_end: &mut BackEnd, of: FrontendReq) -> OwnedFd {
    let message = back_end.log.iter_mut().find(|message| message.of == of).unwrap();
    message.descriptors.remove(0)
}

#[test]
fn promise_5_full_events_hold_nobody() {
    let place = Place::new();
    let listener = place.listen();
    let (mut link, mut port, mut back_end) = place.up(&listener);
    let kick = event_of(&mut back_end, FrontendReq::SET_VRING_KICK);
    rustix::io::read(&kick, &mut [0; 8]).unwrap();
    rustix::io::write(&kick, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    fcntl_setfl(&kick, OFlags::empty()).unwrap();
    assert!(port.kick_rx());
    assert!(port.session().is_some());
    drop(back_end);
    link.stop();
}

/// No known cause holds the thread; this one stands for a kernel that does.
#[test]
fn link_ends_though_thread_lives() {
    let place = Place::new();
    let (shared, _ports) = Switchboard::new(1, Signaller::new().unwrap()).unwrap();
    let (holds, is_held) = std::sync::mpsc::channel::<()>();
    let thread = Some(thread::spawn(move || _ = is_held.recv()));
    let ended = Arc::new(Event::new().unwrap());
    let facts = place.facts.clone();
    let mut link = VhostSession { shared, thread, ended, back_end: Arc::default(), facts };
    link.stop();
    assert!(place.fact("link").contains("does not end"));
    drop(holds);
}

#[test]
fn feat_4_unusable_back_end_is_retried() {
    let place = Place::new();
    let listener = place.listen();
    let (_link, mut ports) = place.start(Role::Connect, 1).unwrap();
    let all = Offer::default();
    let legacy = Offer { features: !(1 << VIRTIO_F_VERSION_1), ..all.clone() };
    let queueless = Offer { pairs: 0, ..all.clone() };
    let refused = [
        (legacy, "VERSION_1"),
        (Offer { features: 0, ..all.clone() }, "VERSION_1"),
        (queueless, "it has no queues"),
    ];
    for (offer, why) in refused {
        BackEnd::accept(&listener, offer).answer_to_the_end();
        wait_until("it is told why", || place.fact("link").contains(why));
        assert!(ports[0].session().is_none());
    }
    let _good = set_up(&listener, 1);
    wait_for_session(&mut ports[0], 1);
}

#[test]
fn incomplete_handshake_is_retried() {
    use FrontendReq as Of;
    let place = Place::new();
    let listener = place.listen();
    let (_link, mut ports) = place.start(Role::Connect, 1).unwrap();
    for last in [Of::GET_FEATURES, Of::GET_CONFIG, Of::GET_QUEUE_NUM, Of::SET_VRING_KICK] {
        let mut back_end = BackEnd::accept(&listener, Offer::default());
        back_end.be_silent_at(last);
        // Half an answer only.
        back_end.say(last, &[0; 3]);
    }
    // Answer to another message.
    let mut back_end = BackEnd::accept(&listener, Offer::default());
    back_end.be_silent_at(Of::GET_QUEUE_NUM);
    back_end.say(Of::GET_FEATURES, &[0; 8]);
    assert!(back_end.read().is_none());
    assert!(ports[0].session().is_none());
    let _good = set_up(&listener, 1);
    wait_for_session(&mut ports[0], 1);
}

#[test]
fn silent_back_end_is_cut_off() {
    let place = Place::new();
    let listener = place.listen();
    let (_link, mut ports) = place.start(Role::Connect, 1).unwrap();
    let mut silent = BackEnd::accept(&listener, Offer::default());
    silent.be_silent_at(FrontendReq::GET_PROTOCOL_FEATURES);
    assert!(silent.read().is_none(), "nothing more is said to it");
    wait_until("it is told why", || place.fact("link").contains("no answer in 2 s"));
    let _good = set_up(&listener, 1);
    wait_for_session(&mut ports[0], 1);
}

#[test]
fn missing_queues_have_no_session() {
    let place = Place::new();
    let listener = place.listen();
    let (_link, mut ports) = place.start(Role::Connect, 4).unwrap();
    let mut back_end = BackEnd::accept(&listener, Offer { pairs: 2, ..Offer::default() });
    assert!(back_end.answer_until(FrontendReq::SET_VRING_KICK, 4));
    wait_for_session(&mut ports[0], 1);
    let has: Vec<_> = ports.iter_mut().map(|port| port.session().is_some()).collect();
    assert_eq!(has, [true, true, false, false]);
    assert_eq!(place.fact("queues"), "2 of 4: the back end has no more");
}

/// Works with one message of each kind, and without answers to them.
#[test]
fn back_end_without_protocol_features_works() {
    let without_30 = Offer { features: !(1 << 30), ..Offer::default() };
    let with_none = Offer { protocol: 0, ..Offer::default() };
    for offer in [without_30, with_none] {
        let place = Place::new();
        let listener = place.listen();
        let (_link, mut ports) = place.start(Role::Connect, 2).unwrap();
        let mut back_end = BackEnd::accept(&listener, offer);
        assert!(back_end.answer_until(FrontendReq::SET_VRING_KICK, 2));
        wait_for_session(&mut ports[0], 1);
        assert!(ports[1].session().is_none(), "one pair: nobody said that there are more");
        assert_eq!(back_end.count(FrontendReq::GET_QUEUE_NUM), 0);
        assert_eq!(ports[0].session().unwrap().mtu, None);
    }
}

#[test]
fn cfg_2_mtu_counts_only_if_offered() {
    let short = |config: &[u8]| Offer { config: config.to_vec(), ..Offer::default() };
    let silent = Offer { protocol: MQ | REPLY_ACK, ..Offer::default() };
    let said = Offer { protocol: MQ | REPLY_ACK | CONFIG, ..Offer::default() };
    let cases =
        [(short(&[]), None), (short(&[0; 11]), None), (short(&[0; 12]), None), (silent, None)];
    for (offer, mtu) in cases.into_iter().chain([(said, Some(9000))]) {
        let place = Place::new();
        let listener = place.listen();
        let (_link, mut ports) = place.start(Role::Connect, 1).unwrap();
        let mut back_end = BackEnd::accept(&listener, offer.clone());
        assert!(back_end.answer_until(FrontendReq::SET_VRING_KICK, 2));
        wait_for_session(&mut ports[0], 1);
        let session = ports[0].session().unwrap();
        assert_eq!(session.mtu, mtu, "{offer:?}");
        assert_eq!(session.features.has(VIRTIO_NET_F_MTU), mtu.is_some());
    }
}

#[test]
fn stat_1_shut_queues_restart_the_device() {
    let place = Place::new();
    let listener = place.listen();
    let (_link, mut ports) = place.start(Role::Connect, 2).unwrap();
    let mut back_end = set_up(&listener, 2);
    ports.iter_mut().for_each(|port| wait_for_session(port, 1));

    ports[1].shut(EndKind::UsedIndex.reason("its used index jumped"));
    assert!(back_end.answer_until(FrontendReq::SET_VRING_ENABLE, 6));
    let told: Vec<_> = back_end.log.iter().map(|it| (it.of, it.body.clone())).collect();
    let off = |ring: u32| [ring.to_ne_bytes(), 0_u32.to_ne_bytes()].as_flattened().to_vec();
    let disabled = [2, 3].map(|ring| (FrontendReq::SET_VRING_ENABLE, off(ring)));
    assert_eq!(told[told.len() - 2..], disabled);
    assert!(ports[0].session().is_some() && ports[1].session().is_some());

    assert_eq!(place.fact("last_shut"), "queue 1 in session 1: its used index jumped");
    ports[0].shut(EndKind::NotGiven.reason("it was not given that"));
    back_end.answer_to_the_end();
    assert_eq!(back_end.count(FrontendReq::GET_VRING_BASE), 4);
    for port in &mut ports {
        wait_for_end(port);
        port.released();
    }
    assert_eq!(place.fact("last_end"), "it was not given that");
    let next = set_up(&listener, 2);
    ports.iter_mut().for_each(|port| wait_for_session(port, 2));
    drop(next);
    wait_until("its end is told", || place.fact("last_end").contains("closed the connection"));
    assert_eq!(place.fact("ends"), "closed 1, not_given 1");
    assert_eq!(place.fact("last_shut"), "queue 0 in session 1: it was not given that");
    assert_eq!(place.fact("shut"), "not_given 1, used_index 1");
}

#[test]
fn vq_11_device_stops_before_rings_end() {
    let place = Place::new();
    let listener = place.listen();
    let (mut link, mut port, mut back_end) = place.up(&listener);
    let stopped = thread::spawn(move || link.stop());
    back_end.be_silent_at(FrontendReq::GET_VRING_BASE);
    assert!(port.session().is_some(), "it has not said that it stopped");
    back_end.say(FrontendReq::GET_VRING_BASE, &[0; 8]);
    back_end.answer_to_the_end();
    stopped.join().unwrap();
    assert_eq!(back_end.count(FrontendReq::GET_VRING_BASE), 2);
    assert!(port.session().is_none());
}

#[test]
fn queue_stops_after_device_acknowledges() {
    use FrontendReq as Of;
    let place = Place::new();
    let listener = place.listen();
    let (_link, mut ports) = place.start(Role::Connect, 2).unwrap();
    let mut back_end = BackEnd::accept(&listener, Offer { pairs: 1, ..Offer::default() });
    assert!(back_end.answer_until(Of::SET_VRING_KICK, 2));
    wait_for_session(&mut ports[0], 1);
    ports.iter_mut().for_each(Port::stop_receiving);
    assert!(ports[1].has_stopped_receiving(), "the device does not have it");
    assert!(back_end.answer_until(Of::SET_VRING_ENABLE, 3));
    let last = back_end.log.last().unwrap();
    assert_eq!((last.word(0), last.word(1)), (0, 0), "the ring of received packets, off");
    back_end.be_silent_at(Of::GET_FEATURES);
    assert!(!ports[0].has_stopped_receiving(), "it may still be writing");
    back_end.say(Of::GET_FEATURES, &[0; 8]);
    wait_until("it has stopped", || ports[0].has_stopped_receiving());
    assert!(ports[0].session().is_some(), "it sends on");
}

#[test]
fn unused_link_ends() {
    let place = Place::new();
    let listener = place.listen();
    let (link, port, mut back_end) = place.up(&listener);
    drop(port);
    back_end.answer_to_the_end();
    assert_eq!(back_end.count(FrontendReq::GET_VRING_BASE), 2);
    wait_until("it ends", || link.thread.as_ref().is_some_and(JoinHandle::is_finished));
}

#[test]
fn session_change_wakes_the_cpu() {
    let place = Place::new();
    let listener = place.listen();
    let (_link, mut ports) = place.start(Role::Connect, 1).unwrap();
    let woken = Arc::new(AtomicU32::new(0));
    let wakes = Arc::clone(&woken);
    ports[0].wake_by(Arc::new(move || _ = wakes.fetch_add(1, Ordering::Relaxed)));
    let back_end = set_up(&listener, 1);
    wait_until("it is woken", || woken.load(Ordering::Relaxed) == 1);
    assert!(is_readable(ports[0].call()), "who sleeps without a session sleeps on this");
    assert!(ports[0].session().is_some());
    drop(back_end);
    wait_until("it is woken", || woken.load(Ordering::Relaxed) == 2);
    assert!(ports[0].session().is_none());
    assert!(!is_readable(ports[0].call()), "what was seen has nobody look again");
}

#[test]
fn listener_takes_back_ends_in_turn() {
    let place = Place::new();
    // Socket file left by a dead process.
    drop(place.listen());
    let (mut link, mut ports) = place.start(Role::Listen, 1).unwrap();
    for number in 1..=3 {
        let mut back_end =
            BackEnd::on(UnixStream::connect(place.path()).unwrap(), Offer::default());
        assert!(back_end.answer_until(FrontendReq::SET_VRING_KICK, 2));
        wait_for_session(&mut ports[0], number);
        drop(back_end);
        wait_for_end(&mut ports[0]);
        ports[0].released();
    }
    link.stop();
    assert!(!place.path().exists());
}

#[test]
fn impossible_socket_path_fails_at_once() {
    let error = |place: &Place, role| place.start(role, 1).unwrap_err();
    let place = Place::new();
    File::create(place.path()).unwrap();
    assert!(error(&place, Role::Connect).to_string().contains("is not a socket"));
    assert!(error(&place, Role::Listen).to_string().contains("is not a socket"));

    let place = Place::new();
    let _somebody = place.listen();
    assert!(matches!(error(&place, Role::Listen), Error::InUse { .. }));

    let place = Place::new();
    std::fs::remove_dir(place.directory.path()).unwrap();
    for role in [Role::Connect, Role::Listen] {
        assert!(error(&place, role).to_string().contains("No such file"), "{role:?}");
    }
    std::fs::write(place.directory.path(), "a file").unwrap();
    assert!(error(&place, Role::Connect).to_string().contains("ot a directory"));
    std::fs::remove_file(place.directory.path()).unwrap();
    std::fs::create_dir(place.directory.path()).unwrap();
    assert!(place.start(Role::Connect, 0).is_err() && place.start(Role::Connect, 129).is_err());
}

//! The stations of neighbours, learned from ARP and neighbour discovery where nobody else is this host:
//! what the kernel's `net/core/neighbour.c` does for us elsewhere.
//!
//! Nothing runs by itself here. Whoever sends asks ([`resolve`](Neighbours::resolve)) and sends what
//! there is to be sent; whoever receives tells what was heard ([`hear`](Neighbours::hear)):
//!
//! * **unknown**: asked for, once a second as long as somebody wants it;
//! * **reachable**: for half a minute from when it answered us;
//! * **stale**: used still, and asked itself after five seconds; when it has not answered three times,
//!   it is unknown again. One that nobody uses is never asked.
//!
//! Anybody can have us look for neighbours that are not there: by asking for us, or by sending what we
//! answer, from addresses that are nobody's. So each class of them has a share of the places, and gives
//! way within it: those that are sought, the ones sought for longest first; those only heard of; those
//! that we send to and that have not answered yet. The rest is for neighbours that answered us and are
//! used, the latest used of them, whoever else there is.
//!
//! Packets wait for those that are sought, of whom there are no more than waiting places. When all are
//! taken, the neighbour for whom most packets wait gives up one: so there is a place for each neighbour.

use std::net::IpAddr;

use mem::Pool;
use path::packet::Packet;
use path::parse::Link;
use siphasher::sip::SipHasher13;

use super::slots::{List, Place, Slots};
use super::{Identity, arp, ndisc};

/// The most neighbours that are remembered (`gc_thresh3`).
pub const NEIGHBOURS_MAX: usize = 1024;

/// Packets that wait for one neighbour; the oldest one makes room (`unres_qlen` in spirit: the kernel's
/// is in bytes).
pub const WAITING_MAX: usize = 3;

/// Packets that wait for all neighbours.
pub const WAITING_IN_ALL_MAX: usize = 256;

/// Neighbours that are sought: each has a place for a packet.
const SOUGHT_MAX: usize = WAITING_IN_ALL_MAX;

/// Neighbours that were only heard of, and as many that have not answered us yet.
const DOUBTED_MAX: usize = 128;

const SECOND_NS: u64 = 1_000_000_000;
/// `base_reachable_time`; the kernel's varies by a half.
const REACHABLE_NS: u64 = 30 * SECOND_NS;
/// `delay_first_probe_time`.
const DELAY_NS: u64 = 5 * SECOND_NS;
/// `retrans_time`.
const RETRANS_NS: u64 = SECOND_NS;
/// `ucast_solicit`, and `mcast_solicit`.
const SOLICIT_MAX: u8 = 3;
/// `locktime`: of several answers that come back to back the first one counts.
const LOCK_NS: u64 = SECOND_NS;
/// `gc_staletime`: a packet does not wait longer, and nobody is remembered longer that is not used.
const STALE_NS: u64 = 60 * SECOND_NS;

/// Something was heard of a neighbour.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sighting {
    /// Of whom.
    pub address: IpAddr,
    /// Its station, if that was said.
    pub mac: Option<[u8; 6]>,
    /// True if it is worth remembering though nobody asked: it wants to speak with us.
    pub is_welcome: bool,
    /// Treatment of a station that is known already.
    pub replaces: Replaces,
    /// True if it answered us, so that both ways are known to work.
    pub is_confirmed: bool,
}

/// When what was heard takes the place of what is known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Replaces {
    /// At once.
    Now,
    /// Unless what is known is a moment old.
    WhenSettled,
    /// Never; but what is known is doubted.
    Never,
}

/// Outcome of an ARP or neighbour discovery message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Heard {
    /// The observation, for [`Neighbours::hear`].
    pub sighting: Option<Sighting>,
    /// True if its frame now holds the answer, to be sent out by the device it came from.
    pub is_answer: bool,
}

/// Link-layer address of a neighbour.
#[derive(Debug)]
#[must_use]
pub enum Resolved {
    /// There.
    Mac([u8; 6]),
    /// There, as far as is known: this packet asks it, and is to be sent too.
    Probe([u8; 6], Packet),
    /// Nobody knows: this packet asks, and is to be sent.
    Ask(Packet),
    /// Asked for already, or impossible to ask for.
    Wait,
}

/// Knowledge of a neighbour: neighbours of a class give way to each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Class {
    /// Station unknown.
    Sought,
    /// Heard of only.
    Heard,
    /// Sent to, and has not answered us.
    Tried,
    /// Sent to, and has answered us when we asked.
    Proven,
}

/// The neighbours of a class.
#[derive(Debug)]
struct Members {
    list: List,
    count: usize,
    /// The most that there may be.
    most: usize,
}

/// Datagrams that waited for a neighbour and were not sent, by the kernel's names of reasons.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct NeighbourDrops {
    /// Packets that made room for others that wait.
    pub neigh_queuefull: u64,
    /// The neighbour did not answer.
    pub neigh_failed: u64,
    /// Packets whose neighbour was forgotten for others' sake, or of which none is sought any more.
    pub neigh_dead: u64,
}

/// All that there are. Whatever the others need, places for 512 proven ones are left.
#[derive(Debug)]
struct Classes {
    sought: Members,
    heard: Members,
    tried: Members,
    proven: Members,
}

/// Lists of neighbours of a class: those that are sought by when that began, others by their latest
/// use, or by when they were heard of.
const BY_CLASS: usize = 0;
/// Lists of neighbours for whom equally many packets wait.
const BY_WAITING: usize = 1;

/// The neighbours on one device.
#[derive(Debug)]
pub struct Neighbours {
    hasher: SipHasher13,
    slots: Slots<Neighbour, 2>,
    classes: Classes,
    /// By how many packets wait for each, one at least.
    crowds: [List; WAITING_MAX],
    waiting: usize,
    /// Packets that waited for who has given way.
    given_up: Vec<Packet>,
    drops: NeighbourDrops,
    is_closed: bool,
}

#[derive(Debug)]
struct Neighbour {
    address: IpAddr,
    mac: Option<[u8; 6]>,
    is_used: bool,
    /// True if it has answered since it was last unknown.
    has_answered: bool,
    class: Class,
    /// Time until which it is reachable.
    reachable_until_ns: u64,
    /// When it was told where it is.
    updated_ns: u64,
    /// When it was used, or heard of.
    touched_ns: u64,
    /// Number of times it was asked since it was last heard of, and when it may be again.
    asked: u8,
    ask_at_ns: u64,
    /// Packets to it, and since when the first of them waits.
    waiting: Vec<Packet>,
    waiting_since_ns: u64,
}

impl Default for Neighbours {
    fn default() -> Self {
        Self::new([0; 16])
    }
}

impl Neighbours {
    /// None yet; found under a secret, so that nobody can have them found slowly.
    #[must_use]
    pub fn new(seed: [u8; 16]) -> Self {
        Self {
            hasher: SipHasher13::new_with_key(&seed),
            slots: Slots::new(NEIGHBOURS_MAX),
            classes: Classes::default(),
            crowds: [List::default(); WAITING_MAX],
            waiting: 0,
            given_up: Vec::new(),
            drops: NeighbourDrops::default(),
            is_closed: false,
        }
    }

    /// Resolves the next station of a packet, that of `address`. The packet that asks for it is
    /// made in a frame of `pool`; where none is free, it is asked for next time.
    pub fn resolve(
        &mut self,
        address: IpAddr,
        on: &Identity,
        now_ns: u64,
        pool: &mut Pool,
    ) -> Resolved {
        let place = match self.find(address) {
            Some(place) => place,
            None => self.insert(address, None, now_ns),
        };
        self.touch(place, true, now_ns);
        let neighbour = &mut self.slots[place];
        let Some(mac) = neighbour.mac else {
            return match neighbour.ask(None, on, now_ns, pool) {
                Some(packet) => Resolved::Ask(packet),
                None => Resolved::Wait,
            };
        };
        if now_ns < neighbour.reachable_until_ns {
            return Resolved::Mac(mac);
        }
        if neighbour.asked == 0 && neighbour.ask_at_ns <= neighbour.reachable_until_ns {
            // Stale, and used for the first time since.
            neighbour.ask_at_ns = now_ns.saturating_add(DELAY_NS);
        }
        if neighbour.asked >= SOLICIT_MAX && now_ns >= neighbour.ask_at_ns {
            (neighbour.mac, neighbour.asked, neighbour.has_answered) = (None, 0, false);
            self.classify(place);
            return match self.slots[place].ask(None, on, now_ns, pool) {
                Some(packet) => Resolved::Ask(packet),
                None => Resolved::Wait,
            };
        }
        match neighbour.ask(Some(mac), on, now_ns, pool) {
            Some(packet) => Resolved::Probe(mac, packet),
            None => Resolved::Mac(mac),
        }
    }

    /// Has a packet wait until its neighbour is known: one with an Ethernet header already, in which
    /// the destination is still to be written. What it takes the place of goes to `dropped`, or the
    /// packet itself does.
    pub fn hold(
        &mut self,
        address: IpAddr,
        packet: Packet,
        now_ns: u64,
        dropped: &mut Vec<Packet>,
    ) {
        dropped.append(&mut self.given_up);
        let place = self.find(address).filter(|&place| self.slots[place].mac.is_none());
        let (Some(place), Link::Ethernet, false) = (place, packet.headers.link, self.is_closed)
        else {
            self.drops.neigh_dead += u64::from(packet.wire_count());
            return dropped.push(packet);
        };
        let count = self.slots[place].waiting.len();
        let crowd = if count >= WAITING_MAX {
            Some(place)
        } else if self.waiting >= WAITING_IN_ALL_MAX {
            // With no packet of its own it finds one of whom more wait for, since there are no more
            // neighbours that are sought than places.
            self.crowds.iter().skip(count).rev().find_map(List::first).or(Some(place))
        } else {
            None
        };
        if let Some(oldest) = crowd.and_then(|crowd| self.give_up_oldest(crowd)) {
            self.drops.neigh_queuefull += u64::from(oldest.wire_count());
            dropped.push(oldest);
        }
        self.leave_crowd(place);
        let neighbour = &mut self.slots[place];
        if neighbour.waiting.is_empty() {
            neighbour.waiting_since_ns = now_ns;
        }
        neighbour.waiting.push(packet);
        self.waiting += 1;
        self.join_crowd(place);
    }

    /// Learns from what was heard. Packets that waited for it go to `released`: they are to be sent.
    pub fn hear(&mut self, sighting: &Sighting, now_ns: u64, released: &mut Vec<Packet>) {
        let Sighting { address, mac, is_welcome, replaces, is_confirmed } = *sighting;
        let place = match (self.find(address), mac) {
            (Some(place), _) => place,
            (None, Some(_)) if is_welcome => self.insert(address, mac, now_ns),
            (None, _) => return,
        };
        self.touch(place, false, now_ns);
        let neighbour = &mut self.slots[place];
        let is_another = mac.is_some() && mac != neighbour.mac;
        match (neighbour.mac, replaces) {
            (None, _) if mac.is_none() => return,
            (None, _) | (Some(_), Replaces::Now) => {}
            (Some(_), Replaces::WhenSettled) => {
                let is_settled = now_ns.saturating_sub(neighbour.updated_ns) > LOCK_NS;
                if is_another && !is_settled {
                    return;
                }
            }
            (Some(_), Replaces::Never) if is_another => {
                neighbour.doubt(now_ns);
                return;
            }
            (Some(_), Replaces::Never) => {}
        }
        if is_another {
            (neighbour.mac, neighbour.updated_ns) = (mac, now_ns);
        }
        if is_confirmed {
            // Who says so unasked may be anybody.
            neighbour.has_answered |= neighbour.asked > 0;
            neighbour.reachable_until_ns = now_ns.saturating_add(REACHABLE_NS);
            neighbour.asked = 0;
            neighbour.ask_at_ns = 0;
        } else if is_another {
            neighbour.doubt(now_ns);
        }
        let station = neighbour.mac;
        for mut packet in self.take_waiting(place) {
            if let (Some(to), Some(station)) = (packet.frame.data_mut().first_chunk_mut(), station)
            {
                *to = station;
            }
            released.push(packet);
        }
        self.classify(place);
    }

    /// Does the periodic work: asks again for those whom packets wait for (into `asks`),
    /// gives up packets that waited for three seconds in vain, and forgets who is not used.
    pub fn tick(
        &mut self,
        on: &Identity,
        now_ns: u64,
        (pool, asks): (&mut Pool, &mut Vec<Packet>),
        dropped: &mut Vec<Packet>,
    ) {
        dropped.append(&mut self.given_up);
        let mut next = self.classes.sought.list.first();
        while let Some(place) = next {
            next = self.slots.behind(BY_CLASS, place);
            let neighbour = &mut self.slots[place];
            let waited_ns = now_ns.saturating_sub(neighbour.waiting_since_ns);
            if neighbour.waiting.is_empty() {
                if neighbour.is_old(now_ns) {
                    self.remove(place);
                }
            } else if waited_ns >= u64::from(SOLICIT_MAX) * RETRANS_NS {
                let mut waiting = self.take_waiting(place);
                self.drops.neigh_failed += datagrams(&waiting);
                dropped.append(&mut waiting);
            } else {
                asks.extend(neighbour.ask(None, on, now_ns, pool));
            }
        }
        for class in [Class::Heard, Class::Tried, Class::Proven] {
            let first = |of: &mut Self| of.classes.members(class).list.first();
            while let Some(oldest) = first(self).filter(|&at| self.slots[at].is_old(now_ns)) {
                self.remove(oldest);
            }
        }
    }

    /// Gives up all that waits: from now on nobody hears an answer, and no packet waits for one.
    pub fn close(&mut self, dropped: &mut Vec<Packet>) {
        self.is_closed = true;
        dropped.append(&mut self.given_up);
        while let Some(place) = self.crowds.iter().find_map(List::first) {
            let mut waiting = self.take_waiting(place);
            self.drops.neigh_dead += datagrams(&waiting);
            dropped.append(&mut waiting);
        }
    }

    /// Counts of packets that waited and were given up.
    #[must_use]
    pub fn drops(&self) -> NeighbourDrops {
        self.drops
    }

    /// Packets that wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// Neighbours that are remembered, or sought.
    #[must_use]
    pub fn count(&self) -> usize {
        let Classes { sought, heard, tried, proven } = &self.classes;
        sought.count + heard.count + tried.count + proven.count
    }

    fn find(&self, address: IpAddr) -> Option<Place> {
        self.slots.find(self.hash(address), |neighbour| neighbour.address == address)
    }

    /// Adds one, and makes room for it among its like; if their share is not used up, at the cost of
    /// one that was not used for longest.
    fn insert(&mut self, address: IpAddr, mac: Option<[u8; 6]>, now_ns: u64) -> Place {
        let class = if mac.is_some() { Class::Heard } else { Class::Sought };
        self.make_room(class);
        if self.count() >= NEIGHBOURS_MAX
            && let Some(longest) = self.classes.proven.list.first()
        {
            self.remove(longest);
        }
        let neighbour = Neighbour {
            address,
            mac,
            is_used: false,
            has_answered: false,
            class,
            reachable_until_ns: 0,
            updated_ns: now_ns,
            touched_ns: now_ns,
            asked: 0,
            ask_at_ns: 0,
            waiting: Vec::new(),
            waiting_since_ns: now_ns,
        };
        let place = self.slots.insert(self.hash(address), neighbour);
        self.join(class, place);
        place
    }

    /// Makes room for another of a class.
    fn make_room(&mut self, class: Class) {
        let members = self.classes.members(class);
        if members.count >= members.most
            && let Some(first) = members.list.first()
        {
            self.remove(first);
        }
    }

    fn join(&mut self, class: Class, place: Place) {
        let members = self.classes.members(class);
        self.slots.push_last(BY_CLASS, &mut members.list, place);
        members.count += 1;
        self.slots[place].class = class;
    }

    fn leave(&mut self, place: Place) {
        let members = self.classes.members(self.slots[place].class);
        self.slots.unlink(BY_CLASS, &mut members.list, place);
        members.count -= 1;
    }

    /// Notes a use, or that something was heard.
    fn touch(&mut self, place: Place, is_use: bool, now_ns: u64) {
        let neighbour = &mut self.slots[place];
        if neighbour.is_used && !is_use {
            return; // the order of use is not others' to change
        }
        (neighbour.is_used, neighbour.touched_ns) = (is_use, now_ns);
        self.classify(place);
        let class = self.slots[place].class;
        if class != Class::Sought {
            self.leave(place);
            self.join(class, place);
        }
    }

    /// Has a neighbour change its class when more, or less, is known of it.
    fn classify(&mut self, place: Place) {
        let (from, to) = (self.slots[place].class, self.slots[place].class_now());
        if from == to {
            return;
        }
        self.make_room(to);
        self.leave(place);
        self.join(to, place);
    }

    /// Forgets a neighbour. What waited for it is given up.
    fn remove(&mut self, place: Place) {
        let mut waiting = self.take_waiting(place);
        self.drops.neigh_dead += datagrams(&waiting);
        self.given_up.append(&mut waiting);
        self.leave(place);
        // It waits for nothing and is in no list any more.
        drop(self.slots.remove(place));
    }

    /// All that waits for a neighbour.
    fn take_waiting(&mut self, place: Place) -> Vec<Packet> {
        self.leave_crowd(place);
        let waiting = std::mem::take(&mut self.slots[place].waiting);
        self.waiting -= waiting.len();
        waiting
    }

    /// Packet that has waited longest for a neighbour.
    fn give_up_oldest(&mut self, place: Place) -> Option<Packet> {
        self.leave_crowd(place);
        let waiting = &mut self.slots[place].waiting;
        let oldest = (!waiting.is_empty()).then(|| waiting.remove(0));
        self.waiting -= usize::from(oldest.is_some());
        self.join_crowd(place);
        oldest
    }

    /// To be called before and after what waits for a neighbour changes.
    fn leave_crowd(&mut self, place: Place) {
        let more = self.slots[place].waiting.len().checked_sub(1);
        if let Some(crowd) = more.and_then(|more| self.crowds.get_mut(more)) {
            self.slots.unlink(BY_WAITING, crowd, place);
        }
    }

    fn join_crowd(&mut self, place: Place) {
        let more = self.slots[place].waiting.len().checked_sub(1);
        if let Some(crowd) = more.and_then(|more| self.crowds.get_mut(more)) {
            self.slots.push_last(BY_WAITING, crowd, place);
        }
    }

    fn hash(&self, address: IpAddr) -> u64 {
        match address {
            IpAddr::V4(address) => self.hasher.hash(&address.octets()),
            IpAddr::V6(address) => self.hasher.hash(&address.octets()),
        }
    }
}

/// Datagrams that packets are.
fn datagrams(packets: &[Packet]) -> u64 {
    packets.iter().map(|packet| u64::from(packet.wire_count())).sum()
}

impl Default for Classes {
    fn default() -> Self {
        let none = |most| Members { list: List::default(), count: 0, most };
        Self {
            sought: none(SOUGHT_MAX),
            heard: none(DOUBTED_MAX),
            tried: none(DOUBTED_MAX),
            proven: none(NEIGHBOURS_MAX),
        }
    }
}

impl Classes {
    fn members(&mut self, class: Class) -> &mut Members {
        match class {
            Class::Sought => &mut self.sought,
            Class::Heard => &mut self.heard,
            Class::Tried => &mut self.tried,
            Class::Proven => &mut self.proven,
        }
    }
}

impl Neighbour {
    fn class_now(&self) -> Class {
        match (self.mac, self.is_used, self.has_answered) {
            (None, ..) => Class::Sought,
            (Some(_), false, _) => Class::Heard,
            (Some(_), true, false) => Class::Tried,
            (Some(_), true, true) => Class::Proven,
        }
    }

    /// True if it was neither used nor heard of for so long that it may be forgotten.
    fn is_old(&self, now_ns: u64) -> bool {
        now_ns.saturating_sub(self.touched_ns) >= STALE_NS
    }

    /// Perhaps elsewhere: asked when it is used next.
    fn doubt(&mut self, now_ns: u64) {
        self.reachable_until_ns = now_ns;
        (self.asked, self.ask_at_ns) = (0, 0);
    }

    /// Asks for it, or it, unless it was asked a moment ago.
    fn ask(
        &mut self,
        station: Option<[u8; 6]>,
        on: &Identity,
        now_ns: u64,
        pool: &mut Pool,
    ) -> Option<Packet> {
        if now_ns < self.ask_at_ns {
            return None;
        }
        let packet = match self.address {
            IpAddr::V4(address) => arp::request(address, station, on, pool),
            IpAddr::V6(address) => ndisc::solicitation(address, station, on, pool),
        }?;
        self.asked = self.asked.saturating_add(1);
        self.ask_at_ns = now_ns.saturating_add(RETRANS_NS);
        Some(packet)
    }
}

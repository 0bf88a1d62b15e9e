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
//! A stranger that asks for us is remembered, but never at the cost of one that we send to.

use std::net::IpAddr;

use mem::Pool;
use siphasher::sip::SipHasher13;

use super::slots::{List, Place, Slots};
use super::{Identity, arp, ndisc};
use crate::packet::Packet;
use crate::parse::Link;

/// The most neighbours that are remembered (`gc_thresh3`).
pub const NEIGHBOURS_MAX: usize = 1024;

/// Packets that wait for one neighbour; the oldest one makes room (`unres_qlen` in spirit: the kernel's
/// is in bytes).
pub const WAITING_MAX: usize = 3;

/// Packets that wait for all neighbours.
const WAITING_IN_ALL_MAX: usize = 256;

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
    /// Whether it is worth remembering though nobody asked: it wants to speak with us.
    pub is_welcome: bool,
    /// Whether another station takes the place of the one that is known.
    pub replaces: Replaces,
    /// Whether it answered us, so that both ways are known to work.
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

/// What came of an ARP or neighbour discovery message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Heard {
    /// What it says, for [`Neighbours::hear`].
    pub sighting: Option<Sighting>,
    /// Whether its frame now holds the answer, to be sent out by the device it came from.
    pub is_answer: bool,
}

/// Where a neighbour is.
#[derive(Debug)]
#[must_use]
pub enum Resolved {
    /// There.
    Mac([u8; 6]),
    /// There, as far as is known: this packet asks it, and is to be sent too.
    Probe([u8; 6], Packet),
    /// Nobody knows: this packet asks, and is to be sent.
    Ask(Packet),
    /// It has been asked for, or cannot be.
    Wait,
}

/// In the order of their latest use, or of when they were heard of: those that are not used.
const BY_USE: usize = 0;

/// The neighbours on one device.
#[derive(Debug)]
pub struct Neighbours {
    hasher: SipHasher13,
    slots: Slots<Neighbour, 1>,
    count: usize,
    /// Those that we send to.
    used: List,
    /// Those that were only heard of.
    heard: List,
    waiting: usize,
}

#[derive(Debug)]
struct Neighbour {
    address: IpAddr,
    mac: Option<[u8; 6]>,
    is_used: bool,
    /// It is reachable until then.
    reachable_until_ns: u64,
    /// When it was told where it is.
    updated_ns: u64,
    /// When it was used, or heard of.
    touched_ns: u64,
    /// How often it was asked since it was last heard of, and when it may be again.
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
            count: 0,
            used: List::default(),
            heard: List::default(),
            waiting: 0,
        }
    }

    /// Where to send a packet whose next station is that of `address`. The one that asks for it is
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
            None => match self.insert(address, now_ns) {
                Some(place) => place,
                None => return Resolved::Wait,
            },
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
            (neighbour.mac, neighbour.asked) = (None, 0);
            return match neighbour.ask(None, on, now_ns, pool) {
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
        let place = self.find(address).filter(|&place| self.slots[place].mac.is_none());
        let (Some(place), Link::Ethernet) = (place, packet.headers.link) else {
            return dropped.push(packet);
        };
        let neighbour = &mut self.slots[place];
        if neighbour.waiting.len() >= WAITING_MAX {
            dropped.push(neighbour.waiting.remove(0));
            self.waiting -= 1;
        }
        if self.waiting >= WAITING_IN_ALL_MAX {
            return dropped.push(packet);
        }
        if neighbour.waiting.is_empty() {
            neighbour.waiting_since_ns = now_ns;
        }
        neighbour.waiting.push(packet);
        self.waiting += 1;
    }

    /// Learns from what was heard. Packets that waited for it go to `released`: they are to be sent.
    pub fn hear(&mut self, sighting: &Sighting, now_ns: u64, released: &mut Vec<Packet>) {
        let Sighting { address, mac, is_welcome, replaces, is_confirmed } = *sighting;
        let place = match (self.find(address), mac) {
            (Some(place), _) => place,
            (None, Some(_)) if is_welcome => match self.insert(address, now_ns) {
                Some(place) => place,
                None => return,
            },
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
            neighbour.reachable_until_ns = now_ns.saturating_add(REACHABLE_NS);
            neighbour.asked = 0;
            neighbour.ask_at_ns = 0;
        } else if is_another {
            neighbour.doubt(now_ns);
        }
        self.waiting -= neighbour.waiting.len();
        for mut packet in neighbour.waiting.drain(..) {
            let station = packet.frame.data_mut().first_chunk_mut();
            if let (Some(station), Some(mac)) = (station, neighbour.mac) {
                *station = mac;
            }
            released.push(packet);
        }
    }

    /// What is to be done from time to time: asks again for those whom packets wait for (into `asks`),
    /// gives up packets that waited for three seconds in vain, and forgets who is not used.
    pub fn tick(
        &mut self,
        on: &Identity,
        now_ns: u64,
        (pool, asks): (&mut Pool, &mut Vec<Packet>),
        dropped: &mut Vec<Packet>,
    ) {
        let mut next = self.used.first();
        while let Some(place) = next {
            next = self.slots.behind(BY_USE, place);
            let neighbour = &mut self.slots[place];
            if neighbour.waiting.is_empty() {
                continue;
            }
            let waited_ns = now_ns.saturating_sub(neighbour.waiting_since_ns);
            if waited_ns >= u64::from(SOLICIT_MAX) * RETRANS_NS {
                self.waiting -= neighbour.waiting.len();
                dropped.append(&mut neighbour.waiting);
            } else {
                asks.extend(neighbour.ask(None, on, now_ns, pool));
            }
        }
        while let Some(longest) = self.longest_untouched(now_ns) {
            dropped.extend(self.remove(longest));
        }
    }

    /// Packets that wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// Neighbours that are remembered, or sought.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }

    fn find(&self, address: IpAddr) -> Option<Place> {
        self.slots.find(self.hash(address), |neighbour| neighbour.address == address)
    }

    /// Makes room for another. Those that are used, and packets that wait, go for nobody who was only
    /// heard of.
    fn insert(&mut self, address: IpAddr, now_ns: u64) -> Option<Place> {
        if self.count >= NEIGHBOURS_MAX {
            let longest = self.heard.first().or_else(|| self.used_without_waiting())?;
            self.remove(longest);
        }
        let neighbour = Neighbour {
            address,
            mac: None,
            is_used: false,
            reachable_until_ns: 0,
            updated_ns: now_ns,
            touched_ns: now_ns,
            asked: 0,
            ask_at_ns: 0,
            waiting: Vec::new(),
            waiting_since_ns: now_ns,
        };
        let place = self.slots.insert(self.hash(address), neighbour);
        self.slots.push_last(BY_USE, &mut self.heard, place);
        self.count += 1;
        Some(place)
    }

    /// One that was neither used nor heard of for so long that it may be forgotten.
    fn longest_untouched(&self, now_ns: u64) -> Option<Place> {
        let is_long =
            |place: &Place| now_ns.saturating_sub(self.slots[*place].touched_ns) >= STALE_NS;
        self.heard.first().filter(is_long).or_else(|| self.used.first().filter(is_long))
    }

    fn used_without_waiting(&self) -> Option<Place> {
        let mut next = self.used.first();
        while let Some(place) = next.filter(|&place| !self.slots[place].waiting.is_empty()) {
            next = self.slots.behind(BY_USE, place);
        }
        next
    }

    /// Notes a use, or that something was heard.
    fn touch(&mut self, place: Place, is_use: bool, now_ns: u64) {
        let was_used = self.slots[place].is_used;
        if was_used && !is_use {
            return; // the order of use is not others' to change
        }
        let from = if was_used { &mut self.used } else { &mut self.heard };
        self.slots.unlink(BY_USE, from, place);
        let to = if is_use { &mut self.used } else { &mut self.heard };
        self.slots.push_last(BY_USE, to, place);
        let neighbour = &mut self.slots[place];
        (neighbour.is_used, neighbour.touched_ns) = (is_use, now_ns);
    }

    fn remove(&mut self, place: Place) -> Vec<Packet> {
        let list = if self.slots[place].is_used { &mut self.used } else { &mut self.heard };
        self.slots.unlink(BY_USE, list, place);
        self.count -= 1;
        let waiting = self.slots.remove(place).map(|neighbour| neighbour.waiting);
        let waiting = waiting.unwrap_or_default();
        self.waiting -= waiting.len();
        waiting
    }

    fn hash(&self, address: IpAddr) -> u64 {
        match address {
            IpAddr::V4(address) => self.hasher.hash(&address.octets()),
            IpAddr::V6(address) => self.hasher.hash(&address.octets()),
        }
    }
}

impl Neighbour {
    /// It may be elsewhere: asked, when it is used next.
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

//! Link-layer addresses of neighbours, learned from ARP and neighbour discovery on devices where
//! the kernel does not act for this host: the counterpart of the kernel's `net/core/neighbour.c`.
//!
//! The table does nothing on its own. A sender calls [`resolve`](Neighbours::resolve) and sends the
//! packet that it returns; a receiver reports observations ([`hear`](Neighbours::hear)). States:
//!
//! * **unknown**: solicited once a second as long as a sender needs the address;
//! * **reachable**: for 30 s after the neighbour answered;
//! * **stale**: still used, and probed by unicast after five seconds. After three unanswered probes
//!   the neighbour is unknown again. An unused entry is never probed.
//!
//! Any host can cause entries for neighbours that do not exist, by soliciting us or by sending
//! packets that we answer, from spoofed addresses. So each class of entries has a limit, and evicts
//! its own entries only: unresolved ones, oldest first; those only observed; those used that have not
//! answered yet; those used that have answered, in LRU order. Answers that can go the way that their
//! packets came cause few solicitations ([`resolve_answered`](Neighbours::resolve_answered)), and
//! displace nobody that packets wait for.
//!
//! Packets wait for unresolved neighbours, and there are at least as many waiting slots as
//! unresolved neighbours. When all slots are taken, the neighbour with the most waiting sends
//! loses one, so that every neighbour can get a slot. The packets of one send, such as all
//! fragments of a datagram, have one slot, and wait or are dropped together.

mod entry; //   a neighbour, and its class
mod classes; // entries by class, each with a limit
mod waiting; // packets that wait for their neighbours

use std::net::IpAddr;

use forebay_buf::Pool;
use forebay_rx::packet::Packet;
use forebay_rx::parse::Link;
use siphasher::sip::SipHasher13;

use self::classes::{BY_CLASS, ENTRIES_MAX, NeighbourClasses};
use self::entry::{Neighbour, NeighbourClass, RETRANS_NS};
use super::Identity;
use super::rate_limit::Bucket;
use super::slots::{SlotList, SlotPlace, SourceSlots};

/// Upper bound on neighbours that are used and have answered (`gc_thresh3`).
pub const NEIGHBOURS_MAX: usize = 1024;

/// Upper bound on solicitations of unknown neighbours for answers to them: at once, and then in a second (`gc_thresh1`).
pub const ANSWERED_MAX: u32 = 128;

/// Upper bound on sends waiting per neighbour, each of one packet, or of the several packets of one
/// datagram in fragments or of one GSO payload. A new one displaces the oldest (like `unres_qlen`,
/// which the kernel counts in bytes).
pub const WAITING_MAX: usize = 3;

/// Upper bound on sends waiting for all neighbours together.
pub const WAITING_IN_ALL_MAX: usize = 256;

/// Upper bound on the packets of all waiting sends beyond the first of each: five datagrams of
/// 64 KiB in fragments of 1500 bytes.
pub const WAITING_MORE_MAX: usize = 256;

const SECOND_NS: u64 = 1_000_000_000;
/// `base_reachable_time`; the kernel varies the value by half.
const REACHABLE_NS: u64 = 30 * SECOND_NS;
/// `delay_first_probe_time`.
const DELAY_NS: u64 = 5 * SECOND_NS;
/// `ucast_solicit`, and `mcast_solicit`.
const SOLICIT_MAX: u8 = 3;
/// `locktime`: of several answers in quick succession, the first one counts.
const LOCK_NS: u64 = SECOND_NS;

/// An observation of a neighbour.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NeighbourObservation {
    /// IP address of the neighbour.
    pub address: IpAddr,
    /// MAC address, if the message contained one.
    pub mac: Option<[u8; 6]>,
    /// True if an entry is created even without a resolution pending: the neighbour is about to
    /// send to us.
    pub is_welcome: bool,
    /// Condition for replacing a known MAC address.
    pub replaces: Replaces,
    /// True for an answer to our solicitation, which confirms reachability in both directions.
    pub is_confirmed: bool,
}

/// Condition under which an observed MAC address replaces the known one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Replaces {
    /// Always.
    Now,
    /// Only if the known address is older than `locktime`.
    WhenSettled,
    /// Never, but a different address makes a reachable entry stale.
    Never,
}

/// Result of an ARP or neighbour discovery message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct NeighbourEvent {
    /// The observation, for [`Neighbours::hear`].
    pub sighting: Option<NeighbourObservation>,
    /// True if the frame now contains the answer, to be sent out of the device it arrived on.
    pub is_answer: bool,
}

/// Result of [`Neighbours::resolve`].
#[derive(Debug)]
#[must_use]
pub enum Resolved {
    /// The MAC address.
    Mac([u8; 6]),
    /// The MAC address last known, and a unicast probe to be sent as well.
    Probe([u8; 6], Packet),
    /// Unknown: a solicitation to be sent.
    Ask(Packet),
    /// Unknown: solicited already, or no solicitation can be built.
    Wait,
}

/// Datagrams dropped while waiting for a neighbour, by the kernel's drop reasons.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct NeighbourDrops {
    /// Dropped to make room for others.
    pub neigh_queuefull: u64,
    /// Dropped because the neighbour did not answer.
    pub neigh_failed: u64,
    /// Dropped because the entry was evicted, or the table is closed.
    pub neigh_dead: u64,
}

/// The neighbours on one device.
#[derive(Debug)]
pub struct Neighbours {
    hasher: SipHasher13,
    slots: SourceSlots<Neighbour, 2>,
    classes: NeighbourClasses,
    /// Entries with waiting sends: `by_waiting[n]` lists those with `n + 1`.
    by_waiting: [SlotList; WAITING_MAX],
    /// Number of waiting sends.
    waiting: usize,
    /// Number of their packets beyond the first of each.
    waiting_more: usize,
    /// Packets of evicted entries, until the next call takes them.
    given_up: Vec<Packet>,
    drops: NeighbourDrops,
    /// Solicitations for answers.
    for_answers: Bucket,
    is_closed: bool,
}

impl Default for Neighbours {
    fn default() -> Self {
        Self::new([0; 16])
    }
}

impl Neighbours {
    /// Creates an empty table. `seed` is secret, so that an attacker cannot provoke collisions.
    #[must_use]
    pub fn new(seed: [u8; 16]) -> Self {
        Self {
            hasher: SipHasher13::new_with_key(&seed),
            slots: SourceSlots::new(ENTRIES_MAX),
            classes: NeighbourClasses::default(),
            by_waiting: [SlotList::default(); WAITING_MAX],
            waiting: 0,
            waiting_more: 0,
            given_up: Vec::new(),
            drops: NeighbourDrops::default(),
            for_answers: Bucket::with(SECOND_NS),
            is_closed: false,
        }
    }

    /// Looks up the MAC address for the next hop `address`. A solicitation is built in a frame of
    /// `pool`; if none is free, the next call tries again.
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
            // First use since the entry became stale.
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

    /// Looks up the MAC address for an answer, which may also go to the address that its packet came from: as
    /// [`resolve`](Self::resolve), but anybody causes answers, by packets from spoofed addresses. `None` if the neighbour is
    /// unknown and is not solicited now: it was already, or [`ANSWERED_MAX`] others were, or packets wait for all that are
    /// unresolved.
    pub fn resolve_answered(
        &mut self,
        address: IpAddr,
        on: &Identity,
        now_ns: u64,
        pool: &mut Pool,
    ) -> Option<Resolved> {
        let place = self.find(address);
        let known = place.map(|place| &self.slots[place]);
        if known.is_none_or(|neighbour| neighbour.mac.is_none()) {
            let is_asked = known.is_some_and(|neighbour| now_ns < neighbour.ask_at_ns);
            self.for_answers.save(now_ns, SECOND_NS);
            if is_asked || !self.for_answers.spend(SECOND_NS / u64::from(ANSWERED_MAX)) {
                return None;
            }
            if place.is_none() && !self.make_room_for_answer() {
                return None;
            }
        }
        Some(self.resolve(address, on, now_ns, pool))
    }

    /// Queues the packets of one send until their neighbour is resolved. Their Ethernet headers are
    /// complete but for the destination address. All of a send's packets wait, or none; those
    /// displaced, possibly these, go to `dropped`. If the neighbour has answered since it was looked up,
    /// they stay in `packets`, complete, to be sent.
    pub fn hold(
        &mut self,
        address: IpAddr,
        packets: &mut Vec<Packet>,
        now_ns: u64,
        dropped: &mut Vec<Packet>,
    ) {
        dropped.append(&mut self.given_up);
        let place = self.find(address);
        let is_ethernet = packets.iter().all(|packet| packet.headers.link == Link::Ethernet);
        if let Some(lladdr) = place.and_then(|place| self.slots[place].mac)
            && is_ethernet
        {
            return complete_headers(packets.iter_mut(), lladdr);
        }
        let (Some(place), Some(more), true, false) =
            (place, packets.len().checked_sub(1), is_ethernet, self.is_closed)
        else {
            self.drops.neigh_dead += datagrams(packets);
            return dropped.append(packets);
        };
        // Large sends to a neighbour displace each other, never those to others.
        if self.waiting_more - self.slots[place].more() + more > WAITING_MORE_MAX {
            self.drops.neigh_queuefull += datagrams(packets);
            return dropped.append(packets);
        }
        while self.waiting_more + more > WAITING_MORE_MAX {
            self.displace_oldest(place, dropped);
        }
        let count = self.slots[place].counts.len();
        let fullest = if count >= WAITING_MAX {
            Some(place)
        } else if self.waiting >= WAITING_IN_ALL_MAX {
            // If nothing waits for this neighbour, several sends wait for another: there are no
            // more unresolved neighbours than waiting slots.
            self.by_waiting.iter().skip(count).rev().find_map(SlotList::first).or(Some(place))
        } else {
            None
        };
        if let Some(fullest) = fullest {
            self.displace_oldest(fullest, dropped);
        }
        self.unlink_waiting(place);
        let neighbour = &mut self.slots[place];
        if neighbour.waiting.is_empty() {
            neighbour.waiting_since_ns = now_ns;
        }
        neighbour.counts.push(packets.len());
        neighbour.waiting.append(packets);
        self.waiting += 1;
        self.waiting_more += more;
        self.link_waiting(place);
    }

    /// Updates the table from an observation. Packets that waited for the neighbour go to
    /// `released`, to be sent.
    pub fn hear(
        &mut self,
        sighting: &NeighbourObservation,
        now_ns: u64,
        released: &mut Vec<Packet>,
    ) {
        let NeighbourObservation { address, mac, is_welcome, replaces, is_confirmed } = *sighting;
        let place = match (self.find(address), mac) {
            (Some(place), _) => place,
            (None, Some(_)) if is_welcome => self.insert(address, mac, now_ns),
            // No sender needs this neighbour: no entry (RFC 4861, section 7.2.5).
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
                    // Within `locktime` the first answer counts.
                    return;
                }
            }
            (Some(_), Replaces::Never) if is_another => {
                // RFC 4861, section 7.2.5: it changes no other state, and delays no probe.
                if now_ns < neighbour.reachable_until_ns {
                    neighbour.doubt(now_ns);
                }
                return;
            }
            (Some(_), Replaces::Never) => {}
        }
        if is_another {
            (neighbour.mac, neighbour.updated_ns) = (mac, now_ns);
        }
        if is_confirmed {
            // Only an answer to our solicitation counts: anybody can send an unsolicited
            // advertisement.
            neighbour.has_answered |= neighbour.asked > 0;
            neighbour.reachable_until_ns = now_ns.saturating_add(REACHABLE_NS);
            neighbour.asked = 0;
            neighbour.ask_at_ns = 0;
        } else if is_another {
            neighbour.doubt(now_ns);
        }
        let lladdr = neighbour.mac;
        let first = released.len();
        released.append(&mut self.take_waiting(place));
        if let Some(lladdr) = lladdr {
            complete_headers(released.iter_mut().skip(first), lladdr);
        }
        self.classify(place);
    }

    /// Takes packets of a flow that wait for their neighbour, or for any if none is given: an answer of that flow is about to go to
    /// `lladdr`, where its packet came from, and must not overtake them. They go to `released`, to be sent there before it.
    /// Packets of other flows stay: anybody can send from a spoofed address.
    pub fn release_flow(
        &mut self,
        neighbour: Option<IpAddr>,
        is_of_flow: impl Fn(&Packet) -> bool,
        lladdr: [u8; 6],
        released: &mut Vec<Packet>,
    ) {
        if self.waiting == 0 {
            return;
        }
        let places = match neighbour {
            Some(neighbour) => self.find(neighbour).into_iter().collect(),
            None => self.awaited(),
        };
        let first = released.len();
        places.into_iter().for_each(|place| self.take_sends(place, &is_of_flow, released));
        complete_headers(released.iter_mut().skip(first), lladdr);
    }

    /// Periodic work: repeats solicitations for neighbours with waiting packets (into `asks`),
    /// drops packets that waited three seconds without an answer, and removes unused entries.
    pub fn tick(
        &mut self,
        on: &Identity,
        now_ns: u64,
        pool: &mut Pool,
        asks: &mut Vec<Packet>,
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
        for class in [NeighbourClass::Heard, NeighbourClass::Tried, NeighbourClass::Proven] {
            let first = |of: &mut Self| of.classes.members(class).list.first();
            while let Some(oldest) = first(self).filter(|&at| self.slots[at].is_old(now_ns)) {
                self.remove(oldest);
            }
        }
    }

    /// Drops all waiting packets: from now on no answer is received, and no packet is queued.
    pub fn close(&mut self, dropped: &mut Vec<Packet>) {
        self.is_closed = true;
        dropped.append(&mut self.given_up);
        while let Some(place) = self.by_waiting.iter().find_map(SlotList::first) {
            let mut waiting = self.take_waiting(place);
            self.drops.neigh_dead += datagrams(&waiting);
            dropped.append(&mut waiting);
        }
    }

    /// Datagrams dropped while waiting.
    #[must_use]
    pub fn drops(&self) -> NeighbourDrops {
        self.drops
    }

    /// Number of waiting sends.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// Number of packets of waiting sends beyond the first of each.
    #[must_use]
    pub fn waiting_more(&self) -> usize {
        self.waiting_more
    }

    /// Number of entries, unresolved ones included.
    #[must_use]
    pub fn count(&self) -> usize {
        let NeighbourClasses { sought, heard, tried, proven } = &self.classes;
        sought.count + heard.count + tried.count + proven.count
    }

    fn find(&self, address: IpAddr) -> Option<SlotPlace> {
        self.slots.find(self.hash(address), |neighbour| neighbour.address == address)
    }

    /// Adds an entry. If its class is full, one of the class is evicted.
    fn insert(&mut self, address: IpAddr, mac: Option<[u8; 6]>, now_ns: u64) -> SlotPlace {
        let class = if mac.is_some() { NeighbourClass::Heard } else { NeighbourClass::Sought };
        self.make_room(class);
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
            counts: Vec::new(),
            waiting_since_ns: now_ns,
        };
        let place = self.slots.insert(self.hash(address), neighbour);
        self.join(class, place);
        place
    }

    /// Removes an entry, and drops the packets that wait for it.
    fn remove(&mut self, place: SlotPlace) {
        let mut waiting = self.take_waiting(place);
        self.drops.neigh_dead += datagrams(&waiting);
        self.given_up.append(&mut waiting);
        self.leave(place);
        // The entry has no waiting packets, and is in no list any more.
        drop(self.slots.remove(place));
    }

    fn hash(&self, address: IpAddr) -> u64 {
        match address {
            IpAddr::V4(address) => self.hasher.hash(&address.octets()),
            IpAddr::V6(address) => self.hasher.hash(&address.octets()),
        }
    }
}

/// Completes the Ethernet headers of packets that waited.
fn complete_headers<'a>(packets: impl Iterator<Item = &'a mut Packet>, lladdr: [u8; 6]) {
    for packet in packets {
        if let Some(to) = packet.frame.data_mut().first_chunk_mut() {
            *to = lladdr;
        }
    }
}

/// Number of datagrams in these packets.
fn datagrams(packets: &[Packet]) -> u64 {
    packets.iter().map(|packet| u64::from(packet.wire_count())).sum()
}

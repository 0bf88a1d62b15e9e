//! Next hop of a datagram, and its link-layer address.
//!
//! On an interface that the kernel has too, the kernel's routes and neighbours are used: queried
//! over netlink and cached for a second. On a device that only this process has, link-layer
//! addresses are learned by ARP and neighbour discovery. If all packets are taken from the kernel,
//! its routes are used, but of its neighbours only permanent ones: the others are learned here, as
//! the kernel can neither learn nor check them.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::{fmt, io};

use forebay_buf::Pool;
use forebay_rx::Packet;
use forebay_rx::parse::Link;
use forebay_stack::network::Identity;
use forebay_stack::network::compose::LinkAddresses;
use forebay_stack::network::neighbours::{Neighbours as Learned, Resolved};
use forebay_sys::interface::InterfaceIndex;
use forebay_sys::neighbour::{EntryState, NextHops, RouteFacts};

use super::transmit::Between;

/// Lifetime of a cached answer of the kernel, in ns.
const REMEMBER_NS: u64 = 1_000_000_000;

/// Minimum interval between two queries to the kernel for replies, in ns: a reply can also go back
/// to the link-layer address that the request came from.
const ASK_NS: u64 = 1_000_000;

/// Number of next hops cached.
const REMEMBERED: usize = 256;

/// Next hops on one device, as known to one CPU.
pub(super) enum DeviceNeighbours {
    /// Device without a link layer.
    NoLink,
    /// The kernel's neighbours.
    Kernel(KernelCache),
    /// Table of this process, shared by all CPUs; locked for one look-up per datagram.
    Own(Arc<Mutex<Learned>>),
}

/// Way that a packet came, for answers to it.
#[derive(Clone, Copy, Debug)]
pub(super) struct WayBack {
    pub(super) source: IpAddr,
    pub(super) link_addresses: LinkAddresses,
}

impl WayBack {
    /// Way of a packet received from this source; `None` without a link layer.
    pub(super) fn of(packet: &Packet, source: IpAddr) -> Option<Self> {
        Some(Self { source, link_addresses: link_back(packet)? })
    }

    /// True if a packet that leaves by the device with this identity goes back to the source.
    pub(super) fn leads_to(&self, destination: IpAddr, on: &Identity) -> bool {
        self.source == destination && on.mac == Some(self.link_addresses.from)
    }
}

/// Link-layer addresses for an answer to a packet: its own, swapped.
pub(super) fn link_back(packet: &Packet) -> Option<LinkAddresses> {
    let is_ethernet = packet.headers.link == Link::Ethernet;
    let link_addresses = packet.frame.data().first_chunk::<12>().filter(|_| is_ethernet)?;
    let [a, b, c, d, e, f, g, h, i, j, k, l] = *link_addresses;
    Some(LinkAddresses { from: [a, b, c, d, e, f], to: [g, h, i, j, k, l] })
}

/// Next hop of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Hop {
    /// Link-layer addresses are known; `None` on a device without a link layer.
    Known(Option<LinkAddresses>),
    /// Link-layer address of this neighbour was solicited: the packet is queued until it is known.
    Sought(IpAddr),
    /// No cached entry; resolution is left to the kernel.
    Unknown,
}

impl DeviceNeighbours {
    /// The kernel's neighbours on an interface, and `learned` if the kernel receives nothing there.
    ///
    /// # Errors
    /// If the kernel cannot be asked: the process has no descriptor left.
    pub(super) fn of_kernel(
        interface: InterfaceIndex,
        learned: Option<Arc<Mutex<Learned>>>,
    ) -> io::Result<Self> {
        let remembered = vec![None; REMEMBERED].into_boxed_slice();
        let kernel = NextHops::open()?;
        Ok(Self::Kernel(KernelCache {
            interface,
            kernel,
            remembered,
            asked_ns: 0,
            asked: RouteFacts::default(),
            learned,
        }))
    }

    /// Finds the next hop of a datagram that is not a reply. Solicitations to be sent go to `asks`.
    pub(super) fn hop_to(
        &mut self,
        destination: IpAddr,
        on: &Identity,
        now_ns: u64,
        pool: &mut Pool,
        asks: &mut Vec<Packet>,
    ) -> Hop {
        if let Some(group) = group_lladdr(destination, on) {
            return Hop::Known(self.link_addresses(group, on));
        }
        match self {
            Self::NoLink => Hop::Known(None),
            Self::Kernel(cache) => {
                if let Some(lladdr) = cache.recall(destination, now_ns) {
                    return Hop::Known(link_addresses(lladdr, on));
                }
                match cache.ask(destination, now_ns) {
                    AskedNeighbour::Lladdr(lladdr) => Hop::Known(link_addresses(lladdr, on)),
                    AskedNeighbour::Neighbour(neighbour) => {
                        let Some(learned) = &cache.learned else { return Hop::Unknown };
                        let hop = resolve(learned, neighbour, on, now_ns, pool, asks);
                        if let Hop::Known(Some(link_addresses)) = hop {
                            cache.remember(destination, link_addresses.to, now_ns);
                        }
                        hop
                    }
                    AskedNeighbour::Nothing => Hop::Unknown,
                }
            }
            Self::Own(learned) => resolve(learned, destination, on, now_ns, pool, asks),
        }
    }

    /// MTU of the kernel's route to a destination whose next hop was found just now, if it has one of its own.
    pub(super) fn route_mtu(&self, destination: IpAddr) -> Option<RouteMtu> {
        let Self::Kernel(cache) = self else { return None };
        let remembered = cache.remembered[place(destination)].as_ref();
        let remembered = remembered.filter(|remembered| remembered.destination == destination)?;
        let RouteFacts { mtu, expires_ns, .. } = remembered.route;
        let asked_ns = remembered.until_ns.saturating_sub(REMEMBER_NS);
        let until_ns = expires_ns.map(|expires_ns| asked_ns.saturating_add(expires_ns));
        Some(RouteMtu { bytes: mtu?, until_ns })
    }

    /// Source address of the kernel's route to a destination, which is asked for if it is not remembered.
    pub(super) fn route_source(&mut self, destination: IpAddr, now_ns: u64) -> Option<IpAddr> {
        let Self::Kernel(cache) = self else { return None };
        if let Some(remembered) = cache.recalled(destination, now_ns) {
            return remembered.route.source;
        }
        match cache.ask(destination, now_ns) {
            AskedNeighbour::Lladdr(_) => cache.recalled(destination, now_ns)?.route.source,
            AskedNeighbour::Neighbour(_) => cache.asked.source,
            AskedNeighbour::Nothing => None,
        }
    }

    /// Queues the packets of one send until their next hop is resolved. Packets displaced by them
    /// go to `dropped`. If it has been resolved meanwhile, they stay in `packets`, complete, to be sent.
    pub(super) fn hold(
        &mut self,
        neighbour: IpAddr,
        packets: &mut Vec<Packet>,
        now_ns: u64,
        dropped: &mut Vec<Packet>,
    ) {
        match self {
            Self::Own(learned) | Self::Kernel(KernelCache { learned: Some(learned), .. }) => {
                let mut learned = learned.lock().unwrap_or_else(PoisonError::into_inner);
                learned.hold(neighbour, packets, now_ns, dropped);
            }
            Self::NoLink | Self::Kernel(_) => dropped.append(packets),
        }
    }

    /// Finds the link-layer addresses for a reply to a packet that came from `back`.
    pub(super) fn hop_back(
        &mut self,
        destination: IpAddr,
        on: &Identity,
        now_ns: u64,
        back: Option<LinkAddresses>,
    ) -> Option<LinkAddresses> {
        // The packet may have been to a group, whose address is no source.
        let back = back.map(|back| LinkAddresses { from: on.mac.unwrap_or(back.from), ..back });
        let Self::Kernel(cache) = self else { return back };
        cache.hop_known(destination, on, now_ns).or(back)
    }

    /// Finds the link-layer addresses for a packet of a flow that answers one which came from `back`. Of neighbours that are learned
    /// here, some unknown ones are solicited meanwhile, for packets that answer nothing. Solicitations to be sent go to
    /// `before`, and so do packets of the flow that waited for the neighbour: they now leave before the answer.
    pub(super) fn hop_of_answer(
        &mut self,
        flow: Option<Between>,
        on: &Identity,
        now_ns: u64,
        WayBack { source, link_addresses: back }: WayBack,
        pool: &mut Pool,
        before: &mut Vec<Packet>,
    ) -> Option<LinkAddresses> {
        let is_of_flow = |packet: &Packet| flow.is_some_and(|flow| flow.is_of(packet));
        match self {
            Self::NoLink => None,
            Self::Kernel(cache) => {
                let known = cache.hop_known(source, on, now_ns);
                if known.is_none()
                    && let Some(learned) = &cache.learned
                {
                    // They may wait for a gateway.
                    let mut learned = learned.lock().unwrap_or_else(PoisonError::into_inner);
                    learned.release_flow(None, is_of_flow, back.to, before);
                }
                known.or(Some(back))
            }
            Self::Own(learned) => {
                let mut learned = learned.lock().unwrap_or_else(PoisonError::into_inner);
                let resolved = learned.resolve_answered(source, on, now_ns, pool);
                match resolved.map_or(Hop::Unknown, |resolved| hop(resolved, source, on, before)) {
                    Hop::Known(link_addresses) => link_addresses,
                    Hop::Sought(_) | Hop::Unknown => {
                        learned.release_flow(Some(source), is_of_flow, back.to, before);
                        Some(back)
                    }
                }
            }
        }
    }

    /// Remembers a next hop, as if the kernel had told it.
    #[cfg(test)]
    pub(super) fn remember(&mut self, destination: IpAddr, lladdr: [u8; 6], now_ns: u64) {
        let Self::Kernel(cache) = self else { panic!("{self:?}") };
        cache.remember(destination, lladdr, now_ns);
    }

    fn link_addresses(&self, to: [u8; 6], on: &Identity) -> Option<LinkAddresses> {
        match self {
            Self::NoLink => None,
            Self::Kernel(_) | Self::Own(_) => link_addresses(to, on),
        }
    }
}

/// Looks up a neighbour's link-layer address in the table of learned ones.
fn resolve(
    learned: &Mutex<Learned>,
    neighbour: IpAddr,
    on: &Identity,
    now_ns: u64,
    pool: &mut Pool,
    asks: &mut Vec<Packet>,
) -> Hop {
    let mut learned = learned.lock().unwrap_or_else(PoisonError::into_inner);
    hop(learned.resolve(neighbour, on, now_ns, pool), neighbour, on, asks)
}

/// Hop to a neighbour that was looked up. A solicitation to be sent goes to `asks`.
fn hop(resolved: Resolved, neighbour: IpAddr, on: &Identity, asks: &mut Vec<Packet>) -> Hop {
    match resolved {
        Resolved::Mac(lladdr) => Hop::Known(link_addresses(lladdr, on)),
        Resolved::Probe(lladdr, packet) => {
            asks.push(packet);
            Hop::Known(link_addresses(lladdr, on))
        }
        Resolved::Ask(packet) => {
            asks.push(packet);
            Hop::Sought(neighbour)
        }
        Resolved::Wait => Hop::Sought(neighbour),
    }
}

fn link_addresses(to: [u8; 6], on: &Identity) -> Option<LinkAddresses> {
    on.mac.map(|from| LinkAddresses { to, from })
}

/// Link-layer address of a multicast group or of the broadcast address (RFC 1112, section 6.4; RFC
/// 2464, section 7).
fn group_lladdr(destination: IpAddr, on: &Identity) -> Option<[u8; 6]> {
    match destination {
        IpAddr::V4(address) if address.is_multicast() => {
            let [_, b, c, d] = address.octets();
            Some([0x01, 0x00, 0x5e, b & 0x7f, c, d])
        }
        IpAddr::V4(address) if on.is_broadcast(address) => Some([0xff; 6]),
        IpAddr::V6(address) if address.is_multicast() => {
            let [.., a, b, c, d] = address.octets();
            Some([0x33, 0x33, a, b, c, d])
        }
        _ => None,
    }
}

/// MTU of the kernel's route to a destination.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RouteMtu {
    pub(super) bytes: u32,
    /// Time at which the kernel forgets what a router has told, in ns; `None` if the route stays.
    pub(super) until_ns: Option<u64>,
}

/// Cache of the kernel's neighbours of one interface.
pub(super) struct KernelCache {
    interface: InterfaceIndex,
    /// One socket for all queries, and for each engine CPU: it answers within the namespace of the engine's
    /// maker, whichever thread sends.
    kernel: NextHops,
    /// Indexed by a hash of the destination; a newer entry replaces an older one.
    remembered: Box<[Option<Remembered>]>,
    asked_ns: u64,
    /// Route that was asked for last, until it is remembered.
    asked: RouteFacts,
    /// Neighbours learned here, if the kernel receives nothing and so cannot learn them.
    learned: Option<Arc<Mutex<Learned>>>,
}

/// The kernel's answer.
enum AskedNeighbour {
    Lladdr([u8; 6]),
    /// A neighbour whose link-layer address the kernel does not know, or cannot check.
    Neighbour(IpAddr),
    /// No route.
    Nothing,
}

#[derive(Clone, Copy)]
struct Remembered {
    destination: IpAddr,
    lladdr: [u8; 6],
    route: RouteFacts,
    until_ns: u64,
}

impl KernelCache {
    fn recall(&self, destination: IpAddr, now_ns: u64) -> Option<[u8; 6]> {
        self.recalled(destination, now_ns).map(|remembered| remembered.lladdr)
    }

    fn recalled(&self, destination: IpAddr, now_ns: u64) -> Option<&Remembered> {
        let remembered = self.remembered[place(destination)].as_ref()?;
        let is_good = remembered.destination == destination && now_ns < remembered.until_ns;
        is_good.then_some(remembered)
    }

    /// Next hop that is remembered, or that the kernel knows, unless it was asked just now.
    fn hop_known(
        &mut self,
        destination: IpAddr,
        on: &Identity,
        now_ns: u64,
    ) -> Option<LinkAddresses> {
        let known = self.recall(destination, now_ns).or_else(|| {
            let may_ask = now_ns.saturating_sub(self.asked_ns) >= ASK_NS;
            match may_ask.then(|| self.ask(destination, now_ns)) {
                Some(AskedNeighbour::Lladdr(lladdr)) => Some(lladdr),
                _ => None,
            }
        });
        known.and_then(|lladdr| link_addresses(lladdr, on))
    }

    /// Queries the kernel. An unknown or stale neighbour is solicited by the kernel, if permitted.
    fn ask(&mut self, destination: IpAddr, now_ns: u64) -> AskedNeighbour {
        self.asked_ns = now_ns;
        // A failed query counts as no route.
        let Ok(Some(route)) = self.kernel.route(destination, self.interface) else {
            return AskedNeighbour::Nothing;
        };
        self.asked = route;
        let hop = route.gateway.unwrap_or(destination);
        let entry = self.kernel.entry_of(hop, self.interface).ok().flatten();
        let is_stale = entry.is_none_or(|entry| entry.state == EntryState::Stale);
        if self.learned.is_none() && is_stale {
            // A stale entry is used until the kernel has probed it; what is sent past the kernel does not cause that.
            // Ignored without the privilege: a datagram sent through the kernel resolves an unknown neighbour, and a
            // stale one is probed when the kernel itself sends there.
            let _ = self.kernel.solicit(hop, self.interface);
        }
        // Where the kernel receives nothing, it cannot check what it knows.
        let may_use = |state| self.learned.is_none() || state == EntryState::Fixed;
        let Some(entry) = entry.filter(|entry| may_use(entry.state)) else {
            return AskedNeighbour::Neighbour(hop);
        };
        self.remember(destination, entry.lladdr.0, now_ns);
        AskedNeighbour::Lladdr(entry.lladdr.0)
    }

    fn remember(&mut self, destination: IpAddr, lladdr: [u8; 6], now_ns: u64) {
        let until_ns = now_ns.saturating_add(REMEMBER_NS);
        let route = std::mem::take(&mut self.asked);
        self.remembered[place(destination)] =
            Some(Remembered { destination, lladdr, route, until_ns });
    }
}

/// Index of a destination. Neighbours in one network mostly differ in their last bytes.
fn place(destination: IpAddr) -> usize {
    let (high, low) = match destination {
        IpAddr::V4(address) => {
            let [_, _, c, d] = address.octets();
            (c, d)
        }
        IpAddr::V6(address) => {
            let [.., c, d] = address.octets();
            (c, d)
        }
    };
    usize::from(high.wrapping_mul(31) ^ low) % REMEMBERED
}

impl fmt::Debug for DeviceNeighbours {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoLink => "Neighbours(none)",
            Self::Kernel(_) => "Neighbours(the kernel's)",
            Self::Own(_) => "Neighbours(our own)",
        })
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn udp_9_answers_to_groups_have_own_source() {
        let (host, group, asker) = ([2, 0, 0, 0, 0, 1], [1, 0, 0x5e, 0, 0, 0xfb], [2; 6]);
        let destination = IpAddr::V4(Ipv4Addr::new(10, 9, 0, 2));
        let back = Some(LinkAddresses { from: group, to: asker });
        for mut neighbours in [DeviceNeighbours::NoLink, DeviceNeighbours::Own(Arc::default())] {
            let on = Identity { mac: Some(host), ..Identity::default() };
            let hop = neighbours.hop_back(destination, &on, 0, back);
            assert_eq!(hop, Some(LinkAddresses { from: host, to: asker }));
        }
    }
}

//! The kernel's addresses, routes and neighbours. Our packets on an interface take the routes of
//! the kernel's packets there.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;

use netlink_packet_core::{NLM_F_ACK, NLM_F_CREATE, NLM_F_REPLACE, NLM_F_REQUEST};
use netlink_packet_route::address::{AddressAttribute, AddressHeaderFlags, AddressMessage};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteMessage, RouteMetric, RouteVia,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use rustix::io::Errno;

use super::interface::{InterfaceIndex, MacAddress};
use super::netlink::{self, NetlinkSocket};

/// Addresses of an interface, with their prefix lengths.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct InterfaceAddresses {
    /// Addresses that may be used, deprecated ones last (RFC 6724, section 5, rule 3).
    pub usable: Vec<(IpAddr, u8)>,
    /// Addresses of other interfaces, at which this host receives packets by this one, too: not loopback ones, and no
    /// link-local ones of IPv6.
    pub elsewhere: BTreeSet<IpAddr>,
}

impl InterfaceAddresses {
    /// Reads the addresses of an interface.
    ///
    /// # Errors
    /// If the netlink request fails.
    pub fn of(interface: InterfaceIndex) -> io::Result<Self> {
        let request = RouteNetlinkMessage::GetAddress(AddressMessage::default());
        netlink::dump(&request).map(|answers| Self::told(&answers, interface))
    }

    /// Addresses in the kernel's answers.
    pub(super) fn told(answers: &[RouteNetlinkMessage], interface: InterfaceIndex) -> Self {
        let (mut all, mut deprecated) = (Self::default(), Vec::new());
        for answer in answers {
            let RouteNetlinkMessage::NewAddress(AddressMessage { header, attributes, .. }) = answer
            else {
                continue;
            };
            let Some(address) = address_in(attributes) else { continue };
            let (flags, is_own) = (header.flags, header.index == interface.0);
            let is_skipped = flags.contains(AddressHeaderFlags::Dadfailed)
                || is_tentative(flags)
                || !is_own && (address.is_loopback() || is_of_link(address));
            if is_skipped {
                continue;
            } else if !is_own {
                all.elsewhere.insert(address);
            } else if flags.contains(AddressHeaderFlags::Deprecated) {
                deprecated.push((address, header.prefix_len));
            } else {
                all.usable.push((address, header.prefix_len));
            }
        }
        all.usable.append(&mut deprecated);
        all
    }
}

/// True while duplicate address detection goes on, and the address must not be used meanwhile (RFC 4862, section 5.4).
fn is_tentative(flags: AddressHeaderFlags) -> bool {
    flags.contains(AddressHeaderFlags::Tentative) && !flags.contains(AddressHeaderFlags::Optimistic)
}

fn is_of_link(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(address) if address.is_unicast_link_local())
}

/// The interface's own address in a message: on a point-to-point link `IFA_ADDRESS` is the peer's, `IFA_LOCAL` the
/// own one.
fn address_in(attributes: &[AddressAttribute]) -> Option<IpAddr> {
    let own = attributes.iter().find_map(|attribute| match attribute {
        AddressAttribute::Local(own) => Some(*own),
        _ => None,
    });
    let either = attributes.iter().find_map(|attribute| match attribute {
        AddressAttribute::Address(address) => Some(*address),
        _ => None,
    });
    own.or(either)
}

/// Addresses of an interface that may be used, with their prefix lengths.
///
/// # Errors
/// If the netlink request fails.
pub fn addresses(of: InterfaceIndex) -> io::Result<Vec<(IpAddr, u8)>> {
    InterfaceAddresses::of(of).map(|all| all.usable)
}

/// Valid entry of the kernel for a neighbour.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NeighbourEntry {
    /// Link-layer address.
    pub lladdr: MacAddress,
    /// State of the entry.
    pub state: EntryState,
}

/// State of a valid entry (`NUD_VALID`), by the kernel's own checks of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EntryState {
    /// Set for good: never checked (`NUD_PERMANENT`, `NUD_NOARP`).
    Fixed,
    /// Confirmed lately, or about to be probed (`NUD_REACHABLE`, `NUD_DELAY`, `NUD_PROBE`).
    Current,
    /// Not confirmed lately, and not probed before the kernel itself sends there (`NUD_STALE`).
    Stale,
}

impl EntryState {
    /// State of an entry; `None` if it is not valid.
    fn of(state: NeighbourState) -> Option<Self> {
        match state {
            NeighbourState::Permanent | NeighbourState::Noarp => Some(Self::Fixed),
            NeighbourState::Reachable | NeighbourState::Delay | NeighbourState::Probe => {
                Some(Self::Current)
            }
            NeighbourState::Stale => Some(Self::Stale),
            _ => None,
        }
    }
}

/// Questions to the kernel about next hops, over a socket that stays open. They concern the network
/// namespace of the thread that opened it.
#[derive(Debug)]
pub struct NextHops(NetlinkSocket);

impl NextHops {
    /// Opens the socket.
    ///
    /// # Errors
    /// If the process has no descriptor or memory left.
    pub fn open() -> io::Result<Self> {
        NetlinkSocket::of_routes().map(Self)
    }

    /// Route of the kernel to a destination. `None` if it has no route there by this interface.
    ///
    /// # Errors
    /// If the netlink request fails.
    pub fn route(
        &mut self,
        destination: IpAddr,
        by: InterfaceIndex,
    ) -> io::Result<Option<RouteFacts>> {
        RouteFacts::ask(&mut self.0, destination, by)
    }

    /// The kernel's entry of a neighbour, if it is valid.
    ///
    /// # Errors
    /// If the netlink request fails.
    pub fn entry_of(
        &mut self,
        neighbour: IpAddr,
        on: InterfaceIndex,
    ) -> io::Result<Option<NeighbourEntry>> {
        let request = message(neighbour, on);
        let answers = match self.0.ask(RouteNetlinkMessage::GetNeighbour(request)) {
            Ok(answers) => answers,
            Err(error) if is(&error, &[Errno::NOENT]) => return Ok(None),
            Err(error) => return Err(error),
        };
        Ok(answers.iter().find_map(|answer| match answer {
            RouteNetlinkMessage::NewNeighbour(known) => {
                let state = EntryState::of(known.header.state)?;
                let lladdr = known.attributes.iter().find_map(|attribute| match attribute {
                    NeighbourAttribute::LinkLayerAddress(address) => {
                        address.as_slice().try_into().ok().map(MacAddress)
                    }
                    _ => None,
                })?;
                Some(NeighbourEntry { lladdr, state })
            }
            _ => None,
        }))
    }

    /// Makes the kernel solicit a neighbour, as if it had a packet for it (`NTF_USE`). A stale entry is probed after
    /// `delay_first_probe_time`, unless it is confirmed before.
    ///
    /// # Errors
    /// If the kernel refuses: it requires `CAP_NET_ADMIN`.
    pub fn solicit(&mut self, neighbour: IpAddr, on: InterfaceIndex) -> io::Result<()> {
        let mut request = message(neighbour, on);
        request.header.flags = NeighbourFlags::Use;
        let flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE;
        self.0.request_change(RouteNetlinkMessage::NewNeighbour(request), flags)
    }
}

/// The kernel's route to a destination, by any interface. By a given one it takes any IPv4 destination for a neighbour, so
/// that [`NextHops::route`] does not tell if there is a route.
///
/// # Errors
/// If the netlink request fails, or the route forbids to send.
pub fn route(destination: IpAddr) -> io::Result<Option<RouteFacts>> {
    let route = route_to(&mut NetlinkSocket::of_routes()?, destination, None)?;
    Ok(route.map(|route| RouteFacts::of(&route)))
}

/// Unit of times in netlink messages (`USER_HZ`), in ns.
const CLOCK_TICK_NS: u64 = 10_000_000;

/// Route of the kernel to a destination.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RouteFacts {
    /// Gateway, which may be an IPv6 neighbour for an IPv4 destination (RFC 8950); `None` if the destination is a neighbour.
    pub gateway: Option<IpAddr>,
    /// Source address of packets there.
    pub source: Option<IpAddr>,
    /// MTU of the path, in bytes, if the route says one, or a router has told the kernel of one.
    pub mtu: Option<u32>,
    /// Time after which the kernel forgets what a router has told, in ns; `None` if the route stays.
    pub expires_ns: Option<u64>,
}

impl RouteFacts {
    pub(super) fn ask(
        socket: &mut NetlinkSocket,
        destination: IpAddr,
        by: InterfaceIndex,
    ) -> io::Result<Option<Self>> {
        Ok(route_to(socket, destination, Some(by))?.map(|route| Self::of(&route)))
    }

    fn of(route: &RouteMessage) -> Self {
        let source = route.attributes.iter().find_map(|attribute| match attribute {
            RouteAttribute::PrefSource(RouteAddress::Inet(source)) => Some(IpAddr::V4(*source)),
            RouteAttribute::PrefSource(RouteAddress::Inet6(source)) => Some(IpAddr::V6(*source)),
            _ => None,
        });
        let mtu = metrics_of(route).find_map(|metric| match metric {
            RouteMetric::Mtu(mtu) => Some(*mtu),
            _ => None,
        });
        let expires_ns = route.attributes.iter().find_map(|attribute| match attribute {
            RouteAttribute::CacheInfo(info) => Some(u64::from(info.expires) * CLOCK_TICK_NS),
            _ => None,
        });
        Self {
            gateway: gateway_of(route),
            source,
            mtu: mtu.filter(|mtu| *mtu > 0),
            expires_ns: expires_ns.filter(|ns| *ns > 0),
        }
    }
}

/// Source address that the kernel uses for a destination by an interface; `None` if it has no route there.
///
/// # Errors
/// If the netlink request fails, or the route forbids to send.
pub fn source_to(destination: IpAddr, by: InterfaceIndex) -> io::Result<Option<IpAddr>> {
    let route = RouteFacts::ask(&mut NetlinkSocket::of_routes()?, destination, by)?;
    Ok(route.and_then(|route| route.source))
}

fn metrics_of(route: &RouteMessage) -> impl Iterator<Item = &RouteMetric> {
    let metrics = route.attributes.iter().filter_map(|attribute| match attribute {
        RouteAttribute::Metrics(metrics) => Some(metrics),
        _ => None,
    });
    metrics.flatten()
}

fn gateway_of(route: &RouteMessage) -> Option<IpAddr> {
    route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Gateway(RouteAddress::Inet(gateway)) => Some(IpAddr::V4(*gateway)),
        RouteAttribute::Gateway(RouteAddress::Inet6(gateway)) => Some(IpAddr::V6(*gateway)),
        // Of another family than the destination.
        RouteAttribute::Via(RouteVia::Inet(gateway)) => Some(IpAddr::V4(*gateway)),
        RouteAttribute::Via(RouteVia::Inet6(gateway)) => Some(IpAddr::V6(*gateway)),
        _ => None,
    })
}

/// The kernel's route to a destination, by any interface or a given one.
fn route_to(
    socket: &mut NetlinkSocket,
    destination: IpAddr,
    by: Option<InterfaceIndex>,
) -> io::Result<Option<RouteMessage>> {
    let mut request = RouteMessage::default();
    request.header.address_family = family(destination);
    request.header.destination_prefix_length = if destination.is_ipv4() { 32 } else { 128 };
    request.attributes = vec![RouteAttribute::Destination(match destination {
        IpAddr::V4(address) => RouteAddress::Inet(address),
        IpAddr::V6(address) => RouteAddress::Inet6(address),
    })];
    request.attributes.extend(by.map(|by| RouteAttribute::Oif(by.0)));
    let answers = match socket.ask(RouteNetlinkMessage::GetRoute(request)) {
        Ok(answers) => answers,
        Err(error) if is(&error, &[Errno::NETUNREACH, Errno::HOSTUNREACH]) => return Ok(None),
        Err(error) => return Err(error),
    };
    Ok(answers.into_iter().find_map(|answer| match answer {
        RouteNetlinkMessage::NewRoute(route) => Some(route),
        _ => None,
    }))
}

fn message(neighbour: IpAddr, on: InterfaceIndex) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = family(neighbour);
    message.header.ifindex = on.0;
    message.attributes = vec![NeighbourAttribute::Destination(match neighbour {
        IpAddr::V4(address) => NeighbourAddress::Inet(address),
        IpAddr::V6(address) => NeighbourAddress::Inet6(address),
    })];
    message
}

fn family(of: IpAddr) -> AddressFamily {
    if of.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 }
}

fn is(error: &io::Error, any_of: &[Errno]) -> bool {
    any_of.iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

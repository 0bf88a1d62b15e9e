//! The kernel's addresses, routes and neighbours. Our packets on an interface take the routes of
//! the kernel's packets there.

use std::io;
use std::net::IpAddr;

use netlink_packet_core::{NLM_F_ACK, NLM_F_CREATE, NLM_F_REPLACE, NLM_F_REQUEST};
use netlink_packet_route::address::{AddressAttribute, AddressMessage};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::{RouteAddress, RouteAttribute, RouteMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use rustix::io::Errno;

use super::interface::{InterfaceIndex, MacAddress};
use super::netlink;

/// Addresses of an interface, with their prefix lengths.
///
/// # Errors
/// If the netlink request fails.
pub fn addresses(of: InterfaceIndex) -> io::Result<Vec<(IpAddr, u8)>> {
    let request = RouteNetlinkMessage::GetAddress(AddressMessage::default());
    let answers = netlink::dump(&request)?;
    let mut addresses = Vec::new();
    for answer in answers {
        let RouteNetlinkMessage::NewAddress(message) = answer else { continue };
        if message.header.index != of.0 {
            continue;
        }
        // On a point-to-point link `IFA_ADDRESS` is the peer's address, `IFA_LOCAL` the own one.
        let own = message.attributes.iter().find_map(|attribute| match attribute {
            AddressAttribute::Local(own) => Some(*own),
            _ => None,
        });
        let either = message.attributes.iter().find_map(|attribute| match attribute {
            AddressAttribute::Address(address) => Some(*address),
            _ => None,
        });
        addresses.extend(own.or(either).map(|address| (address, message.header.prefix_len)));
    }
    Ok(addresses)
}

/// Next hop of the kernel's route to a destination: the destination itself, or a gateway. `None` if
/// it has no route there by this interface.
///
/// # Errors
/// If the netlink request fails.
pub fn next_hop(destination: IpAddr, by: InterfaceIndex) -> io::Result<Option<IpAddr>> {
    let route = route_to(destination, Some(by))?;
    Ok(route.map(|route| {
        let gateway = route.attributes.iter().find_map(|attribute| match attribute {
            RouteAttribute::Gateway(RouteAddress::Inet(gateway)) => Some(IpAddr::V4(*gateway)),
            RouteAttribute::Gateway(RouteAddress::Inet6(gateway)) => Some(IpAddr::V6(*gateway)),
            _ => None,
        });
        gateway.unwrap_or(destination)
    }))
}

/// True if the kernel has a route to a destination. By a given interface it takes any IPv4
/// destination for a neighbour, so that [`next_hop`] does not tell.
///
/// # Errors
/// If the netlink request fails, or the route forbids to send.
pub fn has_route(destination: IpAddr) -> io::Result<bool> {
    Ok(route_to(destination, None)?.is_some())
}

/// The kernel's route to a destination, by any interface or a given one.
fn route_to(destination: IpAddr, by: Option<InterfaceIndex>) -> io::Result<Option<RouteMessage>> {
    let mut request = RouteMessage::default();
    request.header.address_family = family(destination);
    request.header.destination_prefix_length = if destination.is_ipv4() { 32 } else { 128 };
    request.attributes = vec![RouteAttribute::Destination(match destination {
        IpAddr::V4(address) => RouteAddress::Inet(address),
        IpAddr::V6(address) => RouteAddress::Inet6(address),
    })];
    request.attributes.extend(by.map(|by| RouteAttribute::Oif(by.0)));
    let answers = match netlink::ask(RouteNetlinkMessage::GetRoute(request)) {
        Ok(answers) => answers,
        Err(error) if is(&error, &[Errno::NETUNREACH, Errno::HOSTUNREACH]) => return Ok(None),
        Err(error) => return Err(error),
    };
    Ok(answers.into_iter().find_map(|answer| match answer {
        RouteNetlinkMessage::NewRoute(route) => Some(route),
        _ => None,
    }))
}

/// Link-layer address of a neighbour, if the kernel has a valid entry.
///
/// # Errors
/// If the netlink request fails.
pub fn lladdr_of(neighbour: IpAddr, on: InterfaceIndex) -> io::Result<Option<MacAddress>> {
    let request = message(neighbour, on);
    let answers = match netlink::ask(RouteNetlinkMessage::GetNeighbour(request)) {
        Ok(answers) => answers,
        Err(error) if is(&error, &[Errno::NOENT]) => return Ok(None),
        Err(error) => return Err(error),
    };
    Ok(answers.iter().find_map(|answer| match answer {
        RouteNetlinkMessage::NewNeighbour(known) if is_usable(known.header.state) => {
            known.attributes.iter().find_map(|attribute| match attribute {
                NeighbourAttribute::LinkLayerAddress(address) => {
                    address.as_slice().try_into().ok().map(MacAddress)
                }
                _ => None,
            })
        }
        _ => None,
    }))
}

/// Makes the kernel solicit a neighbour, as if it had a packet for it (`NTF_USE`).
///
/// # Errors
/// If the kernel refuses: it requires `CAP_NET_ADMIN`.
pub fn solicit(neighbour: IpAddr, on: InterfaceIndex) -> io::Result<()> {
    let mut request = message(neighbour, on);
    request.header.flags = NeighbourFlags::Use;
    let flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE;
    netlink::tell(RouteNetlinkMessage::NewNeighbour(request), flags)
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

/// True for the states of `NUD_VALID`.
fn is_usable(state: NeighbourState) -> bool {
    matches!(
        state,
        NeighbourState::Reachable
            | NeighbourState::Stale
            | NeighbourState::Delay
            | NeighbourState::Probe
            | NeighbourState::Permanent
            | NeighbourState::Noarp
    )
}

fn family(of: IpAddr) -> AddressFamily {
    if of.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 }
}

fn is(error: &io::Error, any_of: &[Errno]) -> bool {
    any_of.iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

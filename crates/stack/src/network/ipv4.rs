//! IPv4 validation as in `ip_rcv` and `ip_route_input`.

use std::net::Ipv4Addr;

use forebay_rx::parse::Checksum;
use forebay_rx::parse::checksum::{Sum, judge};

use super::counters::IpCounters;
use super::drop::NetworkDrop;
use super::identity::Identity;
use super::{Extent, Wire, ipv4_options};

pub(super) const FIXED_BYTES: usize = 20;
const FRAGMENT_MASK: u16 = 0x3fff;

/// Fields of a valid header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Ipv4 {
    /// Header length, options included.
    pub(super) header_len: usize,
    /// End of the packet, relative to its header.
    pub(super) total_len: usize,
    pub(super) protocol: u8,
    pub(super) is_fragment: bool,
}

/// Result of routing, as `RTN_LOCAL` and the like.
enum Route {
    Local,
    Many,
    /// Not addressed to this host; packets are not forwarded.
    Unreachable,
}

/// Validates a packet that begins with its IPv4 header.
pub(super) fn receive(
    wire: &Wire<'_>,
    on: &Identity,
    counters: &IpCounters,
) -> Result<Ipv4, NetworkDrop> {
    counters.in_receives.add(1);
    let ipv4 = header(wire, counters)?;
    let (source, destination) = addresses(wire.bytes).ok_or(NetworkDrop::IpInhdr)?;
    let route = route(source, destination, ipv4.protocol, on)?;
    let options = wire.bytes.get(FIXED_BYTES..ipv4.header_len).unwrap_or_default();
    if let Err(reason) = ipv4_options::judge(options) {
        if reason == NetworkDrop::IpInhdr {
            counters.in_hdr_errors.add(1);
        }
        return Err(reason);
    }
    match route {
        Route::Local | Route::Many => Ok(ipv4),
        Route::Unreachable => {
            counters.in_addr_errors.add(1);
            Err(NetworkDrop::IpInaddrerrors)
        }
    }
}

/// `ip_rcv_core`.
fn header(wire: &Wire<'_>, counters: &IpCounters) -> Result<Ipv4, NetworkDrop> {
    let wrong = |reason| {
        counters.in_hdr_errors.add(1);
        Err(reason)
    };
    let Some(fixed) = wire.bytes.first_chunk::<FIXED_BYTES>() else {
        return wrong(wire.missing(FIXED_BYTES, NetworkDrop::IpInhdr));
    };
    let header_len = usize::from(fixed[0] & 0x0f) * 4;
    if fixed[0] >> 4 != 4 || header_len < FIXED_BYTES {
        return wrong(NetworkDrop::IpInhdr);
    }
    let Some(header) = wire.bytes.get(..header_len) else {
        return wrong(wire.missing(header_len, NetworkDrop::IpInhdr));
    };
    if wire.ip_checksum != Checksum::Good && judge(Sum::of(header)) == Checksum::Bad {
        return wrong(NetworkDrop::IpCsum);
    }
    let total_len = usize::from(u16::from_be_bytes([fixed[2], fixed[3]]));
    match wire.holds(total_len) {
        Extent::Short => {
            counters.in_truncated_pkts.add(1);
            return Err(NetworkDrop::PktTooSmall);
        }
        Extent::Snapped => return Err(NetworkDrop::Snapped),
        Extent::Whole => {}
    }
    if total_len < header_len {
        return wrong(NetworkDrop::IpInhdr);
    }
    let fragment = u16::from_be_bytes([fixed[6], fixed[7]]) & FRAGMENT_MASK;
    Ok(Ipv4 { header_len, total_len, protocol: fixed[9], is_fragment: fragment != 0 })
}

/// Writes the checksum of a header without options.
pub(super) fn sum_up(header: &mut [u8; FIXED_BYTES]) {
    let set = |header: &mut [u8; FIXED_BYTES], sum: u16| {
        let [.., high, low, _, _, _, _, _, _, _, _] = header;
        [*high, *low] = sum.to_be_bytes();
    };
    set(header, 0);
    let sum = !Sum::of(header).fold();
    set(header, sum);
}

/// Source and destination address.
pub(super) fn addresses(header: &[u8]) -> Option<(Ipv4Addr, Ipv4Addr)> {
    let &[.., a, b, c, d, e, f, g, h] = header.first_chunk::<FIXED_BYTES>()?;
    Some(([a, b, c, d].into(), [e, f, g, h].into()))
}

/// `ip_route_input`, without a reverse path check (`rp_filter` is 0).
fn route(
    source: Ipv4Addr,
    destination: Ipv4Addr,
    protocol: u8,
    on: &Identity,
) -> Result<Route, NetworkDrop> {
    const IGMP: u8 = 2;
    if destination.is_multicast() {
        if !on.is_joined(destination.into()) {
            return Err(NetworkDrop::NotJoined);
        }
        if source.is_multicast() || source.is_broadcast() {
            // RFC 1122, section 3.2.1.3: never a source address.
            return Err(NetworkDrop::IpInvalidSource);
        }
        if source.is_loopback() {
            // RFC 1122, section 3.2.1.3 (g): never on the wire.
            return Err(NetworkDrop::IpLocalnet);
        }
        return match source.is_unspecified() {
            true if is_local_multicast(destination) || protocol == IGMP => Ok(Route::Many),
            true => Err(NetworkDrop::IpInvalidSource),
            false => from_another(source, on, Route::Many),
        };
    }
    if source.is_multicast() || source.is_broadcast() {
        return Err(NetworkDrop::IpInvalidSource);
    }
    // A host without an address yet may send from 0.0.0.0 to all hosts.
    let is_anyone = source.is_unspecified() && destination.is_unspecified();
    if destination.is_broadcast() || is_anyone {
        return match source.is_unspecified() {
            true => Ok(Route::Many),
            false => from_another(source, on, Route::Many),
        };
    }
    if source.is_unspecified() {
        // RFC 1122, section 3.2.1.3 (a): only while a host learns its address.
        return Err(NetworkDrop::IpInvalidSource);
    }
    if destination.is_unspecified() {
        return Err(NetworkDrop::IpInvalidDest);
    }
    if destination.is_loopback() || source.is_loopback() {
        return Err(NetworkDrop::IpLocalnet);
    }
    if on.is_own(destination.into()) {
        from_another(source, on, Route::Local)
    } else if on.is_broadcast(destination) {
        from_another(source, on, Route::Many)
    } else {
        Ok(Route::Unreachable)
    }
}

/// `fib_validate_source`: rejects the device's own addresses as source. Those of other interfaces may have moved to
/// another host since they were read. In the loopback net, only 127.0.0.1 is rejected here: `route` rejects the others, or
/// they have no owner.
fn from_another(source: Ipv4Addr, on: &Identity, route: Route) -> Result<Route, NetworkDrop> {
    if on.is_on_device(source.into()) || source == Ipv4Addr::LOCALHOST {
        Err(NetworkDrop::IpLocalSource)
    } else {
        Ok(route)
    }
}

/// 224.0.0.0/24: never forwarded.
fn is_local_multicast(address: Ipv4Addr) -> bool {
    matches!(address.octets(), [224, 0, 0, _])
}

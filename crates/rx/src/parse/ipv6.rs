//! IPv6 and its extension headers (RFC 8200).

use super::extension::{EXTENSION_BYTES, ExtensionWalk, FRAGMENT, HOP_BY_HOP, ROUTING};
use super::{DatagramFields, Flaw, Fragment, Headers, Network, Seen, Stop, checksum};

/// Maximum number of extension headers that are walked over; a longer chain is a flaw. The kernel's
/// flow dissector has a bound of its own for the same reason (`MAX_FLOW_DISSECT_HDRS`).
pub const MAX_EXTENSION_HEADERS: usize = 16;

const FIXED_BYTES: usize = 40;
const DESTINATION: std::ops::Range<usize> = 24..40;

pub(super) fn walk(seen: &Seen<'_>, headers: &mut Headers) -> Result<DatagramFields, Stop> {
    let start = usize::from(headers.network_offset);
    let &[first] = seen.header::<1>(start, Flaw::IpHeader)?;
    if first >> 4 != 6 {
        return Err(Stop::Flaw(Flaw::IpHeader));
    }
    headers.network = Network::Ipv6;
    let header = seen.header::<FIXED_BYTES>(start, Flaw::IpHeader)?;
    headers.protocol = header[6];
    let payload_len = usize::from(u16::from_be_bytes([header[4], header[5]]));
    let mut end = start + FIXED_BYTES + payload_len;
    if payload_len == 0 && header[6] == HOP_BY_HOP {
        end = seen.wire_len; // a jumbogram (RFC 2675)
    } else if end > seen.wire_len {
        headers.flaw = Some(Flaw::IpLength);
        end = seen.wire_len;
    }

    let walk = ExtensionWalk { kind: header[6], at: start + FIXED_BYTES };
    let chain = follow(walk, seen, end, headers)?;
    // RFC 8200, section 3: the payload length includes the extension headers.
    if chain.end > end {
        return Err(Stop::Flaw(Flaw::Extension));
    }
    let destination = match chain.destination {
        Destination::AsInHeader => Some(&header[DESTINATION]),
        Destination::Routed(address) => Some(address),
        Destination::Unknown => None,
    };
    let pseudo_sum = destination.map(|destination| {
        checksum::Sum::of(&header[8..24])
            .plus(checksum::Sum::of(destination))
            .plus_word(u16::from(headers.protocol))
    });
    Ok(DatagramFields { transport_offset: chain.end, end, pseudo_sum })
}

struct ExtensionChain<'a> {
    end: usize,
    destination: Destination<'a>,
}

/// Destination address that the sender summed (RFC 8200, section 8.1).
enum Destination<'a> {
    AsInHeader,
    /// Last address of a routing header.
    Routed(&'a [u8]),
    /// Not known: a routing header of a kind without that address.
    Unknown,
}

/// Follows the chain to the transport header, or to that of a later fragment. `headers.protocol` is
/// then the number of the header behind the chain.
fn follow<'a>(
    mut walk: ExtensionWalk,
    seen: &Seen<'a>,
    end: usize,
    headers: &mut Headers,
) -> Result<ExtensionChain<'a>, Stop> {
    let mut destination = Destination::AsInHeader;
    for _ in 0..MAX_EXTENSION_HEADERS {
        let ExtensionWalk { kind, at } = walk;
        if !walk.is_extension() {
            return Ok(ExtensionChain { end: walk.at, destination });
        }
        if at + EXTENSION_BYTES > end {
            return Err(Stop::Flaw(Flaw::Extension)); // what follows is padding
        }
        walk.pass(*seen.header::<2>(at, Flaw::Extension)?);
        headers.protocol = walk.kind;
        match kind {
            FRAGMENT => {
                let &[_, _, high, low] = seen.header::<4>(at, Flaw::Extension)?;
                let fragment = fragment(u16::from_be_bytes([high, low]));
                // An atomic fragment within a first one has no more of the datagram.
                if fragment != Fragment::Atomic || headers.fragment != Fragment::First {
                    headers.fragment = fragment;
                }
                if fragment == Fragment::Later {
                    return Ok(ExtensionChain { end: walk.at, destination });
                }
            }
            ROUTING => {
                destination = routed_to(seen.bytes.get(at..walk.at).unwrap_or_default());
            }
            _ => {}
        }
    }
    if walk.is_extension() {
        return Err(Stop::Flaw(Flaw::Extension));
    }
    Ok(ExtensionChain { end: walk.at, destination })
}

/// Place in the datagram, from the offset and "more fragments" field of a fragment header.
fn fragment(field: u16) -> Fragment {
    const OFFSET_MASK: u16 = 0xfff8;
    const MORE_FRAGMENTS: u16 = 1;
    match (field & OFFSET_MASK, field & MORE_FRAGMENTS) {
        (0, 0) => Fragment::Atomic,
        (0, _) => Fragment::First,
        _ => Fragment::Later,
    }
}

/// True if a parsed packet has segments left in a routing header: its sender summed another destination than the one in
/// the IPv6 header.
pub(super) fn has_segments_left(bytes: &[u8], headers: &Headers) -> bool {
    const NEXT_HEADER: usize = 6;
    let start = usize::from(headers.network_offset);
    let Some(&kind) = bytes.get(start + NEXT_HEADER).filter(|_| headers.network == Network::Ipv6)
    else {
        return false;
    };
    let mut walk = ExtensionWalk { kind, at: start + FIXED_BYTES };
    while walk.is_extension() && walk.at < headers.transport_offset.into() {
        let is_routing = walk.kind == ROUTING;
        let Some(header) = walk.take(bytes) else { return false };
        if is_routing && !matches!(routed_to(header), Destination::AsInHeader) {
            return true;
        }
    }
    false
}

/// Destination of a routing header with segments left: type 0 (RFC 5095) and type 2 (RFC 6275) list
/// the addresses in order, type 4 (RFC 8754) in reverse.
fn routed_to(routing: &[u8]) -> Destination<'_> {
    let &[_, _, kind, segments_left, _, _, _, _, ref addresses @ ..] = routing else {
        return Destination::Unknown;
    };
    let last = match (segments_left, kind) {
        (0, _) => return Destination::AsInHeader,
        (_, 0 | 2) => addresses.rchunks_exact(16).next(),
        (_, 4) => addresses.get(..16),
        _ => None,
    };
    last.map_or(Destination::Unknown, Destination::Routed)
}

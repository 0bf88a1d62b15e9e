//! One IP header of a frame, and its payload.

use super::WALKED_BYTES_MAX;
use super::layers::{Layer, Layers};
use super::rest::Rest;
use crate::parse::extension::{AUTHENTICATION, ExtensionWalk, HOP_BY_HOP};
use crate::parse::{Headers, Link, MAX_EXTENSION_HEADERS, Network, Transport, Verify, View, parse};

const IPV6_BYTES: usize = 40;

/// IP header, with the link header before it and all bytes behind it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Level<'a> {
    pub(super) rest: Rest<'a>,
    pub(super) headers: Headers,
}

impl<'a> Level<'a> {
    /// Level that begins here, if it holds the addresses of an IP header.
    pub(super) fn inner(rest: Rest<'a>, link: Link) -> Option<Self> {
        let wire_len = u32::try_from(rest.bytes.len()).ok()?;
        let level = Self { rest, headers: parse(rest.bytes, wire_len, link, Verify::Nothing) };
        level.view().address_bytes()?;
        Some(level)
    }

    pub(super) fn view(&self) -> View<'_> {
        View::new(self.rest.bytes, &self.headers)
    }

    /// Adds the IP header and the transport's header to the layers.
    pub(super) fn note(&self, layers: &mut Layers) -> Option<()> {
        layers.push(match self.headers.network {
            Network::Other => return None,
            Network::Ipv4 => Layer::Ipv4,
            Network::Ipv6 => Layer::Ipv6,
        })?;
        let transport = match (self.headers.transport, self.headers.protocol) {
            (Transport::Icmp, _) => Layer::Icmp,
            (_, 6) if self.view().port_bytes().is_some() => Layer::Tcp,
            (_, 17) if self.view().port_bytes().is_some() => Layer::Udp,
            _ => return Some(()),
        };
        layers.push(transport)
    }

    /// Payload of the IP packet as far as the walk goes, from the header of [its
    /// protocol](Headers::protocol) on, without the frame's padding; `None` for a fragment.
    pub(super) fn payload(&self) -> Option<Rest<'a>> {
        let view = self.view();
        if view.is_fragment() {
            return None;
        }
        let start = self.payload_offset()?;
        let end = match view.packet_end()? {
            // Only a jumbogram's IPv6 header has no length.
            usize::MAX if self.headers.network == Network::Ipv6 => {
                self.jumbogram_end().unwrap_or(start)
            }
            end => end,
        };
        self.rest.first(end).seen(WALKED_BYTES_MAX).behind(start)
    }

    /// End of a jumbogram, whose length is an option in the first extension header (RFC 2675,
    /// section 2).
    fn jumbogram_end(&self) -> Option<usize> {
        const PAD1: u8 = 0;
        const JUMBO_PAYLOAD: u8 = 0xc2;
        let network = usize::from(self.headers.network_offset);
        let start = network + IPV6_BYTES;
        if self.rest.bytes.get(network + 6) != Some(&HOP_BY_HOP) {
            return None;
        }
        let mut walk = ExtensionWalk { kind: HOP_BY_HOP, at: start };
        let seen = self.rest.seen(WALKED_BYTES_MAX);
        let [_, _, options @ ..] = walk.take(seen.bytes)? else { return None };
        let mut options = options;
        loop {
            options = match options {
                [PAD1, rest @ ..] => rest,
                &[JUMBO_PAYLOAD, 4, a, b, c, d, ..] => {
                    return Some(start.saturating_add(u32::from_be_bytes([a, b, c, d]) as usize));
                }
                [_, len, rest @ ..] => rest.get(usize::from(*len)..)?,
                _ => return None,
            };
        }
    }

    fn payload_offset(&self) -> Option<usize> {
        let start = usize::from(self.headers.network_offset);
        let header = self.rest.bytes.get(start..)?;
        let mut walk = match self.headers.network {
            Network::Other => return None,
            Network::Ipv4 => {
                let &[first, .., protocol] = header.first_chunk::<10>()?;
                ExtensionWalk { kind: protocol, at: start + usize::from(first & 0x0f) * 4 }
            }
            Network::Ipv6 => {
                let &[.., next] = header.first_chunk::<7>()?;
                ExtensionWalk { kind: next, at: start + IPV6_BYTES }
            }
        };
        let is_ipv4 = self.headers.network == Network::Ipv4;
        for _ in 0..MAX_EXTENSION_HEADERS {
            if !walk.is_extension() || is_ipv4 && walk.kind != AUTHENTICATION {
                break;
            }
            walk.take(self.rest.bytes)?;
        }
        (walk.kind == self.headers.protocol).then_some(walk.at)
    }
}

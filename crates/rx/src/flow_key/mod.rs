//! Flow key: the bytes that identify a packet's flow, before they are hashed.
//!
//! | rule | key | found |
//! |---|---|---|
//! | `outer` | addresses and ports | TCP and UDP of the outermost IP header |
//! | `inner` | the same | of the innermost IP header reached through tunnels |
//! | `addresses` | addresses | other protocols, and headers cut short, of the innermost IP header |
//! | `fragment` | addresses | fragments of a datagram, which all go to one CPU |
//! | `icmp` | the flow that an ICMP error quotes, reversed | so that errors follow the flow |
//! | `esp` | addresses and SPI | ESP, as in the kernel |
//! | `l2tpv3` | addresses and session | L2TPv3 over IP or UDP: its cookie's length is not in the header |
//! | `gtpu` | addresses and TEID | GTP-U that holds no IP packet |
//! | `quic` | the connection ID chosen by the server | short headers to a [QUIC server](QuicRule) |
//! | `none` | nothing: not steered (RPS-4) | no IP header reached |
//!
//! | looked behind | `auto` | `inner` |
//! |---|---|---|
//! | IPv4 and IPv6 in either, GRE, NVGRE, PPTP, PPPoE, errors of ICMP | yes | yes |
//! | VXLAN, VXLAN-GPE, GENEVE, MPLS over UDP | no: the source port tells inner flows apart | yes |
//! | GTP-U, ESP and L2TP (data messages of versions 2 and 3) over UDP | no: nor does the kernel, and it costs every UDP packet a look | yes |
//! | MPLS, NSH, MPLS over IP | no: nor does the kernel | yes |
//! | PPP in GRE of version 0, ERSPAN, Ethernet over IP (EtherIP, protocol 143 of segment routing) | no: nor does the kernel | yes |
//! | Teredo, LISP, FOU, GUE, WCCP, TRILL, MAC in MAC, MACsec, IPComp, WireGuard | no | no: a port that anyone may use, a rare header, or an encrypted one |
//!
//! Datagrams that arrive as one packet (UDP GSO) have the key of the first. They share the outer flow,
//! so this matters only for `inner` at the ports of VXLAN, VXLAN-GPE, GENEVE, MPLS, GTP-U, ESP and
//! L2TP, and only if the sender gives several inner flows one source port. Cutting such packets
//! before they are keyed would cost a frame and a copy per datagram.
//!
//! The [table of differences] says in which fields `auto` differs from the kernel's dissector
//! (`net/core/flow_dissector.c`).
//!
//! [table of differences]: https://github.com/forebay/forebay/blob/main/docs/src/reference/differences-from-linux.md
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::panic))]

mod inside; //   walk from one IP header to the next
mod layers; //   headers passed by the walk
mod level; //    one IP header and its payload
mod over_udp; // tunnels over UDP, and QUIC
mod rest; //     bytes from some header on
mod rules; //    depth of the walk, ports of QUIC

use inside::{NumberOf, Step};
pub use layers::{LAYERS_MAX, Layer, Layers};
use level::Level;
use rest::Rest;
pub use rules::{
    FlowKeyRules, KeyDepth, NoFlowKey, QUIC_ID_BYTES_MAX, QUIC_PORT_RANGES_MAX, QuicRule,
};

use crate::parse::View;

/// Maximum number of bytes of a frame that the walk reads; headers beyond are ignored.
pub const WALKED_BYTES_MAX: usize = 512;

/// Rule that made a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KeyRule {
    /// There is no key.
    None,
    /// Addresses and ports of the outermost IP header.
    Outer,
    /// Addresses and ports of an inner IP header.
    Inner,
    /// Addresses: the protocol has no ports, or they are cut off.
    Addresses,
    /// Addresses: a fragment.
    Fragment,
    /// Flow quoted by an ICMP error.
    Icmp,
    /// Addresses and SPI.
    Esp,
    /// Addresses and session.
    L2tpv3,
    /// Addresses and tunnel endpoint.
    Gtpu,
    /// Connection ID.
    Quic,
}

impl KeyRule {
    /// Name in `flowkey.csv`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Outer => "outer",
            Self::Inner => "inner",
            Self::Addresses => "addresses",
            Self::Fragment => "fragment",
            Self::Icmp => "icmp",
            Self::Esp => "esp",
            Self::L2tpv3 => "l2tpv3",
            Self::Gtpu => "gtpu",
            Self::Quic => "quic",
        }
    }
}

/// Key of a flow, and the headers on the way to it.
#[derive(Clone, Copy, Debug)]
pub struct FlowKey<'a> {
    /// Rule that made the key.
    pub rule: KeyRule,
    /// Headers that were walked over.
    pub layers: Layers,
    /// SPI, session, tunnel endpoint or connection ID, if the key has one.
    pub id: Option<KeyId<'a>>,
    innermost: Level<'a>,
    is_reversed: bool,
    /// True if the key is that of the outermost IP header and its ports.
    is_outermost: bool,
}

/// Number or ID in a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KeyId<'a> {
    /// Four bytes.
    Number([u8; 4]),
    /// Connection ID of QUIC.
    Connection(&'a [u8]),
}

impl KeyId<'_> {
    /// Bytes of the ID, in network order.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Number(bytes) => bytes,
            Self::Connection(bytes) => bytes,
        }
    }
}

impl<'a> FlowKey<'a> {
    /// Walks to the key of a parsed packet of this length on the wire, in bytes; the view may have fewer.
    #[must_use]
    pub fn of(view: &View<'a>, wire_len: u32, rules: &FlowKeyRules) -> Self {
        let missing = (wire_len as usize).saturating_sub(view.bytes().len());
        let rest = Rest { bytes: view.bytes(), missing };
        let outermost = Level { rest, headers: *view.headers() };
        let mut key = Self {
            rule: KeyRule::None,
            layers: Layers::default(),
            id: None,
            innermost: outermost,
            is_reversed: false,
            is_outermost: true,
        };
        let mut number_of = None;
        let _ = outermost.note(&mut key.layers);
        while let Some(step) = inside::step(&key.innermost, rules, &mut key.layers) {
            key.is_outermost = false;
            let level = match step {
                Step::Inner(level) => level,
                // No error is about an error (RFC 1122, section 3.2.2; RFC 4443, section 2.4).
                Step::Quoted(_) if key.is_reversed => break,
                Step::Quoted(level) => {
                    key.is_reversed = true;
                    level
                }
                Step::Number(of, number) => {
                    key.id = Some(KeyId::Number(number.to_be_bytes()));
                    number_of = Some(of);
                    break;
                }
                Step::Connection(id) => {
                    key.id = Some(KeyId::Connection(id));
                    break;
                }
            };
            key.innermost = level;
            if level.note(&mut key.layers).is_none() {
                break; // maximum depth
            }
        }
        if key.is_reversed {
            // The sender of the quoted packet chose this number for its own direction.
            key.id = None;
        }
        key.rule = key.applied_rule(number_of);
        key
    }

    fn applied_rule(&self, number_of: Option<NumberOf>) -> KeyRule {
        let view = self.innermost.view();
        match (number_of, self.id) {
            _ if self.is_reversed => KeyRule::Icmp,
            (None, Some(_)) => KeyRule::Quic,
            (Some(NumberOf::Esp), _) => KeyRule::Esp,
            (Some(NumberOf::L2tpv3), _) => KeyRule::L2tpv3,
            (Some(NumberOf::Gtpu), _) => KeyRule::Gtpu,
            (None, None) if view.address_bytes().is_none() => KeyRule::None,
            (None, None) if view.is_fragment() => KeyRule::Fragment,
            (None, None) if view.port_bytes().is_none() => KeyRule::Addresses,
            (None, None) if self.is_outermost => KeyRule::Outer,
            (None, None) => KeyRule::Inner,
        }
    }

    /// True if the key is that of the outermost IP header and its ports, which a device that hashes
    /// has looked at, too.
    #[must_use]
    pub fn is_outermost(&self) -> bool {
        self.is_outermost
    }

    /// Fields of the innermost IP header that was reached, and of its transport.
    #[must_use]
    pub fn innermost(&self) -> View<'_> {
        self.innermost.view()
    }

    /// Passes the key to a hash function: addresses and optionally four more bytes, or an ID.
    pub(crate) fn hashed<T>(
        &self,
        of_tuple: impl FnOnce(&[u8], Option<&[u8; 4]>) -> T,
        of_id: impl FnOnce(&[u8]) -> T,
    ) -> Option<T> {
        let view = self.innermost.view();
        let ports = if view.is_fragment() { None } else { view.port_bytes().copied() };
        let more = match self.id {
            Some(KeyId::Connection(id)) => return Some(of_id(id)),
            Some(KeyId::Number(number)) => Some(number),
            _ => ports,
        };
        let addresses = view.address_bytes()?;
        if !self.is_reversed {
            return Some(of_tuple(addresses, more.as_ref()));
        }
        // The quoted packet went the other way: the flow's received packets have its addresses
        // reversed.
        let (source, destination) = addresses.split_at(addresses.len() / 2);
        let mut turned = [0; 32];
        let turned = turned.get_mut(..addresses.len())?;
        let (first, second) = turned.split_at_mut(destination.len());
        first.copy_from_slice(destination);
        second.copy_from_slice(source);
        let more = more.map(|[a, b, c, d]| [c, d, a, b]);
        Some(of_tuple(turned, more.as_ref()))
    }
}

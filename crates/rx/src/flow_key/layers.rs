//! Headers passed by the walk to a flow's key.

use std::fmt;

/// Maximum number of headers that are walked over: eight nested IP headers. The kernel's flow
/// dissector counts steps between them (`MAX_FLOW_DISSECT_HDRS`, 15). The key is that of the innermost
/// header reached.
pub const LAYERS_MAX: usize = 15;

/// Header of a layer that the walk knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Layer {
    /// IPv4 (RFC 791).
    #[default]
    Ipv4,
    /// IPv6 and its extension headers (RFC 8200).
    Ipv6,
    /// UDP (RFC 768).
    Udp,
    /// TCP (RFC 9293).
    Tcp,
    /// ICMP (RFC 792) or ICMPv6 (RFC 4443).
    Icmp,
    /// GRE (RFC 2784, RFC 2890), or its version 1 (PPTP, RFC 2637).
    Gre,
    /// NVGRE (RFC 7637): GRE with a key before an Ethernet frame.
    Nvgre,
    /// IPv4 as a payload of IP (RFC 2003): no header of its own.
    Ipip,
    /// IPv6 as a payload of IP (RFC 4213, RFC 2473): no header of its own.
    SixInFour,
    /// VXLAN (RFC 7348).
    Vxlan,
    /// VXLAN-GPE (draft-ietf-nvo3-vxlan-gpe).
    VxlanGpe,
    /// GENEVE (RFC 8926).
    Geneve,
    /// GTP-U (3GPP TS 29.281).
    Gtpu,
    /// A PPPoE session (RFC 2516).
    Pppoe,
    /// A stack of MPLS labels (RFC 3032).
    Mpls,
    /// A network service header (RFC 8300).
    Nsh,
    /// L2TPv3 (RFC 3931).
    L2tpv3,
    /// ESP (RFC 4303).
    Esp,
    /// QUIC (RFC 9000).
    Quic,
}

impl Layer {
    /// Name in `flowkey.csv`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Ipv4 => "ipv4",
            Self::Ipv6 => "ipv6",
            Self::Udp => "udp",
            Self::Tcp => "tcp",
            Self::Icmp => "icmp",
            Self::Gre => "gre",
            Self::Nvgre => "nvgre",
            Self::Ipip => "ipip",
            Self::SixInFour => "6in4",
            Self::Vxlan => "vxlan",
            Self::VxlanGpe => "vxlan-gpe",
            Self::Geneve => "geneve",
            Self::Gtpu => "gtpu",
            Self::Pppoe => "pppoe",
            Self::Mpls => "mpls",
            Self::Nsh => "nsh",
            Self::L2tpv3 => "l2tpv3",
            Self::Esp => "esp",
            Self::Quic => "quic",
        }
    }
}

/// List of layers, outermost first.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Layers {
    layers: [Layer; LAYERS_MAX],
    count: u8,
}

impl Layers {
    /// Layers, outermost first.
    #[must_use]
    pub fn as_slice(&self) -> &[Layer] {
        self.layers.get(..self.count.into()).unwrap_or_default()
    }

    /// Adds a layer; `None` at the maximum depth.
    pub(super) fn push(&mut self, layer: Layer) -> Option<()> {
        *self.layers.get_mut(usize::from(self.count))? = layer;
        self.count += 1;
        Some(())
    }
}

impl fmt::Display for Layers {
    /// Names joined by dots.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, layer) in self.as_slice().iter().enumerate() {
            let dot = if index > 0 { "." } else { "" };
            write!(f, "{dot}{}", layer.name())?;
        }
        Ok(())
    }
}

//! Tunnels around segments, built by the book.

use forebay_rx::parse::Link;

use crate::coalescing::frames::{Segment, Wire, folded, words};

/// Header that holds the packet inside, behind an IP header of its own.
#[derive(Clone, Debug)]
pub(crate) enum Kind {
    /// The IP header alone.
    Ip,
    Gre {
        key: Option<u32>,
        is_summed: bool,
        is_bridged: bool,
    },
    Vxlan {
        network: u32,
    },
    VxlanGpe {
        is_bridged: bool,
    },
    Geneve {
        network: u32,
        options: Vec<u8>,
        is_bridged: bool,
    },
}

/// An IP header around others.
#[derive(Clone, Debug)]
pub(crate) struct Outside {
    pub(crate) is_v6: bool,
    pub(crate) host: u8,
    pub(crate) ttl: u8,
    pub(crate) tos: u8,
    pub(crate) id: u16,
    pub(crate) dont_fragment: bool,
    pub(crate) flow_label: u32,
    /// A routing header without segments left is behind IPv6.
    pub(crate) is_routed: bool,
    pub(crate) port: u16,
    /// Destination port, if it is not that of the tunnel.
    pub(crate) to_port: Option<u16>,
    /// UDP's checksum is there.
    pub(crate) is_summed: bool,
    pub(crate) kind: Kind,
}

/// A segment, and all that is around it.
#[derive(Clone, Debug)]
pub(crate) struct Tunnelled {
    pub(crate) link: Link,
    pub(crate) vlans: Vec<u16>,
    /// Session around all.
    pub(crate) pppoe: Option<u16>,
    /// From the outermost on.
    pub(crate) outside: Vec<Outside>,
    /// Session inside.
    pub(crate) inner_pppoe: Option<u16>,
    pub(crate) inner: Segment,
}

pub(crate) fn outside(kind: Kind) -> Outside {
    Outside {
        is_v6: false,
        host: 1,
        ttl: 60,
        tos: 0,
        id: u16::MAX - 1,
        dont_fragment: false,
        flow_label: 0x54321,
        is_routed: false,
        port: 50_000,
        to_port: None,
        is_summed: false,
        kind,
    }
}

impl Outside {
    pub(crate) fn v6(self) -> Self {
        Self { is_v6: true, ..self }
    }

    pub(crate) fn routed(self) -> Self {
        Self { is_routed: true, ..self.v6() }
    }

    pub(crate) fn summed(self) -> Self {
        Self { is_summed: true, ..self }
    }

    fn is_bridged(&self) -> bool {
        match &self.kind {
            Kind::Ip => false,
            Kind::Vxlan { .. } => true,
            Kind::Gre { is_bridged, .. }
            | Kind::VxlanGpe { is_bridged }
            | Kind::Geneve { is_bridged, .. } => *is_bridged,
        }
    }

    /// The IP packet around `payload`, which is what this EtherType says.
    fn around(&self, ethertype: u16, payload: &[u8]) -> Vec<u8> {
        let kind = if self.is_bridged() { 0x6558 } else { ethertype };
        let vni = |network: u32| (network << 8).to_be_bytes();
        let (protocol, body) = match &self.kind {
            Kind::Ip => (if ethertype == 0x0800 { 4 } else { 41 }, payload.to_vec()),
            Kind::Gre { key, is_summed, .. } => (47, gre(*key, *is_summed, kind, payload)),
            Kind::Vxlan { network } => {
                let header = [[8, 0, 0, 0], vni(*network)].concat();
                (17, self.udp(4789, &[&header, payload].concat()))
            }
            Kind::VxlanGpe { is_bridged } => {
                let next = match (is_bridged, ethertype) {
                    (true, _) => 3,
                    (false, 0x0800) => 1,
                    (false, _) => 2,
                };
                let header = [[0x0c, 0, 0, next], vni(7)].concat();
                (17, self.udp(4790, &[&header, payload].concat()))
            }
            Kind::Geneve { network, options, .. } => {
                let words = u8::try_from(options.len() / 4).unwrap();
                let [high, low] = kind.to_be_bytes();
                let header = [&[words, 0, high, low], &vni(*network)[..], options].concat();
                (17, self.udp(6081, &[&header, payload].concat()))
            }
        };
        if self.is_routed {
            let routing = [&[protocol, 2, 4, 0, 0, 0, 0, 0], &[0x30; 16][..], &body].concat();
            return self.ip(43, &routing);
        }
        self.ip(protocol, &body)
    }

    fn addresses(&self) -> Vec<u8> {
        if self.is_v6 {
            [[0x20, self.host].repeat(8), [0x30; 16].to_vec()].concat()
        } else {
            vec![192, 168, 0, self.host, 192, 168, 0, 200]
        }
    }

    fn udp(&self, to: u16, payload: &[u8]) -> Vec<u8> {
        let len = u16::try_from(payload.len() + 8).unwrap();
        let fields = [self.port, self.to_port.unwrap_or(to), len, 0].map(u16::to_be_bytes).concat();
        let mut udp = [fields, payload.to_vec()].concat();
        if self.is_summed {
            let sum = words(&udp) + words(&self.addresses()) + 17 + u64::from(len);
            let field = if folded(sum) == 0xffff { 0xffff } else { !folded(sum) };
            udp[6..8].copy_from_slice(&field.to_be_bytes());
        }
        udp
    }

    fn ip(&self, protocol: u8, payload: &[u8]) -> Vec<u8> {
        if self.is_v6 {
            let first = 6 << 28 | u32::from(self.tos) << 20 | self.flow_label;
            let [high, low] = u16::try_from(payload.len()).unwrap().to_be_bytes();
            let rest = [high, low, protocol, self.ttl];
            return [&first.to_be_bytes(), &rest[..], &self.addresses(), payload].concat();
        }
        let [high, low] = u16::try_from(payload.len() + 20).unwrap().to_be_bytes();
        let [id_high, id_low] = self.id.to_be_bytes();
        let flags = if self.dont_fragment { 0x40 } else { 0 };
        let mut header = vec![0x45, self.tos, high, low, id_high, id_low, flags, 0];
        header.extend([self.ttl, protocol, 0, 0]);
        header.extend(self.addresses());
        let sum = !folded(words(&header));
        header[10..12].copy_from_slice(&sum.to_be_bytes());
        [header, payload.to_vec()].concat()
    }
}

fn gre(key: Option<u32>, is_summed: bool, kind: u16, payload: &[u8]) -> Vec<u8> {
    let flags = if is_summed { 0x80 } else { 0 } | if key.is_some() { 0x20 } else { 0 };
    let [high, low] = kind.to_be_bytes();
    let mut gre = vec![flags, 0, high, low];
    if is_summed {
        gre.extend([0; 4]);
    }
    gre.extend(key.iter().flat_map(|key| key.to_be_bytes()));
    gre.extend(payload);
    if is_summed {
        let sum = !folded(words(&gre));
        gre[4..6].copy_from_slice(&sum.to_be_bytes());
    }
    gre
}

fn pppoe(session: u16, ethertype: u16, packet: &[u8]) -> Vec<u8> {
    let protocol: u16 = if ethertype == 0x0800 { 0x21 } else { 0x57 };
    let len = u16::try_from(packet.len() + 2).unwrap();
    let fields = [session, len, protocol].map(u16::to_be_bytes).concat();
    [&[0x11, 0], &fields[..], packet].concat()
}

fn ethernet(mac: u8, vlans: &[u16], ethertype: u16, packet: &[u8]) -> Vec<u8> {
    let tags = vlans.iter().flat_map(|vlan| [[0x81, 0], vlan.to_be_bytes()].concat());
    let mut bytes = [[mac; 6], [4; 6]].concat();
    bytes.extend(tags);
    bytes.extend(ethertype.to_be_bytes());
    bytes.extend(packet);
    bytes
}

/// A segment behind one more IP header.
pub(crate) fn tunnelled(outside: Outside, inner: Segment) -> Tunnelled {
    let (link, vlans) = (Link::Ethernet, Vec::new());
    Tunnelled { link, vlans, pppoe: None, outside: vec![outside], inner_pppoe: None, inner }
}

impl Tunnelled {
    pub(crate) fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// The one that comes this many later: ids rise outside and inside.
    pub(crate) fn nth(&self, number: u32) -> Self {
        let mut next = Self { inner: self.inner.nth(number), ..self.clone() };
        for outside in &mut next.outside {
            outside.id = outside.id.wrapping_add(u16::try_from(number).unwrap());
        }
        next
    }

    /// Frames of this one and those that follow, together `count`.
    pub(crate) fn run(&self, count: u32) -> Vec<Wire> {
        (0..count).map(|number| self.nth(number).wire()).collect()
    }

    pub(crate) fn wire(&self) -> Wire {
        let inner = Segment { link: Link::Ip, ..self.inner.clone() };
        let mut packet = inner.wire().bytes;
        let mut ethertype = if self.inner.is_v6 { 0x86dd } else { 0x0800 };
        if let Some(session) = self.inner_pppoe {
            packet = pppoe(session, ethertype, &packet);
            ethertype = 0x8864;
        }
        let mut vlans = &self.inner.vlans[..];
        for outside in self.outside.iter().rev() {
            if outside.is_bridged() {
                packet = ethernet(self.inner.mac, vlans, ethertype, &packet);
            }
            vlans = &[];
            packet = outside.around(ethertype, &packet);
            ethertype = if outside.is_v6 { 0x86dd } else { 0x0800 };
        }
        if let Some(session) = self.pppoe {
            packet = pppoe(session, ethertype, &packet);
            ethertype = 0x8864;
        }
        if self.link == Link::Ethernet {
            packet = ethernet(2, &self.vlans, ethertype, &packet);
        }
        Wire::new(packet, self.link)
    }
}

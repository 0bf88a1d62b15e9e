//! Frames with tunnels, and the key that is found in one.

use super::*;

/// Result of the walk over a frame.
#[derive(Debug)]
pub(super) struct Told {
    pub(super) rule: KeyRule,
    pub(super) layers: String,
    pub(super) tuple: Option<String>,
    pub(super) id: String,
    pub(super) hash: u32,
}

impl Told {
    pub(super) fn of(frame: &[u8], rules: &str) -> Self {
        Self::of_captured(frame, frame.len(), rules)
    }

    /// Result of the walk over the first bytes of a frame.
    pub(super) fn of_captured(frame: &[u8], wire_len: usize, rules: &str) -> Self {
        let wire_len = u32::try_from(wire_len).unwrap();
        let headers: Headers = parse(frame, wire_len, Link::Ethernet, Verify::Nothing);
        let view = View::new(frame, &headers);
        let rules: FlowKeyRules = rules.parse().unwrap();
        let key = FlowKey::of(&view, wire_len, &rules);
        let hasher = Hasher::keyed(&[3; 16], false).with_rules(rules);
        let hash = hasher.hash_of(&view, wire_len, FlowHash::NONE);
        assert_eq!(hash, hasher.hash_key(&key), "the short way is the same: {frame:02x?}");
        let inner = key.innermost();
        let tuple = inner.ports().and_then(|(from, to)| {
            Some(format!("{} {from} {} {to}", inner.source()?, inner.destination()?))
        });
        let id = key.id.map(|id| id.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect());
        Self {
            rule: key.rule,
            layers: key.layers.to_string(),
            tuple,
            id: id.unwrap_or_default(),
            hash: hash.0,
        }
    }
}

pub(super) fn inner_packet(ports: [u16; 2]) -> Vec<u8> {
    ipv4(FROM.octets(), TO.octets(), 17, &udp(ports, b"who is it?"))
}

/// Frames with `inner` in a tunnel: name, frame, layers.
pub(super) fn tunnels(inner: &[u8]) -> Vec<(&'static str, Vec<u8>, String)> {
    let over_ip = |protocol, bytes: &[u8]| ethernet(0x0800, &ipv4([1; 4], [2; 4], protocol, bytes));
    let over_udp = |port, header: &[u8], behind: &[u8]| {
        over_ip(17, &udp([30_000, port], &[header, behind].concat()))
    };
    let bridged = ethernet(0x0800, inner);
    let gre = |header: &[u8], behind: &[u8]| over_ip(47, &[header, behind].concat());
    let ppp = [&[0, 0x21][..], inner].concat();
    let labels = [&[0, 1, 0, 64, 0, 2, 1, 64][..], inner].concat();
    let pseudowire = [&[0, 2, 1, 64, 0, 0, 0, 0][..], &bridged].concat();
    let wire = |ethertype, behind: &[u8]| {
        let frame = ethernet(ethertype, behind);
        ethernet(0x8847, &[&[0, 2, 1, 64, 0, 0, 0, 0][..], &frame].concat())
    };
    let nsh = [&[0, 6, 1, 1][..], &[0; 20], inner].concat();
    let pppoe_len = u16::try_from(ppp.len()).unwrap().to_be_bytes();
    let pppoe = [&[0x11, 0, 0, 9][..], &pppoe_len, &ppp].concat();
    let gtp_len = u16::try_from(inner.len()).unwrap().to_be_bytes();
    let long_len = u16::try_from(inner.len() + 8).unwrap().to_be_bytes();
    let l2tp_len = u16::try_from(ppp.len() + 16).unwrap().to_be_bytes();
    let l2tp = [&[0x4a, 2][..], &l2tp_len, &[0, 1, 0, 2, 0, 3, 0, 4, 0, 2, 9, 9]].concat();
    let erspan_ii = [&[0x10, 0, 0x88, 0xbe, 0, 0, 0, 1, 0x10, 5, 0, 1, 0, 0, 0, 0][..], &bridged];
    let erspan_iii =
        [&[0x10, 0, 0x22, 0xeb, 0, 0, 0, 1, 0x20, 5, 0, 1][..], &[0; 7], &[0], &bridged];
    let platform =
        [&[0x10, 0, 0x22, 0xeb, 0, 0, 0, 1, 0x20, 5, 0, 1][..], &[0; 7], &[1; 9], &bridged];
    let nested = gre(&[0, 0, 0x86, 0xdd], &ipv6(4, &ipv4([3; 4], [4; 4], 4, inner)));
    let tunnels = [
        ("ipip", over_ip(4, inner), "ipv4.ipip"),
        ("gre", gre(&[0, 0, 8, 0], inner), "ipv4.gre"),
        ("gre all", gre(&[&[0xb0, 0, 8, 0][..], &[1; 12]].concat(), inner), "ipv4.gre"),
        ("nvgre", gre(&[0x20, 0, 0x65, 0x58, 0, 0, 7, 0], &bridged), "ipv4.nvgre"),
        ("pptp", gre(&[&[0x30, 0x81, 0x88, 0x0b][..], &[0; 12]].concat(), &ppp), "ipv4.gre"),
        ("ppp", gre(&[0x20, 0, 0x88, 0x0b, 0, 0, 0, 7], &ppp), "ipv4.gre"),
        ("pppoe", ethernet(0x8864, &pppoe), "pppoe"),
        ("vxlan", over_udp(4789, &[8, 0, 0, 0, 0, 0, 7, 0], &bridged), "ipv4.udp.vxlan"),
        ("vxlan linux", over_udp(8472, &[8, 0, 0, 0, 0, 0, 7, 0], &bridged), "ipv4.udp.vxlan"),
        ("gpe", over_udp(4790, &[0x0c, 0, 0, 1, 0, 0, 7, 0], inner), "ipv4.udp.vxlan-gpe"),
        ("gpe nsh", over_udp(4790, &[0x0c, 0, 0, 4, 0, 0, 7, 0], &nsh), "ipv4.udp.vxlan-gpe.nsh"),
        (
            "geneve",
            over_udp(6081, &[1, 0, 0x65, 0x58, 0, 0, 7, 0, 0, 0, 0, 0], &bridged),
            "ipv4.udp.geneve",
        ),
        (
            "gtpu",
            over_udp(2152, &[&[0x30, 255][..], &gtp_len, &[0, 0, 0, 7]].concat(), inner),
            "ipv4.udp.gtpu",
        ),
        (
            "gtpu extended",
            over_udp(
                2152,
                &[&[0x34, 255][..], &long_len, &[0, 0, 0, 7, 0, 0, 0, 0x85, 1, 0, 0, 0]].concat(),
                inner,
            ),
            "ipv4.udp.gtpu",
        ),
        ("mpls", ethernet(0x8847, &labels), "mpls"),
        ("mpls over ip", over_ip(137, &labels), "ipv4.mpls"),
        ("mpls over udp", over_udp(6635, &[], &labels), "ipv4.udp.mpls"),
        ("pseudowire", ethernet(0x8847, &pseudowire), "mpls"),
        ("pppoe in a pseudowire", wire(0x8864, &pppoe), "mpls.pppoe"),
        ("labels in a pseudowire", wire(0x8847, &labels), "mpls.mpls"),
        ("pseudowires", wire(0x8848, &pseudowire), "mpls.mpls"),
        ("nsh", ethernet(0x894f, &nsh), "nsh"),
        ("l2tpv2", over_udp(1701, &[0, 2, 0, 1, 0, 2, 0xff, 3], &ppp), "ipv4.udp"),
        ("l2tpv2 all", over_udp(1701, &l2tp, &ppp), "ipv4.udp"),
        ("erspan", gre(&[0, 0, 0x88, 0xbe], &bridged), "ipv4.gre"),
        ("erspan ii", gre(&[], &erspan_ii.concat()), "ipv4.gre"),
        ("erspan iii", gre(&[], &erspan_iii.concat()), "ipv4.gre"),
        ("erspan platform", gre(&[], &platform.concat()), "ipv4.gre"),
        ("etherip", over_ip(97, &[&[0x30, 0][..], &bridged].concat()), "ipv4"),
        ("ethernet over ip", over_ip(143, &bridged), "ipv4"),
        ("nested", nested, "ipv4.gre.ipv6.ipip.ipv4.ipip"),
    ];
    let with_inner = |(name, frame, layers)| (name, frame, format!("{layers}.ipv4.udp"));
    tunnels.map(with_inner).into()
}

pub(super) fn ethernet(ethertype: u16, behind: &[u8]) -> Vec<u8> {
    [&[2; 12][..], &ethertype.to_be_bytes(), behind].concat()
}

pub(super) fn ipv4(source: [u8; 4], destination: [u8; 4], protocol: u8, behind: &[u8]) -> Vec<u8> {
    let total_len = u16::try_from(20 + behind.len()).unwrap().to_be_bytes();
    let [high, low] = total_len;
    let fixed = [0x45, 0, high, low, 0, 1, 0, 0, 64, protocol, 0, 0];
    [&fixed[..], &source, &destination, behind].concat()
}

pub(super) fn ipv6(next: u8, behind: &[u8]) -> Vec<u8> {
    let [high, low] = u16::try_from(behind.len()).unwrap().to_be_bytes();
    let addresses = [[0x20; 16], [0x21; 16]];
    [&[0x60, 0, 0, 0, high, low, next, 64][..], addresses.as_flattened(), behind].concat()
}

pub(super) fn udp([from, to]: [u16; 2], payload: &[u8]) -> Vec<u8> {
    let len = u16::try_from(8 + payload.len()).unwrap().to_be_bytes();
    [&from.to_be_bytes()[..], &to.to_be_bytes(), &len, &[0, 0], payload].concat()
}

pub(super) fn tcp([from, to]: [u16; 2]) -> Vec<u8> {
    let ports = [from.to_be_bytes(), to.to_be_bytes()];
    [ports.as_flattened(), &[0; 8], &[0x50, 0x10], &[0; 6]].concat()
}

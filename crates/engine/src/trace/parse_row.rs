//! Rows of `parse.csv`: the parsed fields of each frame.

use std::borrow::Cow;
use std::fmt::Display;

use forebay_rx::Packet;
use forebay_rx::arrive::RefusedFrame;
use forebay_rx::hash::Hasher;
use forebay_rx::parse::{
    Checksum, Flaw, Fragment, Headers, Network, Transport, Verify, View, link_layer, parse_into,
};

pub(super) const HEADER: &str = "frame,len,caplen,eth_type,vlans,ip_ver,src,dst,proto,ttl,frag,\
                                 ip_hl,ip_len,ip_csum,l4_csum,sport,dport,l4_payload_len,tcp_seq,\
                                 tcp_flags,hash,verdict\n";

/// A frame, parsed as the intake parses it.
pub(super) struct Seen<'a> {
    bytes: Cow<'a, [u8]>,
    headers: Headers,
}

impl<'a> Seen<'a> {
    pub(super) fn new(packet: &'a Packet, verify: Verify) -> Self {
        // Nonlinear bytes are included: the intake finds all headers, too.
        let bytes = if packet.is_nonlinear() {
            Cow::Owned(packet.fragments().flatten().copied().collect::<Vec<_>>())
        } else {
            Cow::Borrowed(packet.frame.data())
        };
        // Fields that the device set are kept: the link, and perhaps that the checksum is right.
        let mut headers = packet.headers;
        parse_into(&mut headers, &bytes, packet.wire_len, packet.device_sum, verify);
        Self { bytes, headers }
    }

    pub(super) fn view(&self) -> View<'_> {
        View::new(&self.bytes, &self.headers)
    }
}

/// Row of a frame.
pub(super) fn row(packet: &Packet, frame: u64, seen: &Seen<'_>, hasher: &Hasher) -> String {
    let (bytes, headers, view) = (&*seen.bytes, seen.headers, seen.view());
    let link = link_layer(bytes, headers.link);
    let hash = hasher.hash_of(&view, packet.wire_len, packet.hash);
    let (source_port, destination_port) = view.ports().unzip();
    let vlans: Vec<_> = link.vlans().iter().map(u16::to_string).collect();
    let fields = [
        frame.to_string(),
        packet.wire_len.to_string(),
        bytes.len().to_string(),
        link.ethertype.map(|kind| format!("0x{kind:04x}")).unwrap_or_default(),
        vlans.join("."),
        network(headers.network).to_owned(),
        field(view.source()),
        field(view.destination()),
        field(view.protocol()),
        field(view.ttl()),
        field(is_fragment(bytes, &headers).map(u8::from)),
        field(view.network_header_len()),
        field(view.network_len_field()),
        checksum(headers.ip_checksum).to_owned(),
        checksum(headers.l4_checksum).to_owned(),
        field(source_port),
        field(destination_port),
        field(view.payload_len()),
        field(view.tcp_sequence()),
        view.tcp_flags().map(|flags| format!("0x{flags:04x}")).unwrap_or_default(),
        format!("{:08x}", hash.0),
        verdict(&headers, bytes.len() < packet.wire_len as usize).to_owned(),
    ];
    fields.join(",") + "\n"
}

/// Row of a frame that never reached packet memory: its number, its length, and the reason.
pub(super) fn refused(refused: &RefusedFrame, frame: u64) -> String {
    let between = ",".repeat(HEADER.matches(',').count() - 1);
    format!("{frame},{}{between}{}\n", refused.wire_len, refused.reason.name())
}

pub(super) fn field(value: Option<impl Display>) -> String {
    value.map(|value| value.to_string()).unwrap_or_default()
}

/// True if the frame is a fragment; `None` if the captured bytes do not show it. The IPv4 field
/// counts even if the header is truncated behind it, which the parser reports as no fragment.
fn is_fragment(bytes: &[u8], headers: &Headers) -> Option<bool> {
    match headers.network {
        Network::Other => None,
        Network::Ipv4 => {
            let at = usize::from(headers.network_offset) + 6;
            let field = bytes.get(at..)?.first_chunk().copied()?;
            Some(u16::from_be_bytes(field) & 0x3fff > 0) // all but the reserved bit and DF
        }
        Network::Ipv6 => Some(headers.fragment != Fragment::Whole),
    }
}

fn network(network: Network) -> &'static str {
    match network {
        Network::Other => "",
        Network::Ipv4 => "4",
        Network::Ipv6 => "6",
    }
}

fn checksum(checksum: Checksum) -> &'static str {
    match checksum {
        Checksum::Unknown => "-",
        Checksum::Good => "G",
        Checksum::Bad => "B",
    }
}

/// Kind of the frame, in a word.
fn verdict(headers: &Headers, is_snapped: bool) -> &'static str {
    match (headers.flaw, headers.fragment, headers.transport) {
        (Some(flaw), ..) => flaw_name(flaw),
        (None, Fragment::First | Fragment::Later, _) => "fragment",
        (None, _, Transport::Tcp) => "tcp",
        (None, _, Transport::Udp) => "udp",
        (None, _, Transport::Icmp) => "icmp",
        (None, _, Transport::Other) if is_snapped => "snapped",
        (None, _, Transport::Other | Transport::Tunnel) => "other",
    }
}

fn flaw_name(flaw: Flaw) -> &'static str {
    match flaw {
        Flaw::Runt => "runt",
        Flaw::IpHeader => "ip_header",
        Flaw::IpLength => "ip_length",
        Flaw::Extension => "extension",
        Flaw::TransportHeader => "transport_header",
        Flaw::UdpLength => "udp_length",
    }
}

#[cfg(test)]
mod tests {
    use forebay_buf::Region;
    use forebay_buf::pool::{ChunkClass, carve, region_bytes};
    use forebay_rx::DropReason;
    use forebay_rx::coalesce::gso::{GSO_TCPV4, NEEDS_CSUM, VirtioNetHdr};
    use forebay_rx::packet::Arrival;
    use forebay_rx::parse::Link;

    use super::super::{flow_names, lro_row};
    use super::*;

    #[test]
    fn whole_packet_checksum_is_not_wrong() {
        let shares = [vec![ChunkClass { chunk_bytes: 512, chunks: 1 }]];
        let region = Region::allocate(region_bytes(&shares));
        let mut pool = carve(region, &shares).unwrap().remove(0);
        // IPv4 and TCP; the checksum field, 0x1425, has the pseudo-header sum.
        let mut bytes = vec![0x45, 0, 0, 48, 0, 0, 0, 0, 64, 6, 0x66, 0xc6];
        bytes.extend([10, 0, 0, 1, 10, 0, 0, 2, 0, 9, 0, 80, 0, 0, 0, 1, 0, 0, 0, 1]);
        bytes.extend([0x50, 0x10, 1, 0, 0x14, 0x25, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]);
        let len_bytes = u32::try_from(bytes.len()).unwrap();
        let mut packet = |vnet: VirtioNetHdr| {
            let mut frame = pool.allocate(len_bytes).unwrap();
            frame.copy_from(&bytes);
            let mut packet = Packet::received(frame, Arrival(7), len_bytes, Link::Ip);
            vnet.carry_into(&mut packet).unwrap();
            let row = row(
                &packet,
                7,
                &Seen::new(&packet, Verify::Checksums),
                &Hasher::keyed(&[7; 16], false),
            );
            (packet.is_gso(), row.split(',').nth(14).unwrap().to_owned())
        };
        let to_be_cut = VirtioNetHdr {
            flags: NEEDS_CSUM,
            gso_type: GSO_TCPV4,
            hdr_len: 40,
            gso_size: 4,
            csum_start: 20,
            csum_offset: 16,
        };
        assert_eq!(packet(to_be_cut), (true, "G".to_owned()));
        assert_eq!(packet(VirtioNetHdr::default()), (false, "B".to_owned()));
    }

    #[test]
    fn nonlinear_rows_equal_linear() {
        let stamp = [b"STMP", &7u32.to_be_bytes()[..], &9u64.to_be_bytes(), &[1; 500]].concat();
        let mut packets = forebay_testkit::packets::datagrams(&stamp, 42);
        let [a, b] = packets.each_mut().map(|packet| {
            let hasher = Hasher::keyed(&[7; 16], false);
            // As received: the second parse must not see the result of the first.
            let headers = Headers { link: Link::Ethernet, ..Headers::default() };
            let found = std::mem::replace(&mut packet.headers, headers);
            let parsed = row(packet, 7, &Seen::new(packet, Verify::Checksums), &hasher);
            packet.headers = found;
            let left = lro_row::row(packet, &[7]);
            let stamp = packet.segments().next().map(|segment| flow_names::stamp(packet, &segment));
            assert!(stamp.is_some_and(|stamp| stamp.is_some()), "{packet:?}");
            (parsed, left)
        });
        assert_eq!(a, b);
        assert!(a.0.contains(",G,G,1000,9,516,"), "{}", a.0);
    }

    #[test]
    fn refused_frame_row_is_complete() {
        let (arrival, reason) = (Arrival::of_frame(7), DropReason::LinkType);
        let row = super::refused(&RefusedFrame { arrival, wire_len: 60, reason }, 7);
        let fields: Vec<_> = row.trim_end().split(',').collect();
        assert_eq!(fields.len(), HEADER.split(',').count());
        assert_eq!([fields[0], fields[1], fields[2], fields[21]], ["7", "60", "", "link_type"]);
    }
}

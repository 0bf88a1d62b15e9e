//! Lines of `lro.jsonl`: packets that left coalescing.

use forebay_rx::Packet;
use forebay_rx::coalesce::inner_headers;
use forebay_rx::parse::{Network, Transport, View};
use serde::Serialize;

/// Letters of the TCP flags, from the lowest bit on.
const FLAG_LETTERS: [char; 8] = ['F', 'S', 'R', 'P', 'A', 'U', 'E', 'C'];

#[derive(Serialize)]
struct Left<'a> {
    r#in: &'a [u64],
    payload_len: usize,
    gso_size: u16,
    flags: String,
    hex: String,
}

#[derive(Serialize)]
struct Lost<'a> {
    r#in: &'a [u64],
    drop: &'a str,
}

/// Line of a packet merged from these frames, or of a packet of one frame. The latter may be a GSO
/// packet of the device: its `gso_size` is set, and its checksum field has the pseudo-header sum, or in a tunnel the complete
/// one.
pub(super) fn row(packet: &Packet, frames: &[u64]) -> String {
    let bytes: Vec<_> = packet.fragments().flatten().copied().collect();
    let inner = inner_headers(packet);
    let view = match &inner {
        Some(inner) => View::new(packet.frame.data(), inner),
        None => packet.view(),
    };
    let flags = view.tcp_flags().unwrap_or(0);
    let set = (0..).zip(FLAG_LETTERS).filter(|(bit, _)| flags >> bit & 1 == 1);
    line(&Left {
        r#in: frames,
        payload_len: payload_len(&view),
        gso_size: packet.gso_size(),
        flags: set.map(|(_, letter)| letter).collect(),
        hex: hex(&bytes),
    })
}

/// Line of frames that were dropped before or after coalescing.
pub(super) fn lost(frames: &[u64], reason: &str) -> String {
    line(&Lost { r#in: frames, drop: reason })
}

/// Payload length of TCP or UDP (of the inner one in a tunnel), or of IP for other protocols, in bytes.
fn payload_len(view: &View<'_>) -> usize {
    let headers = view.headers();
    if let (Transport::Tcp | Transport::Udp, 1..) = (headers.transport, headers.payload_offset) {
        return headers.payload_len.into();
    }
    let (Some(field), Some(header_len)) = (view.network_len_field(), view.network_header_len())
    else {
        return 0;
    };
    match headers.network {
        Network::Ipv4 => usize::from(field).saturating_sub(header_len.into()),
        _ => field.into(),
    }
}

fn line(value: &impl Serialize) -> String {
    // Numbers and strings always serialize.
    serde_json::to_string(value).unwrap_or_default() + "\n"
}

fn hex(bytes: &[u8]) -> String {
    const DIGITS: [u8; 16] = *b"0123456789abcdef";
    let digit = |nibble: u8| char::from(DIGITS[usize::from(nibble)]);
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 0x0f)]).collect()
}

#[cfg(test)]
mod tests {
    use forebay_buf::pool::{ChunkClass, carve, region_bytes};
    use forebay_buf::{Pool, Region};
    use forebay_rx::packet::Arrival;
    use forebay_rx::parse::{Link, Verify, parse};
    use forebay_testkit::packets::{in_one_frame, merged_vxlan, vxlan_payloads};
    use serde_json::{Value, json};

    use super::*;

    fn pool() -> Pool {
        let shares = [vec![ChunkClass { chunk_bytes: 2048, chunks: 4 }]];
        let region = Region::allocate(region_bytes(&shares));
        carve(region, &shares).unwrap().pop().unwrap()
    }

    /// Line of a frame that was not merged.
    fn told(bytes: &[u8], link: Link) -> Value {
        let (mut pool, len_bytes) = (pool(), u32::try_from(bytes.len()).unwrap());
        let mut frame = pool.allocate(len_bytes).unwrap();
        frame.copy_from(bytes);
        let mut packet = Packet::received(frame, Arrival(7), len_bytes, link);
        packet.headers = parse(bytes, len_bytes, link, Verify::Checksums);
        let line = row(&packet, &[7]);
        assert!(line.ends_with("}\n") && line.lines().count() == 1, "{line}");
        serde_json::from_str(&line).unwrap()
    }

    fn line_of(payload_len: usize, flags: &str, bytes: &[u8]) -> Value {
        let digits: Vec<_> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let hex = digits.concat();
        json!({"in": [7], "payload_len": payload_len, "gso_size": 0, "flags": flags, "hex": hex})
    }

    /// IPv4 and TCP headers with these flags, before `payload_len` bytes.
    fn tcp(flags: u8, payload_len: u8) -> Vec<u8> {
        let mut bytes = vec![0x45, 0, 0, 40 + payload_len, 0, 0, 0, 0, 64, 6, 0, 0];
        bytes.extend([10, 0, 0, 1, 10, 0, 0, 2, 0, 9, 0, 80, 0, 0, 0, 1, 0, 0, 0, 1]);
        bytes.extend([0x50, flags, 1, 0, 0, 0, 0, 0]);
        bytes.extend(0..payload_len);
        bytes
    }

    #[test]
    fn tcp_flags_print_lowest_first() {
        for (flags, letters) in
            [(0, ""), (0x10, "A"), (0x18, "PA"), (0x11, "FA"), (0xff, "FSRPAUEC")]
        {
            let bytes = tcp(flags, 5);
            assert_eq!(told(&bytes, Link::Ip), line_of(5, letters, &bytes));
        }
    }

    #[test]
    fn other_transports_are_still_described() {
        let mut icmp = tcp(0, 3);
        icmp[9] = 1;
        assert_eq!(told(&icmp, Link::Ip), line_of(23, "", &icmp), "what IP carries");
        let arp = [&[0xff; 12][..], &[8, 6], &[0; 28]].concat();
        assert_eq!(told(&arp, Link::Ethernet), line_of(0, "", &arp));
        assert_eq!(told(&[], Link::Ethernet), line_of(0, "", &[]));
    }

    /// Merged VXLAN at its own port, at one that tells nothing, and at that of GENEVE.
    #[test]
    fn lro_t8_traced_lengths_are_inner_ones() {
        let payloads = vxlan_payloads(4);
        let (_, merged) = merged_vxlan(&payloads, Link::Ethernet);
        for port in [4789, 5000, 6081u16] {
            let mut packet = in_one_frame(&merged);
            packet.frame.data_mut()[36..38].copy_from_slice(&port.to_be_bytes());
            let told: Value = serde_json::from_str(&row(&packet, &[7])).unwrap();
            let told = ["payload_len", "gso_size", "flags"].map(|name| told[name].clone());
            assert_eq!(told, [json!(4 * 700), json!(700), json!("A")], "{port}");
        }
    }

    #[test]
    fn dropped_frames_are_reported_together() {
        let line: Value = serde_json::from_str(&lost(&[3, 4, 9], "backlog_full")).unwrap();
        assert_eq!(line, json!({"in": [3, 4, 9], "drop": "backlog_full"}));
    }
}

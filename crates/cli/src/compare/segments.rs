//! Capture of TCP segments that can be merged.

/// Frames of a capture, and payload of each.
const FRAMES: u16 = 2048;
const PAYLOAD_BYTES: u16 = 1448;

/// Header of a capture with microseconds and Ethernet frames.
const PCAP_HEADER: [u32; 6] = [0xa1b2_c3d4, 0x0004_0002, 0, 0, 0xffff, 1];

/// Bytes of a capture in which `flows` take turns with `run` segments in a row each.
pub(super) fn capture(flows: u16, run: u16) -> Vec<u8> {
    let mut bytes: Vec<u8> = PCAP_HEADER.iter().flat_map(|word| word.to_le_bytes()).collect();
    for number in 0..FRAMES {
        let flow = number / run % flows;
        let sent = number / (run * flows) * run + number % run;
        let frame = frame(flow, sent);
        let len = u32::try_from(frame.len()).unwrap_or(u32::MAX);
        for word in [u32::from(number), 0, len, len] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(frame);
    }
    bytes
}

/// The segment of a flow that follows `sent` others, with timestamps as Linux sends them.
fn frame(flow: u16, sent: u16) -> Vec<u8> {
    let segment_len = 32 + PAYLOAD_BYTES;
    let mut ip = vec![0x45, 0];
    ip.extend((20 + segment_len).to_be_bytes());
    ip.extend(sent.to_be_bytes());
    ip.extend([0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    let sum = checksum(&[&ip]);
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    let mut tcp = Vec::new();
    tcp.extend((10_000 + flow).to_be_bytes());
    tcp.extend(80u16.to_be_bytes());
    tcp.extend((u32::from(sent) * u32::from(PAYLOAD_BYTES)).to_be_bytes());
    tcp.extend([0, 0, 0, 1, 0x80, 0x10, 2, 0, 0, 0, 0, 0, 1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 1]);
    tcp.extend((0..PAYLOAD_BYTES).map(|at| (at + sent).to_le_bytes()[0]));
    let pseudo = [&ip[12..20], &[0, 6], &segment_len.to_be_bytes()].concat();
    let sum = checksum(&[&pseudo, &tcp]);
    tcp[16..18].copy_from_slice(&sum.to_be_bytes());
    [&[2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0], &ip[..], &tcp].concat()
}

/// The Internet checksum of parts with an even number of bytes each.
fn checksum(parts: &[&[u8]]) -> u16 {
    let words = parts.iter().flat_map(|part| part.chunks(2));
    let sum: u32 = words.map(|word| u32::from(word[0]) << 8 | u32::from(word[1])).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !u16::try_from((folded & 0xffff) + (folded >> 16)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use forebay_rx::parse::{Checksum, Link, Verify, parse};

    use super::*;

    #[test]
    fn segments_are_valid_and_in_order() {
        let [first, second] = [frame(3, 0), frame(3, 1)];
        for frame in [&first, &second] {
            let len = u32::try_from(frame.len()).unwrap();
            let headers = parse(frame, len, Link::Ethernet, Verify::Checksums);
            assert_eq!(headers.l4_checksum, Checksum::Good);
        }
        assert_eq!((&first[38..42], &second[38..42]), (&[0; 4][..], &[0, 0, 5, 0xa8][..]));
        let all = capture(8, 8);
        assert_eq!(all.len(), 24 + 2048 * (16 + first.len()));
    }
}

//! Parser of pcapng blocks: interfaces and packets.

use pcap_parser::nom::IResult;
use pcap_parser::{Block, PcapError, parse_block_be, parse_block_le};

use super::interface::CaptureInterface;
use super::reader::Located;

/// Maximum number of interfaces in a section of a pcapng file.
const MAX_INTERFACES: usize = 65_536;

const INTERFACE_BLOCK: u32 = 1;
/// Type of the packet block that the enhanced one has replaced.
const PACKET_BLOCK: u32 = 2;
/// Offset of the packet in both.
const PACKET_OFFSET: usize = 28;

/// Parses one complete block. Returns the position of its packet, or `None` if the block has none.
pub(super) fn read_block(
    block: &[u8],
    big_endian: &bool,
    interfaces: &mut Vec<CaptureInterface>,
) -> Result<Option<Located>, &'static str> {
    type Parse = fn(&[u8]) -> IResult<&[u8], Block<'_>, PcapError<&[u8]>>;
    let parse: Parse = if *big_endian { parse_block_be } else { parse_block_le };
    let evened = evened(block, *big_endian);
    let block = evened.as_deref().unwrap_or(block);
    let is_interface = block_type(block, *big_endian) == Some(INTERFACE_BLOCK);
    if is_interface && interfaces.len() == MAX_INTERFACES {
        return Err("a section has too many interfaces");
    }
    let Ok((_, parsed)) = parse(block) else {
        if is_interface {
            interfaces.push(CaptureInterface::DAMAGED); // later interfaces keep their numbers
        }
        return Err("a block is damaged");
    };
    match parsed {
        Block::InterfaceDescription(description) => {
            interfaces.push(CaptureInterface::of(&description, *big_endian));
            Ok(None)
        }
        Block::EnhancedPacket(packet) => {
            let times = [packet.ts_high, packet.ts_low];
            let lengths = [packet.caplen, packet.origlen];
            locate(block, interfaces, packet.if_id as usize, (times, lengths)).map(Some)
        }
        Block::SimplePacket(packet) => {
            let interface = interfaces.first().ok_or("a packet comes before any interface")?;
            let caplen = interface.captured(packet.origlen).min(packet.data.len());
            Ok(Some(Located {
                total: block.len(),
                bytes: 12..12 + caplen,
                wire_len: packet.origlen,
                timestamp_ns: 0,
                link_type: interface.link_type,
            }))
        }
        Block::Unknown(_) if block_type(block, *big_endian) == Some(PACKET_BLOCK) => {
            let word = |at| word_at(block, at, *big_endian).ok_or("a block is damaged");
            // The number of the interface is in the first half of its word, and a count of drops in the other.
            let numbers = word(8)?;
            let interface = if *big_endian { numbers >> 16 } else { numbers & 0xffff };
            let fields = ([word(12)?, word(16)?], [word(20)?, word(24)?]);
            locate(block, interfaces, interface as usize, fields).map(Some)
        }
        _ => Ok(None),
    }
}

/// Copy of a block whose lengths, both alike, leave out its padding: with the lengths that it has. `None` for all
/// other blocks.
fn evened(block: &[u8], big_endian: bool) -> Option<Vec<u8>> {
    let end = block.len().checked_sub(4)?;
    let claimed = word_at(block, 4, big_endian)?;
    if claimed as usize == block.len() || word_at(block, end, big_endian)? != claimed {
        return None;
    }
    let total = u32::try_from(block.len()).ok()?;
    let total = if big_endian { total.to_be_bytes() } else { total.to_le_bytes() };
    let mut evened = block.to_vec();
    evened.get_mut(4..8)?.copy_from_slice(&total);
    evened.get_mut(end..)?.copy_from_slice(&total);
    Some(evened)
}

/// Position of the packet of an enhanced block or of one that it has replaced, from both halves of its time, and its
/// lengths, captured and on the wire.
fn locate(
    block: &[u8],
    interfaces: &[CaptureInterface],
    interface: usize,
    ([high, low], [captured, wire_len]): ([u32; 2], [u32; 2]),
) -> Result<Located, &'static str> {
    let interface =
        interfaces.get(interface).ok_or("a packet is of an interface that was not described")?;
    let end = PACKET_OFFSET + captured as usize;
    if end + 4 > block.len() {
        return Err("a packet is longer than its block");
    }
    Ok(Located {
        total: block.len(),
        bytes: PACKET_OFFSET..end,
        wire_len,
        timestamp_ns: interface.timestamp_ns(u64::from(high) << 32 | u64::from(low)),
        link_type: interface.link_type,
    })
}

fn block_type(block: &[u8], big_endian: bool) -> Option<u32> {
    word_at(block, 0, big_endian)
}

fn word_at(block: &[u8], at: usize, big_endian: bool) -> Option<u32> {
    let bytes = block.get(at..)?.first_chunk().copied()?;
    Some(if big_endian { u32::from_be_bytes(bytes) } else { u32::from_le_bytes(bytes) })
}

//! Parser of pcapng blocks: interfaces and packets.

use pcap_parser::nom::IResult;
use pcap_parser::{Block, PcapError, parse_block_be, parse_block_le};

use super::interface::CaptureInterface;
use super::reader::Located;

/// Maximum number of interfaces in a section of a pcapng file.
const MAX_INTERFACES: usize = 65_536;

const INTERFACE_BLOCK: u32 = 1;
/// Type of the obsolete packet block.
const PACKET_BLOCK: u32 = 2;

/// Parses one complete block. Returns the position of its packet, or `None` if the block has none.
pub(super) fn read_block(
    block: &[u8],
    big_endian: &bool,
    interfaces: &mut Vec<CaptureInterface>,
) -> Result<Option<Located>, &'static str> {
    type Parse = fn(&[u8]) -> IResult<&[u8], Block<'_>, PcapError<&[u8]>>;
    let parse: Parse = if *big_endian { parse_block_be } else { parse_block_le };
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
            let interface = interfaces
                .get(packet.if_id as usize)
                .ok_or("a packet is of an interface that was not described")?;
            let end = 28 + packet.caplen as usize;
            if end + 4 > block.len() {
                return Err("a packet is longer than its block");
            }
            let ticks = u64::from(packet.ts_high) << 32 | u64::from(packet.ts_low);
            Ok(Some(Located {
                total: block.len(),
                bytes: 28..end,
                wire_len: packet.origlen,
                timestamp_ns: interface.timestamp_ns(ticks),
                link_type: interface.link_type,
            }))
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
            Err("an obsolete packet block, which is not read")
        }
        _ => Ok(None),
    }
}

fn block_type(block: &[u8], big_endian: bool) -> Option<u32> {
    let bytes = block.first_chunk().copied()?;
    Some(if big_endian { u32::from_be_bytes(bytes) } else { u32::from_le_bytes(bytes) })
}

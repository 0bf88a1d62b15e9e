//! XDP features of an interface, as the kernel's generic netlink family `netdev` reports them.

use std::io;

use netlink_packet_core::{
    DecodeError, DefaultNla, Emitable, NLM_F_ACK, NLM_F_REQUEST, NetlinkDeserializable,
    NetlinkHeader, NetlinkSerializable, Nla, NlasIterator, Parseable,
};
use rustix::net::netlink::GENERIC;

use super::interface::InterfaceIndex;
use super::netlink;

/// True if XDP programs can read an interface's receive hash from its driver. `None` if the kernel
/// does not report it: before Linux 6.3.
///
/// # Errors
/// If the netlink request fails: `ENODEV` if there is no such interface.
pub fn has_rx_hash(interface: InterfaceIndex) -> io::Result<Option<bool>> {
    let Some(family) = family()? else { return Ok(None) };
    let request = Generic::new(family, DEV_GET, DEV_IFINDEX, &interface.0.to_ne_bytes());
    let answers = ask(request)?;
    let metadata = answers.iter().find_map(|answer| answer.number(DEV_XDP_RX_METADATA_FEATURES));
    Ok(metadata.map(|metadata| metadata & RX_METADATA_HASH != 0))
}

// linux/netdev.h
const FAMILY: &[u8] = b"netdev\0";
const DEV_GET: u8 = 1;
const DEV_IFINDEX: u16 = 1;
const DEV_XDP_RX_METADATA_FEATURES: u16 = 5;
/// Bit of `enum netdev_xdp_rx_metadata`.
const RX_METADATA_HASH: u64 = 1 << 1;

// linux/genetlink.h
const ID_CTRL: u16 = 0x10;
const CTRL_GETFAMILY: u8 = 3;
const CTRL_FAMILY_ID: u16 = 1;
const CTRL_FAMILY_NAME: u16 = 2;
const GENERIC_VERSION: u8 = 1;
const GENERIC_HEADER_BYTES: usize = 4;

/// Number of the family on this kernel; `None` if it has no such family.
fn family() -> io::Result<Option<u16>> {
    match ask(Generic::new(ID_CTRL, CTRL_GETFAMILY, CTRL_FAMILY_NAME, FAMILY)) {
        Ok(answers) => {
            let number = answers.iter().find_map(|answer| answer.number(CTRL_FAMILY_ID));
            Ok(number.and_then(|number| u16::try_from(number).ok()))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn ask(request: Generic) -> io::Result<Vec<Generic>> {
    let mut answers = Vec::new();
    netlink::exchange(Some(GENERIC), request, NLM_F_REQUEST | NLM_F_ACK, &mut answers)?;
    Ok(answers)
}

/// Message of generic netlink.
struct Generic {
    family: u16,
    command: u8,
    attributes: Vec<DefaultNla>,
}

impl Generic {
    fn new(family: u16, command: u8, kind: u16, value: &[u8]) -> Self {
        let attributes = vec![DefaultNla::new(kind, value.to_vec())];
        Self { family, command, attributes }
    }

    /// Value of an attribute that is a number of two, four or eight bytes.
    fn number(&self, kind: u16) -> Option<u64> {
        let attribute = self.attributes.iter().find(|attribute| attribute.kind() == kind)?;
        let mut value = vec![0; attribute.value_len()];
        attribute.emit_value(&mut value);
        match *value.as_slice() {
            [a, b] => Some(u16::from_ne_bytes([a, b]).into()),
            [a, b, c, d] => Some(u32::from_ne_bytes([a, b, c, d]).into()),
            ref eight => Some(u64::from_ne_bytes(eight.try_into().ok()?)),
        }
    }
}

impl NetlinkSerializable for Generic {
    fn message_type(&self) -> u16 {
        self.family
    }

    fn buffer_len(&self) -> usize {
        GENERIC_HEADER_BYTES + self.attributes.as_slice().buffer_len()
    }

    fn serialize(&self, buffer: &mut [u8]) {
        let Some((header, attributes)) = buffer.split_first_chunk_mut() else { return };
        *header = [self.command, GENERIC_VERSION, 0, 0];
        self.attributes.as_slice().emit(attributes);
    }
}

impl NetlinkDeserializable for Generic {
    type Error = DecodeError;

    fn deserialize(header: &NetlinkHeader, payload: &[u8]) -> Result<Self, DecodeError> {
        let (&[command, ..], attributes) = payload
            .split_first_chunk::<GENERIC_HEADER_BYTES>()
            .ok_or_else(|| DecodeError::from("a message of generic netlink without its header"))?;
        let attributes = NlasIterator::new(attributes)
            .map(|attribute| DefaultNla::parse(&attribute?))
            .collect::<Result<_, _>>()?;
        Ok(Self { family: header.message_type, command, attributes })
    }
}

//! Messages of generic netlink, and the families that they go to.

use std::io;

use netlink_packet_core::{
    DecodeError, DefaultNla, Emitable, NLA_F_NESTED, NLA_TYPE_MASK, NLM_F_ACK, NLM_F_REQUEST,
    NetlinkDeserializable, NetlinkHeader, NetlinkSerializable, Nla, NlasIterator, Parseable,
};
use rustix::net::netlink::GENERIC;

use super::netlink;

// linux/genetlink.h
const ID_CTRL: u16 = 0x10;
const CTRL_GETFAMILY: u8 = 3;
const CTRL_FAMILY_ID: u16 = 1;
const CTRL_FAMILY_NAME: u16 = 2;
const GENERIC_VERSION: u8 = 1;
const GENERIC_HEADER_BYTES: usize = 4;

/// Number of a family on this kernel; `None` if it has no such family. The name ends with a NUL.
pub(super) fn family(name: &[u8]) -> io::Result<Option<u16>> {
    match ask(Generic::new(ID_CTRL, CTRL_GETFAMILY, CTRL_FAMILY_NAME, name)) {
        Ok(answers) => {
            let number = answers.iter().find_map(|answer| answer.number(CTRL_FAMILY_ID));
            Ok(number.and_then(|number| u16::try_from(number).ok()))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Sends one request, and returns the family's answers.
///
/// # Errors
/// The kernel's error.
pub(super) fn ask(request: Generic) -> io::Result<Vec<Generic>> {
    let mut answers = Vec::new();
    netlink::exchange(Some(GENERIC), request, NLM_F_REQUEST | NLM_F_ACK, &mut answers)?;
    Ok(answers)
}

/// Message of generic netlink.
pub(super) struct Generic {
    family: u16,
    command: u8,
    attributes: Vec<DefaultNla>,
}

impl Generic {
    /// Message with one attribute.
    pub(super) fn new(family: u16, command: u8, kind: u16, value: &[u8]) -> Self {
        let attributes = vec![DefaultNla::new(kind, value.to_vec())];
        Self { family, command, attributes }
    }

    /// Value of an attribute.
    pub(super) fn value(&self, kind: u16) -> Option<Vec<u8>> {
        value(&self.attributes, kind)
    }

    /// Value of an attribute that is a number of two, four or eight bytes.
    pub(super) fn number(&self, kind: u16) -> Option<u64> {
        match *self.value(kind)?.as_slice() {
            [a, b] => Some(u16::from_ne_bytes([a, b]).into()),
            [a, b, c, d] => Some(u32::from_ne_bytes([a, b, c, d]).into()),
            ref eight => Some(u64::from_ne_bytes(eight.try_into().ok()?)),
        }
    }
}

/// Kind and value of an attribute that nests others.
pub(super) fn nested(kind: u16, inner: &[DefaultNla]) -> (u16, Vec<u8>) {
    let mut bytes = vec![0; inner.buffer_len()];
    inner.emit(&mut bytes);
    (kind | NLA_F_NESTED, bytes)
}

/// Attributes in the value of one that nests them; those before the first that is malformed.
pub(super) fn inner(bytes: &[u8]) -> Vec<DefaultNla> {
    let parsed = NlasIterator::new(bytes)
        .map_while(|attribute| attribute.ok().and_then(|it| DefaultNla::parse(&it).ok()));
    parsed.collect()
}

/// Value of the first attribute of a kind.
pub(super) fn value(attributes: &[DefaultNla], kind: u16) -> Option<Vec<u8>> {
    let is_it = |attribute: &&DefaultNla| attribute.kind() & NLA_TYPE_MASK == kind;
    attributes.iter().find(is_it).map(value_of)
}

/// Value of an attribute.
pub(super) fn value_of(attribute: &DefaultNla) -> Vec<u8> {
    let mut value = vec![0; attribute.value_len()];
    attribute.emit_value(&mut value);
    value
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

/// Text of a value that is a string; a NUL ends it.
pub(super) fn text(value: &[u8]) -> String {
    let bytes = value.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(bytes).into_owned()
}

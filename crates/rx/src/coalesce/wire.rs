//! Header sizes and TCP flags.

pub(super) const FIN: u8 = 0x01;
pub(super) const SYN: u8 = 0x02;
pub(super) const RST: u8 = 0x04;
pub(super) const PSH: u8 = 0x08;
pub(super) const ACK: u8 = 0x10;
pub(super) const URG: u8 = 0x20;
pub(super) const CWR: u8 = 0x80;

pub(super) const IPV4_BYTES: usize = 20;
pub(super) const IPV6_BYTES: usize = 40;
pub(super) const TCP_BYTES: usize = 20;
pub(super) const UDP_BYTES: usize = 8;

/// Valid but non-canonical checksum of IPv4 and TCP: a computed zero is sent as 0, so 0xffff could
/// not be restored and is not merged.
pub(super) const ODD_CHECKSUM: [u8; 2] = [0xff; 2];

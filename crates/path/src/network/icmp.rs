//! ICMP and ICMPv6.

/// ICMP's protocol number.
pub(super) const ICMP: u8 = 1;
/// ICMPv6's.
pub(super) const ICMPV6: u8 = 58;

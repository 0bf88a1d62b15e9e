//! The two ends of a connection.

use std::net::SocketAddr;

/// Addresses and ports of a connection, of one family.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Flow {
    /// Address and port of this host.
    pub ours: SocketAddr,
    /// Address and port of the peer.
    pub theirs: SocketAddr,
}

impl Flow {
    /// True over IPv6.
    #[must_use]
    pub fn is_ipv6(&self) -> bool {
        self.theirs.is_ipv6()
    }

    /// Bytes of the IP and TCP headers without options.
    pub(super) fn header_bytes(&self) -> u32 {
        if self.is_ipv6() { 60 } else { 40 }
    }
}

//! TCP Fast Open (RFC 7413): data in a SYN, by a cookie that proves the sender's address (`tcp_fastopen.c`).

mod cookie; // cookies, and the keys that a server makes them with
mod cache; //  cookies that servers gave this host

use std::hash::Hasher;
use std::net::IpAddr;

pub use cache::FastOpenCache;
pub(super) use cache::{Refused, Server};
pub use cookie::FastOpenKeys;
pub(super) use cookie::{Cookie, CookieMatch, CookieOption};
use siphasher::sip::SipHasher24;

use super::config::SECOND;

/// Sides of Fast Open that are on (`tcp_fastopen`, in its bits).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FastOpen(pub u32);

impl FastOpen {
    /// Clients may send data in their SYN, once they ask for it.
    pub const CLIENT: Self = Self(0x1);
    /// Listeners accept data in a SYN, if they have a [queue](FastOpenOptions::queue) for it.
    pub const SERVER: Self = Self(0x2);
    /// Clients send data without a cookie, too.
    pub const CLIENT_NO_COOKIE: Self = Self(0x4);
    /// Listeners accept data without a cookie, too: the address of the sender may be false.
    pub const SERVER_NO_COOKIE: Self = Self(0x200);
    /// Listeners that set no queue have one as long as their backlog.
    pub const ALL_LISTENERS: Self = Self(0x400);

    /// True if all bits of `other` are set.
    #[must_use]
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Union with `other`.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// Fast Open of one socket.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct FastOpenOptions {
    /// Connections of a listener that began with their SYN and whose handshake is not over, at most; 0 for none
    /// (`TCP_FASTOPEN`). Beyond it a SYN begins an ordinary handshake.
    pub queue: u32,
    /// No cookie is needed to or from this socket (`TCP_FASTOPEN_NO_COOKIE`).
    pub no_cookie: bool,
    /// A client's SYN waits for the first write, if the server's cookie is known (`TCP_FASTOPEN_CONNECT`).
    pub waits_for_data: bool,
    /// Keys of a listener instead of those of the host (`TCP_FASTOPEN_KEY`).
    pub keys: Option<FastOpenKeys>,
}

/// Keyed hash of the addresses of two hosts.
fn address_hash(key: &[u8; 16], first: IpAddr, second: IpAddr) -> u64 {
    let mut hasher = SipHasher24::new_with_key(key);
    for address in [first, second] {
        match address {
            IpAddr::V4(address) => hasher.write(&address.octets()),
            IpAddr::V6(address) => hasher.write(&address.octets()),
        }
    }
    hasher.finish()
}

/// Second of the clock that a time is in, modulo 2^32.
pub(super) fn clock_second(now_us: u64) -> u32 {
    u32::try_from((now_us / SECOND) & u64::from(u32::MAX)).unwrap_or(0)
}

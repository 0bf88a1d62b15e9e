//! Cookies: keyed hashes of both addresses. Only a host that receives at the client's address learns its cookie.

use std::fmt;
use std::net::IpAddr;

use super::address_hash;

/// Bytes of a cookie at most, and of one at least (RFC 7413, section 4.1.1).
pub(super) const COOKIE_BYTES_MAX: usize = 16;
const COOKIE_BYTES_MIN: usize = 4;

/// A cookie as a header has it. Without bytes, it asks for one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::tcp) struct Cookie {
    pub(super) bytes: [u8; COOKIE_BYTES_MAX],
    pub(super) len: u8,
}

/// Option of a SYN or a SYN-ACK.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::tcp) struct CookieOption {
    pub(in crate::tcp) cookie: Cookie,
    /// True in the form before RFC 7413, of the experimental options (RFC 6994).
    pub(in crate::tcp) is_experimental: bool,
}

impl CookieOption {
    /// Asks for a cookie as RFC 7413 does.
    pub(in crate::tcp) const STANDARD_REQUEST: Self =
        Self { cookie: Cookie::REQUEST, is_experimental: false };
}

impl Cookie {
    /// Asks for a cookie.
    pub(in crate::tcp) const REQUEST: Self = Self { bytes: [0; COOKIE_BYTES_MAX], len: 0 };

    /// The value of an option; `None` of a length that no cookie has.
    pub(in crate::tcp) fn of(value: &[u8]) -> Option<Self> {
        let is_possible = (COOKIE_BYTES_MIN..=COOKIE_BYTES_MAX).contains(&value.len());
        if !value.len().is_multiple_of(2) || !(value.is_empty() || is_possible) {
            return None;
        }
        let mut cookie = Self { len: u8::try_from(value.len()).ok()?, ..Self::REQUEST };
        cookie.bytes.get_mut(..value.len())?.copy_from_slice(value);
        Some(cookie)
    }

    pub(in crate::tcp) fn as_slice(&self) -> &[u8] {
        self.bytes.get(..usize::from(self.len)).unwrap_or_default()
    }

    pub(in crate::tcp) fn is_request(&self) -> bool {
        self.len == 0
    }
}

/// Keys of a server's cookies (`tcp_fastopen_key`). Cookies of the second key, which was the first one before, are
/// valid, too, and are answered by one of the first.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct FastOpenKeys {
    /// Key of new cookies.
    pub primary: [u8; 16],
    /// Key of older cookies.
    pub backup: Option<[u8; 16]>,
}

impl fmt::Debug for FastOpenKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FastOpenKeys")
    }
}

/// Outcome of looking at a client's cookie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::tcp) enum CookieMatch {
    Primary,
    Backup,
    Neither,
}

impl FastOpenKeys {
    /// Cookie of a client's address at a server's.
    pub(in crate::tcp) fn cookie(&self, client: IpAddr, server: IpAddr) -> Cookie {
        cookie_by(&self.primary, client, server)
    }

    pub(in crate::tcp) fn check(
        &self,
        cookie: &Cookie,
        client: IpAddr,
        server: IpAddr,
    ) -> CookieMatch {
        if *cookie == self.cookie(client, server) {
            return CookieMatch::Primary;
        }
        match &self.backup {
            Some(backup) if *cookie == cookie_by(backup, client, server) => CookieMatch::Backup,
            _ => CookieMatch::Neither,
        }
    }
}

/// Cookie that one key makes (`__tcp_fastopen_cookie_gen_cipher`).
fn cookie_by(key: &[u8; 16], client: IpAddr, server: IpAddr) -> Cookie {
    let hash = address_hash(key, client, server).to_le_bytes();
    let mut bytes = [0; COOKIE_BYTES_MAX];
    bytes[..hash.len()].copy_from_slice(&hash);
    Cookie { bytes, len: 8 }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: [u8; 16] = [
        0xa1, 0xa1, 0xa1, 0xa1, 0xb2, 0xb2, 0xb2, 0xb2, 0xc3, 0xc3, 0xc3, 0xc3, 0xd4, 0xd4, 0xd4,
        0xd4,
    ];

    fn keys(primary: [u8; 16], backup: Option<[u8; 16]>) -> FastOpenKeys {
        FastOpenKeys { primary, backup }
    }

    /// The values are those that Linux 6.18 sends with this key.
    #[test]
    fn tcp_49_cookies_are_the_kernels() {
        let keys = keys(KEY, None);
        let v4 = keys.cookie("192.0.2.1".parse().unwrap(), "192.168.0.1".parse().unwrap());
        assert_eq!(v4.as_slice(), 0x3021_b9d8_8901_7eeb_u64.to_be_bytes());
        let (client, server) = ("fd3d:fa7b:d17d::1", "fd3d:a0b:17d6::1");
        let v6 = keys.cookie(client.parse().unwrap(), server.parse().unwrap());
        assert_eq!(v6.as_slice(), 0xc1d1_e974_2a47_a9bc_u64.to_be_bytes());
    }

    #[test]
    fn tcp_49_cookie_of_older_key_matches() {
        let (client, server) = ("192.0.2.1".parse().unwrap(), "192.0.2.2".parse().unwrap());
        let (old, new) = (keys(KEY, None), keys([7; 16], Some(KEY)));
        let cookie = old.cookie(client, server);
        assert_eq!(old.check(&cookie, client, server), CookieMatch::Primary);
        assert_eq!(new.check(&cookie, client, server), CookieMatch::Backup);
        assert_eq!(keys([7; 16], None).check(&cookie, client, server), CookieMatch::Neither);
        assert_eq!(old.check(&cookie, server, client), CookieMatch::Neither, "other way round");
        assert_eq!(old.check(&Cookie::REQUEST, client, server), CookieMatch::Neither);
    }

    #[test]
    fn tcp_49_only_lengths_of_cookies_are_read() {
        for len in 0..=20_usize {
            let is_cookie = matches!(len, 0 | 4 | 6 | 8 | 10 | 12 | 14 | 16);
            let cookie = Cookie::of(&[1; 20][..len]);
            assert_eq!(cookie.is_some(), is_cookie, "{len} bytes");
            assert!(cookie.is_none_or(|cookie| cookie.as_slice() == &[1; 20][..len]));
        }
    }
}

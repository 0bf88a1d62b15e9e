//! Extension headers of IPv6 (RFC 8200, section 4): one walk for parsing, coalescing, reassembly,
//! the host and the rx filter. Each user decides which kinds to follow, and which errors to report.

/// Hop-by-hop options (RFC 8200, section 4.3).
pub const HOP_BY_HOP: u8 = 0;
/// Routing header (RFC 8200, section 4.4).
pub const ROUTING: u8 = 43;
/// Fragment header (RFC 8200, section 4.5).
pub const FRAGMENT: u8 = 44;
/// Authentication header (RFC 4302), whose length counts four bytes a unit.
pub const AUTHENTICATION: u8 = 51;
/// No next header (RFC 8200, section 4.7): nothing follows.
pub const NO_NEXT_HEADER: u8 = 59;
/// Destination options (RFC 8200, section 4.6).
pub const DESTINATION_OPTIONS: u8 = 60;
const MOBILITY: u8 = 135;
const HOST_IDENTITY: u8 = 139;
const SHIM6: u8 = 140;

/// Length of a fragment header, and minimum length of any extension header.
pub const EXTENSION_BYTES: usize = 8;

/// Position in the chain of headers: initially behind the fixed header, finally at the transport
/// header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExtensionWalk {
    /// Kind of the current header: the "next header" field of the one before.
    pub kind: u8,
    /// Offset of the current header.
    pub at: usize,
}

impl ExtensionWalk {
    /// True if the current header is an extension header of a kind that has a length.
    #[inline]
    #[must_use]
    pub fn is_extension(self) -> bool {
        matches!(
            self.kind,
            HOP_BY_HOP
                | ROUTING
                | FRAGMENT
                | AUTHENTICATION
                | DESTINATION_OPTIONS
                | MOBILITY
                | HOST_IDENTITY
                | SHIM6
        )
    }

    /// Moves past the current header, which begins with these bytes: kind of the next header, and
    /// own length.
    #[inline]
    pub fn pass(&mut self, [next, len]: [u8; 2]) {
        debug_assert!(self.is_extension(), "a transport header has no length to pass by");
        let len = usize::from(len);
        self.at += match self.kind {
            FRAGMENT => EXTENSION_BYTES,
            AUTHENTICATION => (len + 2) * 4,
            _ => (len + 1) * 8,
        };
        self.kind = next;
    }

    /// Moves past the current header and returns it, if all of it is in `bytes`.
    pub fn take<'a>(&mut self, bytes: &'a [u8]) -> Option<&'a [u8]> {
        let mut behind = *self;
        behind.pass(*bytes.get(self.at..)?.first_chunk()?);
        let header = bytes.get(self.at..behind.at)?;
        *self = behind;
        Some(header)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn walk_passes_by_length_of_kind() {
        let lengths = [(HOP_BY_HOP, 24), (ROUTING, 24), (FRAGMENT, 8), (AUTHENTICATION, 16)];
        for (kind, len) in lengths {
            let mut walk = ExtensionWalk { kind, at: 40 };
            walk.pass([6, 2]);
            assert_eq!(walk, ExtensionWalk { kind: 6, at: 40 + len });
            assert!(!walk.is_extension());
        }
    }

    #[test]
    fn incomplete_header_is_not_taken() {
        let bytes = [6, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        for len in 0..=bytes.len() {
            let begin = ExtensionWalk { kind: DESTINATION_OPTIONS, at: 0 };
            let mut walk = begin;
            let taken = walk.take(&bytes[..len]);
            assert_eq!(taken.is_some(), len == 16, "{len}");
            assert_eq!(walk == begin, len < 16, "{len}");
        }
    }
}

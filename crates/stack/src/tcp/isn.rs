//! Values that nobody can guess, made with a secret: initial sequence numbers (RFC 6528), timestamp offsets, SYN cookies,
//! local ports.

use std::hash::Hasher;
use std::net::SocketAddr;

use siphasher::sip::SipHasher24;

use super::fast_open::FastOpenKeys;
use super::flow::Flow;
use super::seq::Seq;

/// Segment sizes that a cookie can name (`msstab`).
const COOKIE_MSS: [[u16; 4]; 2] = [[536, 1300, 1440, 1460], [1220, 1360, 1420, 1440]];
/// Time after which a cookie's counter advances, in µs (`TCP_SYNCOOKIE_PERIOD`).
const COOKIE_PERIOD_US: u64 = 60_000_000;
/// Counters during which a cookie is valid (`MAX_SYNCOOKIE_AGE`).
const COOKIE_PERIODS: u32 = 2;
/// Bits of a cookie that hold the segment size's index; the counter is above.
const COOKIE_BITS: u32 = 24;
/// Bits of an echoed timestamp that hold a cookie's options: scale, SACK, ECN.
const TIMESTAMP_BITS: u32 = 6;

/// Key of everything that a stranger must not guess.
#[derive(Clone, Copy)]
pub(super) struct Secret(pub(super) [u8; 16]);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

/// Purposes of the key, so that no value reveals another.
#[derive(Clone, Copy)]
enum Purpose {
    Sequence = 1,
    Timestamp,
    Port,
    CookieBase,
    CookieCounter,
    Syn,
    FastOpen,
}

/// Options that a SYN cookie carries in the timestamp (`cookie_init_timestamp`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct CookieOptions {
    /// Shift of the peer's window; `None` without scaling.
    pub(super) window_scale: Option<u8>,
    pub(super) sack: bool,
    pub(super) ecn: bool,
}

impl Secret {
    fn hash(&self, purpose: Purpose, flow: &Flow, extra: u32) -> u64 {
        let mut hasher = SipHasher24::new_with_key(&self.0);
        hasher.write_u8(purpose as u8);
        for address in [flow.ours, flow.theirs] {
            match address {
                SocketAddr::V4(address) => hasher.write(&address.ip().octets()),
                SocketAddr::V6(address) => hasher.write(&address.ip().octets()),
            }
            hasher.write_u16(address.port());
        }
        hasher.write_u32(extra);
        hasher.finish()
    }

    /// Initial sequence number: advances by one each 64 ns, as the kernel's.
    pub(super) fn initial_sequence(&self, flow: &Flow, now_us: u64) -> Seq {
        Seq(low(self.hash(Purpose::Sequence, flow, 0))) + low(now_us.wrapping_mul(1000) >> 6)
    }

    /// Offset of a flow's timestamps.
    pub(super) fn timestamp_offset(&self, flow: &Flow) -> u32 {
        low(self.hash(Purpose::Timestamp, flow, 0))
    }

    /// First local port to try towards a peer (RFC 6056, algorithm 3), as a number to be reduced.
    pub(super) fn port_offset(&self, flow: &Flow) -> u32 {
        low(self.hash(Purpose::Port, flow, 0))
    }

    /// Hash by which a SYN is recognized that comes again.
    pub(super) fn syn_hash(&self, flow: &Flow, sequence: Seq) -> u64 {
        self.hash(Purpose::Syn, flow, sequence.0)
    }

    /// Key of Fast Open cookies.
    pub(super) fn fast_open_keys(&self) -> FastOpenKeys {
        let half = |part: u8| {
            let mut hasher = SipHasher24::new_with_key(&self.0);
            hasher.write(&[Purpose::FastOpen as u8, part]);
            hasher.finish().to_le_bytes()
        };
        let mut primary = [0; 16];
        primary[..8].copy_from_slice(&half(0));
        primary[8..].copy_from_slice(&half(1));
        FastOpenKeys { primary, backup: None }
    }

    /// Sequence number of a SYN-ACK that alone says what its connection is. As `secure_tcp_syn_cookie`, but the peer's number
    /// is hashed instead of added: a later segment of the connection, whose numbers have both advanced, is not taken for its
    /// first one.
    pub(super) fn cookie(&self, flow: &Flow, theirs: Seq, mss: u16, now_us: u64) -> Seq {
        let table = &COOKIE_MSS[usize::from(flow.is_ipv6())];
        let index = table.iter().rposition(|&entry| entry <= mss).unwrap_or(0);
        let counter = counter(now_us);
        let second = low(self.hash(Purpose::CookieCounter, flow, counter));
        let base = low(self.hash(Purpose::CookieBase, flow, theirs.0));
        let data = second.wrapping_add(low(index as u64)) & ((1 << COOKIE_BITS) - 1);
        Seq(base.wrapping_add(counter << COOKIE_BITS).wrapping_add(data))
    }

    /// Segment size that a valid cookie names; `None` of an old or forged one.
    pub(super) fn check_cookie(
        &self,
        flow: &Flow,
        cookie: Seq,
        theirs: Seq,
        now_us: u64,
    ) -> Option<u16> {
        let base = low(self.hash(Purpose::CookieBase, flow, theirs.0));
        let left = cookie.0.wrapping_sub(base);
        let now = counter(now_us);
        let age = now.wrapping_sub(left >> COOKIE_BITS) & (u32::MAX >> COOKIE_BITS);
        if age >= COOKIE_PERIODS {
            return None;
        }
        let second = low(self.hash(Purpose::CookieCounter, flow, now.wrapping_sub(age)));
        let index = left.wrapping_sub(second) & ((1 << COOKIE_BITS) - 1);
        COOKIE_MSS[usize::from(flow.is_ipv6())].get(index as usize).copied()
    }
}

impl CookieOptions {
    /// Timestamp at or before `now` whose low bits say the options.
    pub(super) fn into_timestamp(self, now: u32) -> u32 {
        let scale = u32::from(self.window_scale.map_or(0xf, |scale| scale.min(14)));
        let bits = scale | u32::from(self.sack) << 4 | u32::from(self.ecn) << 5;
        let stamp = now >> TIMESTAMP_BITS << TIMESTAMP_BITS | bits;
        if stamp > now { stamp.wrapping_sub(1 << TIMESTAMP_BITS) } else { stamp }
    }

    /// Options that an echoed timestamp says.
    pub(super) fn of_timestamp(stamp: u32) -> Self {
        let scale = stamp & 0xf;
        Self {
            window_scale: u8::try_from(scale).ok().filter(|&scale| scale < 0xf),
            sack: stamp & 0x10 != 0,
            ecn: stamp & 0x20 != 0,
        }
    }
}

fn counter(now_us: u64) -> u32 {
    low(now_us / COOKIE_PERIOD_US)
}

fn low(value: u64) -> u32 {
    u32::try_from(value & u64::from(u32::MAX)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn flow(port: u16) -> Flow {
        Flow {
            ours: "192.0.2.1:80".parse().unwrap(),
            theirs: SocketAddr::new("198.51.100.7".parse().unwrap(), port),
        }
    }

    proptest! {
        #[test]
        fn tcp_3_cookie_returns_the_segment_size(
            key: [u8; 16], port: u16, theirs: u32, mss: u16, now in 0_u64..1 << 50,
            later in 0_u64..60_000_000,
        ) {
            let secret = Secret(key);
            let cookie = secret.cookie(&flow(port), Seq(theirs), mss, now);
            let said = secret.check_cookie(&flow(port), cookie, Seq(theirs), now + later);
            let expected = COOKIE_MSS[0].iter().rev().find(|&&entry| entry <= mss).or(COOKIE_MSS[0].first());
            prop_assert_eq!(said, expected.copied());
            let old = now + 3 * COOKIE_PERIOD_US;
            prop_assert_eq!(secret.check_cookie(&flow(port), cookie, Seq(theirs), old), None);
        }

        #[test]
        fn tcp_3_timestamp_carries_options(now: u32, scale in prop::option::of(0_u8..15), sack: bool, ecn: bool) {
            let options = CookieOptions { window_scale: scale, sack, ecn };
            let stamp = options.into_timestamp(now);
            prop_assert_eq!(CookieOptions::of_timestamp(stamp), options);
            prop_assert!(now.wrapping_sub(stamp) < 128);
        }
    }

    #[test]
    fn tcp_3_forged_cookies_are_refused() {
        let secret = Secret([7; 16]);
        let cookie = secret.cookie(&flow(9), Seq(5), 1460, 0);
        let forged = (1..100_000_u32)
            .filter(|&off| secret.check_cookie(&flow(9), cookie + off * 43, Seq(5), 0).is_some());
        assert!(forged.count() <= 4, "one of 2^22 guesses may pass");
    }

    #[test]
    fn tcp_3_later_segments_confirm_no_cookie() {
        let secret = Secret([7; 16]);
        let cookie = secret.cookie(&flow(9), Seq(5), 1460, 0);
        let later = (0..20).flat_map(|sent| (1..20).map(move |received| (sent, received)));
        for (sent, received) in later {
            let said = secret.check_cookie(&flow(9), cookie + sent, Seq(5 + received), 0);
            assert_eq!(said, None, "{sent} bytes of ours, {received} of the peer's");
        }
    }

    #[test]
    fn tcp_3_sequence_depends_on_flow_and_time() {
        let secret = Secret([7; 16]);
        let first = secret.initial_sequence(&flow(1), 0);
        assert_ne!(first, secret.initial_sequence(&flow(2), 0));
        assert_eq!(secret.initial_sequence(&flow(1), 64) - first, 1000);
        assert_ne!(first, Secret([8; 16]).initial_sequence(&flow(1), 0));
    }
}

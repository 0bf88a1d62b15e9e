//! Cookies that servers gave this host, in a cache that all shards share (`tcp_metrics.c`). No access waits: a reader
//! takes an entry that another thread is writing for an empty one.

use std::fmt;
use std::hash::Hasher;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use siphasher::sip::SipHasher24;

use super::super::flow::Flow;
use super::cookie::{COOKIE_BYTES_MAX, Cookie, CookieOption};
use super::{address_hash, clock_second};

/// Pairs of addresses that are remembered, at most; one more replaces that of its set that was learned first.
pub(super) const ENTRIES_MAX: usize = 1024;
const WAYS: usize = 4;
/// Doublings of the pause after a black hole, at most.
const MAX_DOUBLINGS: u32 = 6;

/// Facts about servers: their cookies, and segment sizes.
pub struct FastOpenCache {
    secret: [u8; 16],
    /// None before the first fact.
    entries: OnceLock<Box<[Entry]>>,
    /// Times that a path swallowed SYNs with data, and the last such time, in µs.
    black_holes: AtomicU32,
    black_hole_us: AtomicU64,
}

/// Facts about one server in words: a hash of the addresses, the cookie, the rest, and a hash of those by which a torn
/// entry is told.
#[derive(Debug, Default)]
struct Entry([AtomicU64; WORDS]);

const WORDS: usize = 5;

/// Facts about one server.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(in crate::tcp) struct Server {
    /// Segment size that it announced last.
    pub(in crate::tcp) mss: Option<u16>,
    pub(in crate::tcp) cookie: Option<CookieOption>,
    /// Forms in which a request for a cookie was not answered (`try_exp`).
    pub(in crate::tcp) refused: Refused,
    /// Time of this, in s modulo 2^32.
    learned_s: u32,
}

/// Forms of the option in which a request for a cookie was not answered.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub(in crate::tcp) enum Refused {
    #[default]
    Neither,
    Standard,
    Both,
}

impl FastOpenCache {
    /// Creates an empty cache. `secret` must be random.
    #[must_use]
    pub fn new(secret: [u8; 16]) -> Self {
        Self {
            secret,
            entries: OnceLock::new(),
            black_holes: AtomicU32::new(0),
            black_hole_us: AtomicU64::new(0),
        }
    }

    /// Facts about the server of a flow.
    pub(in crate::tcp) fn find(&self, flow: &Flow) -> Option<Server> {
        let (key, set) = (self.entry_key(flow), self.entries.get()?);
        let set = set.get(set_of(key)..)?.get(..WAYS)?;
        set.iter().find_map(|entry| self.load(entry, Some(key)))
    }

    /// Notes what a SYN-ACK told: the segment size, and the cookie or its absence (`tcp_fastopen_cache_set`).
    pub(in crate::tcp) fn learn(
        &self,
        flow: &Flow,
        mss: Option<u16>,
        cookie: Option<CookieOption>,
        refused: Refused,
        now_us: u64,
    ) {
        let key = self.entry_key(flow);
        let entries = self
            .entries
            .get_or_init(|| std::iter::repeat_with(Entry::default).take(ENTRIES_MAX).collect());
        let Some(set) = entries.get(set_of(key)..).and_then(|set| set.get(..WAYS)) else { return };
        let known = set.iter().find_map(|entry| Some((entry, self.load(entry, Some(key))?)));
        let (entry, mut server) = match known {
            Some(known) => known,
            None => {
                let age = |entry: &Entry| {
                    let learned_s = self.load(entry, None).map(|server| server.learned_s);
                    learned_s.map_or(u32::MAX, |at_s| clock_second(now_us).wrapping_sub(at_s))
                };
                let Some(oldest) = set.iter().max_by_key(|entry| age(entry)) else { return };
                (oldest, Server::default())
            }
        };
        server.mss = mss.or(server.mss);
        if cookie.is_some() {
            server.cookie = cookie;
        } else if server.cookie.is_none() {
            server.refused = server.refused.max(refused);
        }
        server.learned_s = clock_second(now_us);
        let words = server.words(key);
        let check = self.check_of(&words);
        for (place, word) in entry.0.iter().zip(words.into_iter().chain([check])) {
            place.store(word, Ordering::Relaxed);
        }
    }

    /// Facts of an entry; `None` if it is empty, torn, or of another key.
    fn load(&self, Entry(places): &Entry, key: Option<u64>) -> Option<Server> {
        let [of, c0, c1, rest, check] = places.each_ref().map(|word| word.load(Ordering::Relaxed));
        let is_it = key.is_none_or(|key| key == of) && rest != 0;
        (is_it && check == self.check_of(&[of, c0, c1, rest])).then(|| Server::of([c0, c1, rest]))
    }

    /// Key of the entry for the server of a flow.
    fn entry_key(&self, flow: &Flow) -> u64 {
        address_hash(&self.secret, flow.ours.ip(), flow.theirs.ip())
    }

    fn check_of(&self, words: &[u64; WORDS - 1]) -> u64 {
        let mut hasher = SipHasher24::new_with_key(&self.secret);
        words.iter().for_each(|word| hasher.write_u64(*word));
        hasher.finish()
    }

    /// Notes a path that swallows SYNs with data (`tcp_fastopen_active_disable`).
    pub(in crate::tcp) fn note_black_hole(&self, now_us: u64) {
        self.black_hole_us.store(now_us, Ordering::Relaxed);
        self.black_holes.fetch_add(1, Ordering::Relaxed);
    }

    /// True for a while after that: twice as long each time, from `timeout_us` on.
    pub(in crate::tcp) fn pauses(&self, timeout_us: u64, now_us: u64) -> bool {
        let times = self.black_holes.load(Ordering::Relaxed);
        if timeout_us == 0 || times == 0 {
            return false;
        }
        let wait_us = timeout_us << (times - 1).min(MAX_DOUBLINGS);
        now_us < self.black_hole_us.load(Ordering::Relaxed).saturating_add(wait_us)
    }

    /// Forgets black holes: data came through.
    pub(in crate::tcp) fn forget_black_holes(&self) {
        self.black_holes.store(0, Ordering::Relaxed);
    }
}

impl fmt::Debug for FastOpenCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FastOpenCache")
    }
}

impl Server {
    /// Words of an entry, without the last. None of all facts is told by 0.
    fn words(&self, key: u64) -> [u64; WORDS - 1] {
        let cookie = self.cookie.unwrap_or(CookieOption::STANDARD_REQUEST);
        let (first, second) = cookie.cookie.bytes.split_at(8);
        let word = |half: &[u8]| half.first_chunk().map_or(0, |half| u64::from_ne_bytes(*half));
        let rest = u64::from(self.learned_s)
            | u64::from(self.mss.unwrap_or(0)) << 32
            | u64::from(cookie.cookie.len) << 48
            | u64::from(cookie.is_experimental) << 56
            | (self.refused as u64) << 57
            | 1 << 63;
        [key, word(first), word(second), rest]
    }

    fn of([first, second, rest]: [u64; WORDS - 2]) -> Self {
        let [s0, s1, s2, s3, m0, m1, len, marks] = rest.to_le_bytes();
        let mut bytes = [0; COOKIE_BYTES_MAX];
        bytes[..8].copy_from_slice(&first.to_ne_bytes());
        bytes[8..].copy_from_slice(&second.to_ne_bytes());
        let option =
            CookieOption { cookie: Cookie { bytes, len }, is_experimental: marks & 1 != 0 };
        Self {
            mss: Some(u16::from_le_bytes([m0, m1])).filter(|&mss| mss > 0),
            cookie: (len > 0).then_some(option),
            refused: match marks >> 1 & 3 {
                0 => Refused::Neither,
                1 => Refused::Standard,
                _ => Refused::Both,
            },
            learned_s: u32::from_le_bytes([s0, s1, s2, s3]),
        }
    }
}

/// First entry of the set of a key.
fn set_of(key: u64) -> usize {
    let sets = (ENTRIES_MAX / WAYS) as u64;
    usize::try_from(key % sets).unwrap_or(0) * WAYS
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(host: u32) -> Flow {
        Flow {
            ours: "192.0.2.1:40000".parse().unwrap(),
            theirs: (std::net::Ipv4Addr::from(host), 80).into(),
        }
    }

    fn cookie(byte: u8) -> Option<CookieOption> {
        let cookie = Cookie::of(&[byte; 12])?;
        Some(CookieOption { cookie, is_experimental: byte.is_multiple_of(2) })
    }

    #[test]
    fn tcp_50_cache_keeps_what_was_learned() {
        let cache = FastOpenCache::new([3; 16]);
        assert_eq!(cache.find(&flow(1)), None);
        cache.learn(&flow(1), Some(1460), None, Refused::Standard, 0);
        let server = cache.find(&flow(1)).unwrap();
        assert_eq!((server.mss, server.refused), (Some(1460), Refused::Standard));
        assert_eq!(server.cookie, None);
        for byte in 1..9 {
            cache.learn(&flow(1), None, cookie(byte), Refused::Neither, 5_000_000);
            assert_eq!(cache.find(&flow(1)).unwrap().cookie, cookie(byte));
        }
        cache.learn(&flow(1), Some(940), None, Refused::Both, 6_000_000);
        let server = cache.find(&flow(1)).unwrap();
        assert_eq!((server.mss, server.cookie), (Some(940), cookie(8)));
        assert_eq!(server.refused, Refused::Standard, "a server with a cookie refuses nothing");
        assert_eq!(cache.find(&flow(2)), None);
    }

    #[test]
    fn tcp_50_cache_is_bounded_and_drops_oldest() {
        let cache = FastOpenCache::new([3; 16]);
        let hosts = 8 * u32::try_from(ENTRIES_MAX).unwrap();
        for host in 0..hosts {
            cache.learn(
                &flow(host),
                Some(1000),
                cookie(1),
                Refused::Neither,
                u64::from(host) * 1_000_000,
            );
            assert!(cache.find(&flow(host)).is_some(), "the newest is known");
        }
        let known = (0..hosts).filter(|&host| cache.find(&flow(host)).is_some());
        let known: Vec<u32> = known.collect();
        assert_eq!(known.len(), ENTRIES_MAX);
        let newer = known.iter().filter(|&&host| host >= hosts / 2).count();
        assert!(newer > ENTRIES_MAX * 9 / 10, "{newer} of those learned in the second half");
    }

    #[test]
    fn tcp_50_torn_entries_are_not_believed() {
        let cache = FastOpenCache::new([3; 16]);
        cache.learn(&flow(1), Some(1460), cookie(1), Refused::Neither, 0);
        let entries = cache.entries.get().unwrap();
        let entry = entries.iter().find(|entry| entry.0[3].load(Ordering::Relaxed) != 0).unwrap();
        for word in 1..WORDS {
            let before = entry.0[word].fetch_xor(1 << 40, Ordering::Relaxed);
            assert_eq!(cache.find(&flow(1)), None, "word {word}");
            entry.0[word].store(before, Ordering::Relaxed);
            assert!(cache.find(&flow(1)).is_some());
        }
    }

    #[test]
    fn tcp_50_pause_doubles_with_black_holes() {
        let cache = FastOpenCache::new([3; 16]);
        assert!(!cache.pauses(10, 0));
        cache.note_black_hole(100);
        assert!(cache.pauses(10, 109) && !cache.pauses(10, 110));
        assert!(!cache.pauses(0, 101), "never without a time-out");
        cache.note_black_hole(200);
        assert!(cache.pauses(10, 219) && !cache.pauses(10, 220));
        for _ in 0..100 {
            cache.note_black_hole(300);
        }
        assert!(cache.pauses(10, 939) && !cache.pauses(10, 940));
        cache.forget_black_holes();
        assert!(!cache.pauses(10, 301));
    }
}

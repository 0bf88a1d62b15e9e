//! Options of a header (RFC 9293, section 3.2; RFC 7323; RFC 2018).

use std::cmp::Ordering;

use super::super::config::MAX_WINDOW_SCALE;
use super::super::fast_open::{Cookie, CookieOption};
use super::super::seq::Seq;

const END: u8 = 0;
const NOP: u8 = 1;
const MSS: u8 = 2;
const WINDOW_SCALE: u8 = 3;
const SACK_PERMITTED: u8 = 4;
const SACK: u8 = 5;
const TIMESTAMPS: u8 = 8;
const MD5: u8 = 19;
/// Bytes of a signature.
const MD5_BYTES: usize = 18;
const FAST_OPEN: u8 = 34;
/// Kind of options on trial, and the number of Fast Open among them (RFC 6994).
const EXPERIMENT: u8 = 254;
const FAST_OPEN_EXPERIMENT: [u8; 2] = [0xf9, 0x89];
/// Bytes that timestamps take in a header, with their padding.
pub(in crate::tcp) const TIMESTAMPS_BYTES: u32 = 12;
/// SACK blocks that fit in a header.
const MAX_SACKS: usize = 4;
/// Bytes of the longest options.
const MAX_BYTES: usize = 40;

/// Options that were understood.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(in crate::tcp) struct Options {
    /// Maximum segment size; in a SYN only.
    pub(in crate::tcp) mss: Option<u16>,
    /// Shift of the window; in a SYN only.
    pub(in crate::tcp) window_scale: Option<u8>,
    /// SACK is understood; in a SYN only.
    pub(in crate::tcp) sack_permitted: bool,
    pub(in crate::tcp) timestamps: Option<Timestamps>,
    pub(in crate::tcp) sacks: SackBlocks,
    /// A signature (RFC 2385), for which there is no key here; or it cannot be told that there is none
    /// (`tcp_parse_auth_options`).
    pub(in crate::tcp) is_signed: bool,
}

/// Timestamps (RFC 7323, section 3.2).
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(in crate::tcp) struct Timestamps {
    pub(in crate::tcp) value: u32,
    pub(in crate::tcp) echo: u32,
}

/// Range of bytes that was received out of order.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(in crate::tcp) struct SackBlock {
    pub(in crate::tcp) start: Seq,
    pub(in crate::tcp) end: Seq,
}

/// Up to four blocks.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(in crate::tcp) struct SackBlocks {
    blocks: [SackBlock; MAX_SACKS],
    count: u8,
}

impl SackBlocks {
    pub(in crate::tcp) fn as_slice(&self) -> &[SackBlock] {
        self.blocks.get(..usize::from(self.count)).unwrap_or_default()
    }

    /// Appends a block, if there is room.
    pub(in crate::tcp) fn push(&mut self, block: SackBlock) {
        if let Some(place) = self.blocks.get_mut(usize::from(self.count)) {
            *place = block;
            self.count += 1;
        }
    }

    pub(in crate::tcp) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Puts blocks that begin earlier first.
    pub(in crate::tcp) fn sort(&mut self) {
        let blocks = self.blocks.get_mut(..usize::from(self.count)).unwrap_or_default();
        blocks.sort_by(|one, other| match (one.start, other.start) {
            (one, other) if one == other => Ordering::Equal,
            (one, other) if one.is_before(other) => Ordering::Less,
            _ => Ordering::Greater,
        });
    }
}

/// Reads options up to the first malformed one, as `tcp_parse_options` does.
pub(super) fn parse(bytes: &[u8], is_syn: bool) -> Options {
    let mut options = Options::default();
    let mut is_marked = false;
    let left = walk(bytes, |kind, value, left| {
        // As the kernel, which looks for signatures only where one has room.
        is_marked |= kind == MD5 && left >= MD5_BYTES;
        options.note(kind, value, is_syn);
    });
    // As the kernel, if a signature could be there.
    options.is_signed = is_marked || left >= MD5_BYTES;
    options
}

/// True of timestamps alone, behind two bytes of padding (`tcp_parse_aligned_timestamp`).
pub(super) fn are_aligned_timestamps(bytes: &[u8]) -> bool {
    matches!(bytes, [NOP, NOP, TIMESTAMPS, 10, ..]) && bytes.len() == TIMESTAMPS_BYTES as usize
}

/// Reads the Fast Open option of a SYN or SYN-ACK (`tcp_parse_fastopen_option`).
pub(super) fn parse_fast_open(bytes: &[u8]) -> Option<CookieOption> {
    let mut found = None;
    walk(bytes, |kind, value, _| {
        let (value, is_experimental) = match (kind, value) {
            (FAST_OPEN, value) => (value, false),
            (EXPERIMENT, [m0, m1, value @ ..]) if [*m0, *m1] == FAST_OPEN_EXPERIMENT => {
                (value, true)
            }
            _ => return,
        };
        if value.len().is_multiple_of(2) {
            found = Cookie::of(value).map(|cookie| CookieOption { cookie, is_experimental });
        }
    });
    found
}

/// Calls for each option up to the first malformed one, with its kind, its value, and the number of bytes from it on.
/// Returns that number of the malformed one.
#[inline]
fn walk(mut bytes: &[u8], mut note: impl FnMut(u8, &[u8], usize)) -> usize {
    while let Some((&kind, rest)) = bytes.split_first() {
        match kind {
            END => return 0,
            NOP => bytes = rest,
            _ => {
                let Some(len) = rest.first().map(|&len| usize::from(len)) else { break };
                let Some((option, behind)) = bytes.split_at_checked(len) else { break };
                let Some(value) = option.get(2..) else { break };
                note(kind, value, bytes.len());
                bytes = behind;
            }
        }
    }
    bytes.len()
}

impl Options {
    /// Segment size that is announced, within that of the user.
    pub(in crate::tcp) fn mss_within(&self, of_user: Option<u16>) -> Option<u16> {
        self.mss.map(|mss| of_user.map_or(mss, |most| mss.min(most)))
    }

    fn note(&mut self, kind: u8, value: &[u8], is_syn: bool) {
        match (kind, value) {
            (MSS, &[high, low]) if is_syn => {
                self.mss = Some(u16::from_be_bytes([high, low])).filter(|&mss| mss > 0);
            }
            (WINDOW_SCALE, &[scale]) if is_syn => {
                self.window_scale = Some(scale.min(MAX_WINDOW_SCALE));
            }
            (SACK_PERMITTED, &[]) if is_syn => self.sack_permitted = true,
            (TIMESTAMPS, &[v0, v1, v2, v3, e0, e1, e2, e3]) => {
                self.timestamps = Some(Timestamps {
                    value: u32::from_be_bytes([v0, v1, v2, v3]),
                    echo: u32::from_be_bytes([e0, e1, e2, e3]),
                });
            }
            (SACK, blocks) if blocks.len().is_multiple_of(8) => {
                for block in blocks.chunks_exact(8) {
                    if let &[s0, s1, s2, s3, e0, e1, e2, e3] = block {
                        self.sacks.push(SackBlock {
                            start: Seq(u32::from_be_bytes([s0, s1, s2, s3])),
                            end: Seq(u32::from_be_bytes([e0, e1, e2, e3])),
                        });
                    }
                }
            }
            _ => {}
        }
    }

    /// The options as bytes, in the kernel's order and padded to words (`tcp_options_write`).
    pub(super) fn write(&self) -> OptionBytes {
        let mut bytes = OptionBytes::default();
        if let Some(mss) = self.mss {
            bytes.put(&[MSS, 4]);
            bytes.put(&mss.to_be_bytes());
        }
        match (self.timestamps, self.sack_permitted) {
            (Some(_), true) => bytes.put(&[SACK_PERMITTED, 2]),
            (Some(_), false) => bytes.put(&[NOP, NOP]),
            (None, true) => bytes.put(&[NOP, NOP, SACK_PERMITTED, 2]),
            (None, false) => {}
        }
        if let Some(Timestamps { value, echo }) = self.timestamps {
            bytes.put(&[TIMESTAMPS, 10]);
            bytes.put(&value.to_be_bytes());
            bytes.put(&echo.to_be_bytes());
        }
        if let Some(scale) = self.window_scale {
            bytes.put(&[NOP, WINDOW_SCALE, 3, scale]);
        }
        if !self.sacks.is_empty() {
            let room = (MAX_BYTES - usize::from(bytes.len)).saturating_sub(4) / 8;
            let blocks = self.sacks.as_slice();
            let blocks = blocks.get(..blocks.len().min(room)).unwrap_or_default();
            let len = u8::try_from(2 + 8 * blocks.len()).unwrap_or(2);
            bytes.put(&[NOP, NOP, SACK, len]);
            for SackBlock { start, end } in blocks {
                bytes.put(&start.0.to_be_bytes());
                bytes.put(&end.0.to_be_bytes());
            }
        }
        bytes
    }
}

/// Options of one header as bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct OptionBytes {
    bytes: [u8; MAX_BYTES],
    len: u8,
}

impl Default for OptionBytes {
    fn default() -> Self {
        Self { bytes: [0; MAX_BYTES], len: 0 }
    }
}

impl OptionBytes {
    /// Appends a Fast Open option if there is room, padded to a word (`tcp_options_write`).
    pub(super) fn put_fast_open(&mut self, option: &CookieOption) {
        let value = option.cookie.as_slice();
        let head: &[u8] = match option.is_experimental {
            true => &[EXPERIMENT, 0, FAST_OPEN_EXPERIMENT[0], FAST_OPEN_EXPERIMENT[1]],
            false => &[FAST_OPEN, 0],
        };
        let len = head.len() + value.len();
        let start = usize::from(self.len);
        if start + len.next_multiple_of(4) > MAX_BYTES {
            return;
        }
        self.put(head);
        self.put(value);
        self.put([NOP; 2].get(..len.next_multiple_of(4) - len).unwrap_or_default());
        if let (Some(place), Ok(len)) = (self.bytes.get_mut(start + 1), u8::try_from(len)) {
            *place = len;
        }
    }

    pub(super) fn as_slice(&self) -> &[u8] {
        self.bytes.get(..usize::from(self.len)).unwrap_or_default()
    }

    fn put(&mut self, more: &[u8]) {
        let start = usize::from(self.len);
        if let Some(room) = self.bytes.get_mut(start..start + more.len()) {
            room.copy_from_slice(more);
            self.len += u8::try_from(more.len()).unwrap_or(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    prop_compose! {
        fn options()(
            mss in prop::option::of(1_u16..), window_scale in prop::option::of(0_u8..15),
            sack_permitted: bool, timestamps in prop::option::of(any::<(u32, u32)>()),
            blocks in prop::collection::vec(any::<(u32, u32)>(), 0..4), is_syn: bool,
        ) -> (Options, bool) {
            let timestamps = timestamps.map(|(value, echo)| Timestamps { value, echo });
            let mut options = Options { timestamps, ..Options::default() };
            if is_syn {
                options = Options { mss, window_scale, sack_permitted, ..options };
            } else {
                for (start, end) in blocks {
                    options.sacks.push(SackBlock { start: Seq(start), end: Seq(end) });
                }
            }
            (options, is_syn)
        }
    }

    proptest! {
        #[test]
        fn tcp_5_options_are_read_as_written((options, is_syn) in options()) {
            let bytes = options.write();
            prop_assert!(bytes.as_slice().len().is_multiple_of(4));
            prop_assert_eq!(parse(bytes.as_slice(), is_syn), options);
        }

        #[test]
        fn tcp_5_any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..41), is_syn: bool) {
            let options = parse(&bytes, is_syn);
            prop_assert!(options.window_scale.is_none_or(|scale| scale <= MAX_WINDOW_SCALE));
        }
    }

    #[test]
    fn tcp_5_malformed_may_hide_signature() {
        let is_signed = |len: usize| {
            let mut bytes = vec![NOP; 40 - len];
            bytes.extend([EXPERIMENT, 60]);
            bytes.resize(40, NOP);
            parse(&bytes, false).is_signed
        };
        assert_eq!([2, 17, 18, 40].map(is_signed), [false, false, true, true]);
    }

    #[test]
    fn tcp_5_signature_has_its_room() {
        let is_signed = |len: usize| {
            let mut bytes = vec![MD5, 2];
            bytes.resize(len, NOP);
            parse(&bytes, true).is_signed
        };
        assert_eq!([4, 16, 20, 40].map(is_signed), [false, false, true, true]);
    }

    prop_compose! {
        /// Bytes near those of an option: its length fits or is a little off.
        fn fast_open_part()(
            kind in prop_oneof![Just(FAST_OPEN), Just(EXPERIMENT), Just(NOP), any::<u8>()],
            has_magic in prop::bool::weighted(0.5), value in prop::collection::vec(any::<u8>(), 0..20),
            off in prop_oneof![8 => Just(0_u8), 1 => Just(1), 1 => Just(2), 1 => Just(255)],
        ) -> Vec<u8> {
            let magic: &[u8] = if has_magic { &FAST_OPEN_EXPERIMENT } else { &[] };
            let len = u8::try_from(2 + magic.len() + value.len()).unwrap().wrapping_add(off);
            [&[kind, len], magic, &value[..]].concat()
        }
    }

    proptest! {
        #[test]
        fn tcp_49_option_is_read_as_written(
            cookie in prop::collection::vec(any::<u8>(), 0..17), is_experimental: bool,
        ) {
            let Some(cookie) = Cookie::of(&cookie) else { return Ok(()) };
            let option = CookieOption { cookie, is_experimental };
            let mut bytes = Options { mss: Some(1460), ..Options::default() }.write();
            bytes.put_fast_open(&option);
            prop_assert!(bytes.as_slice().len().is_multiple_of(4));
            prop_assert_eq!(parse_fast_open(bytes.as_slice()), Some(option));
            prop_assert_eq!(parse(bytes.as_slice(), true).mss, Some(1460));
        }

        #[test]
        fn tcp_49_any_option_bytes_are_survived(
            parts in prop::collection::vec(fast_open_part(), 0..6), cut in 0..41_usize,
        ) {
            let mut bytes = parts.concat();
            bytes.truncate(cut);
            if let Some(CookieOption { cookie, is_experimental }) = parse_fast_open(&bytes) {
                let value = cookie.as_slice();
                prop_assert!(matches!(value.len(), 0 | 4 | 6 | 8 | 10 | 12 | 14 | 16), "{value:?}");
                let magic: &[u8] = if is_experimental { &FAST_OPEN_EXPERIMENT } else { &[] };
                let kind = if is_experimental { EXPERIMENT } else { FAST_OPEN };
                let len = u8::try_from(2 + magic.len() + value.len()).unwrap();
                let option = [&[kind, len], magic, value].concat();
                prop_assert!(bytes.windows(option.len()).any(|at| at == option), "{bytes:?}");
            }
        }
    }

    #[test]
    fn tcp_5_syn_options_as_linux_orders_them() {
        let options = Options {
            mss: Some(1460),
            window_scale: Some(7),
            sack_permitted: true,
            timestamps: Some(Timestamps { value: 1, echo: 0 }),
            ..Options::default()
        };
        let bytes = [2, 4, 5, 180, 4, 2, 8, 10, 0, 0, 0, 1, 0, 0, 0, 0, 1, 3, 3, 7];
        assert_eq!(options.write().as_slice(), bytes);
        assert_eq!(parse(&[MSS, 4, 5], true).mss, None, "cut off");
        assert_eq!(parse(&[MSS, 0, 5, 180], true).mss, None, "a length of nothing");
        assert_eq!(parse(&[2, 4, 5, 180], false).mss, None, "not in a SYN");
    }
}

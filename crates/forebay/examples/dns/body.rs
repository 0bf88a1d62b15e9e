//! Body of an answer, composed once for all clients.
//!
//! Names are compressed (RFC 1035, 4.1.4) against the question and against each other. An answer
//! for a single name is always at the same offset after the question, so its pointers are final. An
//! answer for all names under another one (a wildcard, a delegation, a nonexistent name) begins
//! where the question ends, so its pointers are relative to that offset, and are patched when the
//! answer is sent.

use crate::zone::{Set, rtype, suffixes};

/// Octets before the question.
pub(crate) const HEADER_LEN_BYTES: usize = 12;

/// Type and class, behind the question's name.
pub(crate) const QUESTION_TAIL_LEN_BYTES: usize = 4;

/// Upper bound on offsets that pointers can lead to (14 bits), reduced by the possible excess
/// length of a question over the assumed one.
const FARTHEST_POINTER: usize = 0x3fff - 255 - HEADER_LEN_BYTES - QUESTION_TAIL_LEN_BYTES;

/// A pointer's two upper bits.
const POINTER: u16 = 0xc000;

/// A pointer to the question's name.
const ASKED: u16 = 0xc00c;

/// Numbers of records in the answer, authority and additional sections.
pub(crate) type Counts = [u16; 3];

/// A section of a message, as the index of its count.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Section {
    Answer = 0,
    Authority = 1,
    Additional = 2,
}

/// Sections of an answer, ready to be copied.
#[derive(Default)]
pub(crate) struct Body {
    octets: Box<[u8]>,
    /// Positions of pointers to which the end offset of the question's name is to be added.
    patches: Box<[u16]>,
    /// End of each set of records: a possible place to truncate the answer.
    ends: Box<[End]>,
    pub(crate) is_authoritative: bool,
    pub(crate) rcode: u8,
}

#[derive(Clone, Copy)]
struct End {
    len_bytes: usize,
    counts: Counts,
    /// True if the answer counts as truncated without this set. Other sets are optional.
    is_needed: bool,
}

/// Result of writing a body.
pub(crate) struct Written {
    pub(crate) len_bytes: usize,
    pub(crate) counts: Counts,
    pub(crate) is_truncated: bool,
}

impl Written {
    pub(crate) fn nothing() -> Self {
        Self { len_bytes: 0, counts: [0; 3], is_truncated: false }
    }
}

impl Body {
    /// Copies as many sets to `room` as fit. `name_end` is the offset in the message at which the
    /// question's name ends; `room` begins after the question.
    pub(crate) fn write(&self, room: &mut [u8], name_end: u16) -> Written {
        let last = self.ends.last();
        let (mut whole, mut is_truncated) = (last.copied(), false);
        if self.octets.len() > room.len() {
            let fits = self.ends.iter().take_while(|end| end.len_bytes <= room.len()).count();
            whole = fits.checked_sub(1).map(|last| self.ends[last]);
            is_truncated = self.ends[fits..].iter().any(|end| end.is_needed);
        }
        let Some(End { len_bytes, counts, .. }) = whole else {
            return Written { is_truncated, ..Written::nothing() };
        };
        room[..len_bytes].copy_from_slice(&self.octets[..len_bytes]);
        for at in self.patches.iter().map(|at| usize::from(*at)).take_while(|at| *at < len_bytes) {
            let from_end = u16::from_be_bytes([room[at], room[at + 1]]);
            let pointer = POINTER | name_end.wrapping_add(from_end);
            room[at..at + 2].copy_from_slice(&pointer.to_be_bytes());
        }
        Written { len_bytes, counts, is_truncated }
    }
}

/// Questions that a body is for.
#[derive(Clone, Copy)]
pub(crate) enum Question<'a> {
    /// Exactly this name.
    Exactly(&'a [u8]),
    /// This name, or any name under it.
    Under(&'a [u8]),
}

/// Owner of a record.
#[derive(Clone, Copy)]
pub(crate) enum Owner<'a> {
    /// The name in the question.
    Asked,
    Named(&'a [u8]),
}

/// Composes a body.
pub(crate) struct Composer {
    /// Length of the question's name, if the same for all questions.
    asked_len: Option<usize>,
    body: Vec<u8>,
    patches: Vec<u16>,
    ends: Vec<End>,
    counts: Counts,
    /// Names that a pointer can lead to, with their offsets from the end of the question's name.
    known: Vec<(Box<[u8]>, u16)>,
}

impl Composer {
    pub(crate) fn new(question: Question<'_>) -> Self {
        let (name, asked_len) = match question {
            Question::Exactly(name) => (name, Some(name.len())),
            Question::Under(name) => (name, None),
        };
        let known = suffixes(name).map(|suffix| {
            // Lossless: a name has at most 255 octets.
            let back = u16::try_from(suffix.len()).unwrap_or(0);
            (Box::from(suffix), back.wrapping_neg())
        });
        let known = known.collect();
        let (body, patches, ends) = (Vec::new(), Vec::new(), Vec::new());
        Self { asked_len, body, patches, ends, counts: [0; 3], known }
    }

    /// Adds a set of records, with `ttl` in place of its own time to live if given.
    pub(crate) fn add(
        &mut self,
        section: Section,
        owner: Owner<'_>,
        (rtype, set): (u16, &Set),
        ttl_s: Option<u32>,
        is_needed: bool,
    ) {
        for rdata in &set.rdata {
            match owner {
                Owner::Asked => self.put_u16(ASKED),
                Owner::Named(name) => self.put_name(name),
            }
            self.put_u16(rtype);
            self.put_u16(1);
            self.body.extend_from_slice(&ttl_s.unwrap_or(set.ttl_s).to_be_bytes());
            self.put_rdata(rtype, rdata);
        }
        let records = u16::try_from(set.rdata.len()).unwrap_or(u16::MAX);
        let count = &mut self.counts[section as usize];
        *count = count.saturating_add(records);
        self.ends.push(End { len_bytes: self.body.len(), counts: self.counts, is_needed });
    }

    pub(crate) fn finish(self, is_authoritative: bool, rcode: u8) -> Body {
        Body {
            octets: self.body.into(),
            patches: self.patches.into(),
            ends: self.ends.into(),
            is_authoritative,
            rcode,
        }
    }

    fn put_u16(&mut self, value: u16) {
        self.body.extend_from_slice(&value.to_be_bytes());
    }

    /// Adds record data, preceded by its length once known. Names are compressed in the types of
    /// RFC 1035 only (RFC 3597, 4).
    fn put_rdata(&mut self, rtype: u16, rdata: &[u8]) {
        let len_at = self.body.len();
        self.put_u16(0);
        match rtype {
            rtype::NS | rtype::CNAME | rtype::PTR => self.put_name(rdata),
            rtype::MX => {
                let (preference, exchange) = rdata.split_at(2);
                self.body.extend_from_slice(preference);
                self.put_name(exchange);
            }
            rtype::SOA => {
                let (names, numbers) = rdata.split_at(rdata.len() - 20);
                let first_len = name_len(names);
                self.put_name(&names[..first_len]);
                self.put_name(&names[first_len..]);
                self.body.extend_from_slice(numbers);
            }
            _ => self.body.extend_from_slice(rdata),
        }
        let len = u16::try_from(self.body.len() - len_at - 2).unwrap_or(u16::MAX);
        self.body[len_at..len_at + 2].copy_from_slice(&len.to_be_bytes());
    }

    /// Writes labels until the rest of the name is known, then a pointer to the rest.
    fn put_name(&mut self, name: &[u8]) {
        for suffix in suffixes(name) {
            if let Some(&(_, from_end)) = self.known.iter().find(|(known, _)| **known == *suffix) {
                return self.put_pointer(from_end);
            }
            let at = QUESTION_TAIL_LEN_BYTES + self.body.len();
            if let Some(at) =
                u16::try_from(at).ok().filter(|at| usize::from(*at) < FARTHEST_POINTER)
            {
                self.known.push((suffix.into(), at));
            }
            let label_len = usize::from(suffix[0]);
            self.body.extend_from_slice(&suffix[..=label_len]);
        }
        self.body.push(0);
    }

    fn put_pointer(&mut self, from_end: u16) {
        if let Some(asked_len) = self.asked_len {
            let name_end = u16::try_from(HEADER_LEN_BYTES + asked_len).unwrap_or(0);
            return self.put_u16(POINTER | name_end.wrapping_add(from_end));
        }
        if let Ok(at) = u16::try_from(self.body.len()) {
            self.patches.push(at);
        }
        self.put_u16(from_end);
    }
}

/// Length of the name at the start of `octets`.
fn name_len(octets: &[u8]) -> usize {
    suffixes(octets).map(|suffix| 1 + usize::from(suffix[0])).sum::<usize>() + 1
}

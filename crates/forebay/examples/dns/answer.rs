//! Answer to one query: a server's work for each datagram.
//!
//! A query has a header, a question, and at most an EDNS record. Such a query is parsed here, and
//! its answer is copied. A query with other records goes through the library's full parser first.
//! The question is returned byte for byte, in its order and case (resolvers check both).

use domain::base::Message;
use domain::base::opt::Opt;
use domain::rdata::AllRecordData;

use crate::body::{HEADER_LEN_BYTES, QUESTION_TAIL_LEN_BYTES, Written};
use crate::prepared::Zone;
use crate::zone::rtype;

/// Largest payload sent, which the EDNS record announces: the smallest IPv6 MTU without IP and UDP
/// headers.
pub(crate) const PAYLOAD_MAX_BYTES: u16 = 1232;

/// Payload that every client accepts (RFC 1035, 4.2.1).
const PAYLOAD_MIN_BYTES: u16 = 512;

const NAME_MAX_BYTES: usize = 255;

/// Root, type, payload size, upper bits of the code, version, flags and length (RFC 6891, 6.1.2).
const OPT_LEN_BYTES: usize = 11;

/// Extended error as an option: not authoritative (RFC 8914, 4.21).
const NOT_AUTHORITATIVE: [u8; 6] = [0, 15, 0, 2, 0, 20];

const CLASS_IN: u16 = 1;
const CLASS_ANY: u16 = 255;

/// Response codes (RFC 6895, 2.3).
mod rcode {
    pub(super) const FORMERR: u16 = 1;
    pub(super) const NOTIMP: u16 = 4;
    pub(super) const REFUSED: u16 = 5;
    pub(super) const NOTAUTH: u16 = 9;
    pub(super) const BADVERS: u16 = 16;
}

/// Answers a query. Returns the length of the answer in `room`; `None` if the query gets no answer.
pub(crate) fn answer(zone: &Zone, query: &[u8], room: &mut [u8]) -> Option<usize> {
    let asked = Asked::read(query)?;
    let question = query.get(..asked.question_end)?;
    room.get_mut(..question.len())?.copy_from_slice(question);
    asked.answer(zone, room)
}

/// Parsed query.
struct Asked {
    /// The question's name in lower case, in the first `name_len` octets.
    name: [u8; NAME_MAX_BYTES],
    name_len: usize,
    /// End of the question in the message; if there is no question, end of the header.
    question_end: usize,
    opcode: u8,
    rtype: u16,
    class: u16,
    rest: Rest,
}

/// Sections after the question.
enum Rest {
    Nothing,
    Edns(Edns),
    Malformed,
}

/// A client's EDNS parameters.
#[derive(Clone, Copy)]
struct Edns {
    payload_max_bytes: u16,
    version: u8,
    wants_dnssec: bool,
}

impl Asked {
    /// Parses a query. `None` if the message is an answer, or has no question that could be
    /// returned.
    fn read(query: &[u8]) -> Option<Self> {
        let header = query.first_chunk::<HEADER_LEN_BYTES>()?;
        let [_, _, flags, _, counts @ ..] = *header;
        if flags & 0x80 != 0 {
            return None;
        }
        let mut asked = Self {
            name: [0; NAME_MAX_BYTES],
            name_len: 0,
            question_end: HEADER_LEN_BYTES,
            opcode: flags >> 3 & 0xf,
            rtype: 0,
            class: 0,
            rest: Rest::Malformed,
        };
        match counts[..2] {
            // Without a question the only possible answer is an error.
            [0, 0] => {
                asked.rest = read_all(query);
                return (!matches!(asked.rest, Rest::Malformed)).then_some(asked);
            }
            [0, 1] => {}
            _ => return None,
        }
        asked.read_question(&query[HEADER_LEN_BYTES..])?;
        let rest = &query[asked.question_end..];
        asked.rest = match (counts, rest) {
            ([_, _, 0, 0, 0, 0, 0, 0], []) => Rest::Nothing,
            ([_, _, 0, 0, 0, 0, 0, 1], [0, 0, 41, opt @ ..]) => read_opt(opt),
            _ => read_all(query),
        };
        Some(asked)
    }

    fn read_question(&mut self, question: &[u8]) -> Option<()> {
        let mut len = 0;
        loop {
            let label_len = *question.get(len)?;
            len += 1 + usize::from(label_len);
            // The two upper bits mark a pointer, and no name precedes this one.
            if label_len > 63 || len > NAME_MAX_BYTES {
                return None;
            }
            if label_len == 0 {
                break;
            }
        }
        let tail = question.get(len..)?.first_chunk::<QUESTION_TAIL_LEN_BYTES>()?;
        let [type_high, type_low, class_high, class_low] = *tail;
        let name = &mut self.name[..len];
        name.copy_from_slice(&question[..len]);
        name.make_ascii_lowercase();
        self.name_len = len;
        self.rtype = u16::from_be_bytes([type_high, type_low]);
        self.class = u16::from_be_bytes([class_high, class_low]);
        self.question_end += len + QUESTION_TAIL_LEN_BYTES;
        Some(())
    }

    /// Writes the answer after the question, which is already in `room`.
    fn answer(&self, zone: &Zone, room: &mut [u8]) -> Option<usize> {
        let edns = match self.rest {
            Rest::Edns(edns) => Some(edns),
            _ => None,
        };
        let max = edns.map_or(PAYLOAD_MIN_BYTES, |edns| {
            edns.payload_max_bytes.clamp(PAYLOAD_MIN_BYTES, PAYLOAD_MAX_BYTES)
        });
        let opt_len_bytes = if edns.is_some() { OPT_LEN_BYTES } else { 0 };
        let sections_end = room.len().min(usize::from(max)).checked_sub(opt_len_bytes)?;
        let name_end = u16::try_from(HEADER_LEN_BYTES + self.name_len).ok()?;
        let sections = room.get_mut(self.question_end..sections_end)?;
        let refusal = self.refusal();
        let name = &self.name[..self.name_len];
        let body = if refusal.is_none() { zone.find(name, self.rtype) } else { None };
        let code = body.map_or(rcode::REFUSED, |body| u16::from(body.rcode));
        let code = refusal.unwrap_or(code);
        let is_authoritative = body.is_some_and(|body| body.is_authoritative);
        let written = body.map_or(Written::nothing(), |body| body.write(sections, name_end));
        let mut end = self.question_end + written.len_bytes;
        if let Some(edns) = edns {
            let is_elsewhere = refusal.is_none() && body.is_none();
            let why = if is_elsewhere { &NOT_AUTHORITATIVE[..] } else { &[] };
            end += edns.write(room.get_mut(end..)?, code, why);
        }
        let [_, _, flags, codes, _, _, counts @ ..] = room.first_chunk_mut::<12>()?;
        let (is_authoritative, is_truncated) =
            (u8::from(is_authoritative), u8::from(written.is_truncated));
        // The opcode and the RD flag of the query are returned.
        *flags = *flags & 0x79 | 0x80 | is_authoritative << 2 | is_truncated << 1;
        *codes = code.to_be_bytes()[1] & 0xf;
        let [answers, authorities, additional] = written.counts;
        let additional = additional + u16::from(edns.is_some());
        for (to, count) in counts.chunks_exact_mut(2).zip([answers, authorities, additional]) {
            to.copy_from_slice(&count.to_be_bytes());
        }
        Some(end)
    }

    /// Response code if the query is refused without a look-up.
    fn refusal(&self) -> Option<u16> {
        match &self.rest {
            Rest::Malformed => return Some(rcode::FORMERR),
            Rest::Edns(edns) if edns.version > 0 => return Some(rcode::BADVERS),
            _ => {}
        }
        if self.name_len == 0 {
            return Some(rcode::FORMERR);
        }
        match (self.opcode, self.rtype) {
            (1.., _) | (_, 0 | rtype::AXFR) => Some(rcode::NOTIMP),
            (_, rtype::IXFR) => Some(rcode::NOTAUTH),
            _ if self.class != CLASS_IN && self.class != CLASS_ANY => Some(rcode::REFUSED),
            _ => None,
        }
    }
}

impl Edns {
    /// Writes the server's OPT record, with the code's upper bits and an option.
    fn write(self, room: &mut [u8], code: u16, option: &[u8]) -> usize {
        let [size_high, size_low] = PAYLOAD_MAX_BYTES.to_be_bytes();
        let [_, code_upper] = (code >> 4).to_be_bytes();
        let flags = u8::from(self.wants_dnssec) << 7;
        let mut opt = [0, 0, 41, size_high, size_low, code_upper, 0, flags, 0, 0, 0];
        let len_bytes = OPT_LEN_BYTES + option.len();
        // The option is not essential: leave it out if it does not fit.
        let Some(room) = room.get_mut(..len_bytes) else {
            room[..OPT_LEN_BYTES].copy_from_slice(&opt);
            return OPT_LEN_BYTES;
        };
        opt[OPT_LEN_BYTES - 1] = u8::try_from(option.len()).unwrap_or(0);
        room[..OPT_LEN_BYTES].copy_from_slice(&opt);
        room[OPT_LEN_BYTES..].copy_from_slice(option);
        len_bytes
    }
}

/// Parses an OPT record after its type. The record must be the last one of the message.
fn read_opt(opt: &[u8]) -> Rest {
    let Some(([size_high, size_low, _, version, flags, _, len @ ..], mut options)) =
        opt.split_first_chunk::<8>()
    else {
        return Rest::Malformed;
    };
    if usize::from(u16::from_be_bytes(*len)) != options.len() {
        return Rest::Malformed;
    }
    while !options.is_empty() {
        let Some(([_, _, len @ ..], rest)) = options.split_first_chunk::<4>() else {
            return Rest::Malformed;
        };
        let Some(rest) = rest.get(usize::from(u16::from_be_bytes(*len))..) else {
            return Rest::Malformed;
        };
        options = rest;
    }
    Rest::Edns(Edns {
        payload_max_bytes: u16::from_be_bytes([*size_high, *size_low]),
        version: *version,
        wants_dnssec: flags & 0x80 != 0,
    })
}

/// Parses a message with other records than usual.
fn read_all(query: &[u8]) -> Rest {
    match parsed(query) {
        Some(None) => Rest::Nothing,
        Some(Some(edns)) => Rest::Edns(edns),
        None => Rest::Malformed,
    }
}

/// The EDNS record, if any, of a message that is valid to its last octet. `None` if the message is
/// invalid.
fn parsed(query: &[u8]) -> Option<Option<Edns>> {
    let message = Message::from_slice(query).ok()?;
    for section in [message.answer().ok()?, message.authority().ok()?] {
        for record in section {
            let record = record.ok()?;
            let is_of_additional = [rtype::OPT, rtype::TSIG].contains(&record.rtype().to_int());
            if is_of_additional || record.into_any_record::<AllRecordData<_, _>>().is_err() {
                return None;
            }
        }
    }
    let mut edns = None;
    let mut additional = message.additional().ok()?;
    for record in additional.by_ref() {
        let record = record.ok()?;
        match record.rtype().to_int() {
            // No TSIG key is configured.
            rtype::TSIG => return None,
            rtype::OPT if edns.is_some() => return None,
            rtype::OPT => {
                let [_, version, flags, _] = record.ttl().as_secs().to_be_bytes();
                let payload_max_bytes = record.class().to_int();
                edns = Some(Edns { payload_max_bytes, version, wants_dnssec: flags & 0x80 != 0 });
                record.into_record::<Opt<_>>().ok()??;
            }
            _ => {
                record.into_any_record::<AllRecordData<_, _>>().ok()?;
            }
        }
    }
    (additional.pos() == query.len()).then_some(edns)
}

//! Properties for queries of arbitrary octets.

use domain::zonefile::inplace::Zonefile;
use hickory_proto::op::Message;
use hickory_proto::rr::{Record, RecordType};
use proptest::prelude::*;
use proptest::sample::Index;

use crate::answer::answer;
use crate::queries::{TYPES, clients, names, opt, query, unusual};
use crate::zone::Contents;
use crate::{ZONE, zone_of};

pub(crate) fn any_octets() {
    let zone = zone_of(ZONE);
    proptest!(|(octets in prop::collection::vec(any::<u8>(), 0..600), room in 0_usize..1500)| {
        check(&zone, &octets, room)?;
    });
}

pub(crate) fn damaged_queries() {
    let zone = zone_of(ZONE);
    let mut whole: Vec<Vec<u8>> = unusual().into_iter().map(|(_, query)| query).collect();
    for name in names() {
        whole.extend(clients().into_iter().map(|client| query(&name, 1, client.as_deref())));
    }
    let damage = prop::collection::vec((any::<Index>(), any::<u8>()), 0..4);
    let input = (any::<Index>(), damage, any::<Index>(), 0_usize..1500);
    proptest!(ProptestConfig::with_cases(5000), |((which, damage, cut, room) in input)| {
        let mut query = which.get(&whole).clone();
        if !query.is_empty() {
            for (at, octet) in damage {
                let at = at.index(query.len());
                query[at] = octet;
            }
            query.truncate(cut.index(query.len() * 4).max(1));
        }
        check(&zone, &query, room)?;
    });
}

/// Checks that the answer to any query is one that a resolver can parse.
fn check(zone: &crate::Zone, query: &[u8], room_len: usize) -> Result<(), TestCaseError> {
    let mut room = vec![0xee; room_len];
    let len = answer(zone, query, &mut room);
    let Some(len) = len else { return Ok(()) };
    prop_assert!(len <= room_len);
    prop_assert_eq!(&room[..2], &query[..2]);
    prop_assert!(room[2] & 0x80 != 0);
    let message = Message::from_vec(&room[..len]);
    prop_assert!(message.is_ok(), "{:?}: {:02x?}", message, &room[..len]);
    Ok(())
}

/// No answer is longer than the client accepts, or than the room. A shortened answer is a subset of
/// the whole one, and has TC set if more is missing than optional addresses.
pub(crate) fn sizes() {
    let zone = zone_of(ZONE);
    for name in names() {
        for rtype in TYPES {
            let mut whole = [0; 1500];
            let asked = query(&name, rtype, Some(&opt(1232, 0, &[])));
            let whole_len = answer(&zone, &asked, &mut whole).unwrap();
            let whole = Message::from_vec(&whole[..whole_len]).unwrap();
            assert!(!whole.metadata.truncation, "{name} {rtype}");
            for room_len in (asked.len()..1300).step_by(7) {
                let mut room = vec![0; room_len];
                let Some(len) = answer(&zone, &asked, &mut room) else { continue };
                let part = Message::from_vec(&room[..len]).unwrap();
                let lacks = part.answers.len() < whole.answers.len()
                    || part.authorities.len() < whole.authorities.len();
                let cut =
                    whole.authorities.iter().find(|record| record.record_type() == RecordType::NS);
                let is_glue = |host: &Record| cut.is_some_and(|cut| cut.name.zone_of(&host.name));
                let left_out = &whole.additionals[part.additionals.len()..];
                let lacks_glue = left_out.iter().any(is_glue);
                assert_eq!(part.metadata.truncation, lacks || lacks_glue, "{name} {rtype}: {part}");
                assert!(whole.answers.starts_with(&part.answers), "{name} {rtype}: {part}");
                assert!(room_len < whole_len || len == whole_len, "{name} {rtype}");
            }
        }
    }
}

pub(crate) fn zones_refused() {
    let soa = "$ORIGIN z.\n@ 60 SOA ns h 1 2 3 4 5\n";
    for (records, why) in [
        ("a 60 CNAME b\na 60 A 192.0.2.1", "a CNAME and other records"),
        ("a 60 CNAME b\na 60 CNAME c", "more than one CNAME"),
        ("a.other. 60 A 192.0.2.1", "outside of the zone"),
        ("sub 60 SOA ns h 1 2 3 4 5", "more than one SOA"),
        ("@ 60 SOA ns h 2 2 3 4 5", "more than one SOA"),
        ("a 60 DNAME b", "DNAME"),
        ("$INCLUDE other", "$INCLUDE"),
        ("a 60 A 192.0.2.256", "error"),
    ] {
        let error = Contents::scan(Zonefile::from(format!("{soa}{records}\n").as_str())).err();
        let told = error.map(|error| error.to_string()).unwrap_or_default();
        assert!(told.contains(why), "{records}: {told}");
    }
    let error = Contents::scan(Zonefile::from("$ORIGIN z.\na 60 A 192.0.2.1\n")).err().unwrap();
    assert!(error.to_string().contains("no SOA"), "{error}");
}

/// Chains of aliases are followed up to a limit, and cycles once.
pub(crate) fn aliases() {
    let mut text = String::from("$ORIGIN z.\n@ 60 SOA ns h 1 2 3 4 5\n*.w 60 CNAME x.w\n");
    text.extend((0..40).map(|link| format!("c{link} 60 CNAME c{}\n", link + 1)));
    text.push_str("c40 60 A 192.0.2.1\na 60 CNAME b\nb 60 CNAME a\n");
    let zone = zone_of(&text);
    for (name, answers) in
        [("q.w.z", 1), ("x.w.z", 1), ("a.z", 2), ("c0.z", 20), ("c25.z", 16), ("c22.z", 19)]
    {
        let mut room = [0; 1232];
        let asked = query(name, 1, Some(&opt(1232, 0, &[])));
        let len = answer(&zone, &asked, &mut room).unwrap();
        let message = Message::from_vec(&room[..len]).unwrap();
        assert_eq!(message.answers.len(), answers, "{message}");
    }
}

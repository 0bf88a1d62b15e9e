//! Contents of a zone's master file: sets of records by name and type, in wire format.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::{fmt, io};

use domain::base::iana::Class;
use domain::base::rdata::ComposeRecordData;
use domain::base::{Name, ToName};
use domain::zonefile::inplace::{self, Entry, ScannedRecord, Zonefile};

/// A name in wire format, uncompressed and in lower case: labels, each after its length, up to the
/// root's. Lengths are below the codes of letters, so lowering the case of all octets changes
/// letters only.
pub(crate) type WireName = Box<[u8]>;

/// Record types, by their numbers in the registry of DNS parameters.
pub(crate) mod rtype {
    pub(crate) const A: u16 = 1;
    pub(crate) const NS: u16 = 2;
    pub(crate) const CNAME: u16 = 5;
    pub(crate) const SOA: u16 = 6;
    pub(crate) const PTR: u16 = 12;
    pub(crate) const MX: u16 = 15;
    pub(crate) const AAAA: u16 = 28;
    pub(crate) const SRV: u16 = 33;
    pub(crate) const DNAME: u16 = 39;
    pub(crate) const OPT: u16 = 41;
    pub(crate) const DS: u16 = 43;
    pub(crate) const RRSIG: u16 = 46;
    pub(crate) const NSEC: u16 = 47;
    pub(crate) const TSIG: u16 = 250;
    pub(crate) const IXFR: u16 = 251;
    pub(crate) const AXFR: u16 = 252;
    pub(crate) const ANY: u16 = 255;
}

/// All records of one name and type.
pub(crate) struct Set {
    pub(crate) ttl_s: u32,
    /// Record data in canonical form (RFC 4034, 6.2), sorted, without duplicates.
    pub(crate) rdata: Vec<Vec<u8>>,
}

/// All sets of one name, by type.
pub(crate) type Sets = BTreeMap<u16, Set>;

/// Contents of a master file.
pub(crate) struct Contents {
    pub(crate) apex: WireName,
    /// All names with records, and the empty non-terminals between them.
    pub(crate) names: BTreeMap<WireName, Sets>,
}

/// Reason why a zone cannot be served.
#[derive(Debug)]
pub(crate) enum Error {
    Unreadable(io::Error),
    Syntax(inplace::Error),
    Include,
    Class(String, Class),
    NoApex,
    OutOfZone(String),
    ManySoas,
    AliasWithOthers(String),
    ManyAliases(String),
    Dname(String),
}

impl fmt::Display for Error {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreadable(error) => write!(to, "the zone file cannot be read: {error}"),
            Self::Syntax(error) => write!(to, "the zone file has an error: {error}"),
            Self::Include => write!(to, "$INCLUDE is not served: put all records into one file"),
            Self::Class(name, class) => write!(to, "{name}: class {class}; only IN is served"),
            Self::NoApex => write!(to, "the zone has no SOA record: its top is not known"),
            Self::OutOfZone(name) => write!(to, "{name} is outside of the zone that has the SOA"),
            Self::ManySoas => write!(to, "the zone has more than one SOA record"),
            Self::AliasWithOthers(name) => {
                write!(to, "{name} has a CNAME and other records: it can only have one of both")
            }
            Self::ManyAliases(name) => write!(to, "{name} has more than one CNAME"),
            Self::Dname(name) => write!(to, "{name} has a DNAME, which is not served"),
        }
    }
}

impl std::error::Error for Error {}

impl Contents {
    /// Reads a master file (RFC 1035, 5).
    pub(crate) fn read(file: &Path) -> Result<Self, Error> {
        let mut file = File::open(file).map_err(Error::Unreadable)?;
        Self::scan(Zonefile::load(&mut file).map_err(Error::Unreadable)?)
    }

    /// Collects a master file's records, and checks that they form a zone.
    pub(crate) fn scan(mut file: Zonefile) -> Result<Self, Error> {
        file.set_default_class(Class::IN);
        let mut names = BTreeMap::<WireName, Sets>::new();
        while let Some(entry) = file.next_entry().map_err(Error::Syntax)? {
            match entry {
                Entry::Record(record) => add(&mut names, &record)?,
                Entry::Include { .. } => return Err(Error::Include),
            }
        }
        let mut tops = names.iter().filter(|(_, sets)| sets.contains_key(&rtype::SOA));
        let apex = tops.next().ok_or(Error::NoApex)?.0.clone();
        if tops.next().is_some() || names[&apex][&rtype::SOA].rdata.len() > 1 {
            return Err(Error::ManySoas);
        }
        for (name, sets) in &mut names {
            check(&apex, name, sets)?;
        }
        add_between(&mut names, &apex);
        Ok(Self { apex, names })
    }

    /// The zone's SOA record.
    pub(crate) fn soa(&self) -> &Set {
        &self.names[&self.apex][&rtype::SOA]
    }

    /// Lifetime of a negative answer, in seconds (RFC 2308, 5).
    pub(crate) fn negative_ttl_s(&self) -> u32 {
        let soa = self.soa();
        let minimum = soa.rdata[0].last_chunk().map_or(0, |octets| u32::from_be_bytes(*octets));
        soa.ttl_s.min(minimum)
    }

    /// The highest delegated name at or above `name`.
    pub(crate) fn cut<'a>(&self, name: &'a [u8]) -> Option<&'a [u8]> {
        let above = suffixes(name).take_while(|suffix| suffix.len() > self.apex.len());
        above.filter(|suffix| self.has(suffix, rtype::NS)).last()
    }

    /// The wildcard directly below `name`.
    pub(crate) fn wildcard(&self, name: &[u8]) -> Option<(&[u8], &Sets)> {
        let found = self.names.get_key_value([b"\x01*", name].concat().as_slice())?;
        Some((found.0, found.1))
    }

    /// The name itself if it exists, or the wildcard that answers for it (RFC 4592, 3.3.1).
    pub(crate) fn stands_for(&self, name: &[u8]) -> Option<(&[u8], &Sets)> {
        if let Some((name, sets)) = self.names.get_key_value(name) {
            return Some((name, sets));
        }
        let closest = suffixes(name).find(|above| self.names.contains_key(*above))?;
        self.wildcard(closest)
    }

    pub(crate) fn has(&self, name: &[u8], rtype: u16) -> bool {
        self.names.get(name).is_some_and(|sets| sets.contains_key(&rtype))
    }
}

/// A name and its ancestors, without the root.
pub(crate) fn suffixes(mut name: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let whole = name;
        let label_len = usize::from(*whole.first().filter(|len| **len > 0)?);
        name = whole.get(1 + label_len..)?;
        Some(whole)
    })
}

/// True if `name` is `top` or a name below it.
pub(crate) fn is_within(name: &[u8], top: &[u8]) -> bool {
    name == top || top == [0] || suffixes(name).any(|suffix| suffix == top)
}

/// A name in presentation format.
pub(crate) fn shown(name: &[u8]) -> String {
    Name::from_octets(name).map_or_else(|_| format!("{name:?}"), |name| name.to_string())
}

/// True if a name with an alias may also have records of this type (RFC 4035, 2.5), which are
/// answered directly.
pub(crate) fn is_of_alias(rtype: &u16) -> bool {
    [rtype::CNAME, rtype::RRSIG, rtype::NSEC].contains(rtype)
}

fn add(names: &mut BTreeMap<WireName, Sets>, record: &ScannedRecord) -> Result<(), Error> {
    let owner = record.owner().to_vec();
    if record.class() != Class::IN {
        return Err(Error::Class(owner.to_string(), record.class()));
    }
    let owner = owner.as_slice().to_ascii_lowercase().into_boxed_slice();
    let mut rdata = Vec::new();
    let Ok(()) = record.data().compose_canonical_rdata(&mut rdata);
    let ttl_s = record.ttl().as_secs();
    let sets = names.entry(owner).or_default();
    let set = sets.entry(record.rtype().to_int()).or_insert(Set { ttl_s, rdata: Vec::new() });
    // A set has one time to live (RFC 2181, 5.2).
    set.ttl_s = set.ttl_s.min(ttl_s);
    set.rdata.push(rdata);
    Ok(())
}

/// Sorts a name's records, and rejects impossible combinations.
fn check(apex: &[u8], name: &[u8], sets: &mut Sets) -> Result<(), Error> {
    for set in sets.values_mut() {
        set.rdata.sort_unstable();
        set.rdata.dedup();
    }
    if !is_within(name, apex) {
        return Err(Error::OutOfZone(shown(name)));
    }
    if sets.contains_key(&rtype::DNAME) {
        return Err(Error::Dname(shown(name)));
    }
    match sets.get(&rtype::CNAME) {
        Some(_) if !sets.keys().all(is_of_alias) => Err(Error::AliasWithOthers(shown(name))),
        Some(alias) if alias.rdata.len() > 1 => Err(Error::ManyAliases(shown(name))),
        _ => Ok(()),
    }
}

/// Adds the empty non-terminals between the apex and names with records: they exist.
fn add_between(names: &mut BTreeMap<WireName, Sets>, apex: &[u8]) {
    let between = |name: &WireName| {
        let above = suffixes(name).skip(1).take_while(|above| above.len() > apex.len());
        above.map(Box::from).collect::<Vec<WireName>>()
    };
    for name in names.keys().flat_map(between).collect::<Vec<_>>() {
        names.entry(name).or_default();
    }
}

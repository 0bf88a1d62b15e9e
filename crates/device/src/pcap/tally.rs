//! Counts of a capture's records.

use std::collections::BTreeMap;

use forebay_sys::error::{Error, Result};

use super::link::{LinkType, READ};

/// Damage of a capture that did not end it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Damage {
    /// Number of records skipped as damaged.
    pub records: u64,
    /// Description of the first damaged record: file, damage and offset.
    pub first: Option<String>,
}

/// Maximum number of link types whose unreadable records are counted apart. Each poll of a source tells all counts.
const UNREAD_TYPES_MAX: usize = 64;

/// Counts of records passed, by result.
#[derive(Default)]
pub(super) struct Tally {
    /// Number of records that could be read.
    pub(super) read: u64,
    /// Number of records that could not be read, by link type, and of all types beyond the limit.
    unread: BTreeMap<LinkType, u64>,
    damage: Damage,
    /// Offset of the first record that is unreadable or damaged.
    first_bad: Option<u64>,
}

impl Tally {
    #[cold]
    pub(super) fn count_unread(&mut self, link_type: LinkType, offset: u64) {
        count(&mut self.unread, link_type, LinkType::OTHERS, 1);
        self.first_bad.get_or_insert(offset);
    }

    #[cold]
    pub(super) fn count_damaged(&mut self, name: &str, problem: &str, offset: u64) {
        self.damage.records += 1;
        self.first_bad.get_or_insert(offset);
        self.damage.first.get_or_insert_with(|| format!("{name}: {problem} at {offset}"));
    }

    pub(super) fn damage(&self) -> &Damage {
        &self.damage
    }

    /// Returns the number of unreadable records, by the name of their link type.
    pub(super) fn unread(&self) -> impl Iterator<Item = (String, u64)> {
        self.unread.iter().map(|(link_type, count)| (link_type.to_string(), *count))
    }

    pub(super) fn unread_records(&self) -> u64 {
        self.unread.values().sum()
    }

    /// Checks, for a capture read to its end, that any of its records could be delivered. A capture
    /// without records passes.
    pub(super) fn verdict(&self, name: &str) -> Result<()> {
        let Some(offset) = self.first_bad.filter(|_| self.read == 0) else { return Ok(()) };
        let unread =
            self.unread().map(|(link_type, count)| format!("{count} of link type {link_type}"));
        let damaged = Some(self.damage.records).filter(|&count| count > 0);
        let damaged = damaged.map(|count| format!("{count} damaged"));
        let bad: Vec<_> = unread.chain(damaged).collect();
        let help = if self.unread.is_empty() {
            "the file is damaged: repair it, or give another".to_owned()
        } else if self.unread.keys().all(|link_type| link_type.is_read()) {
            "its packets are encrypted, in pieces, or of protocols that are not read: give a capture \
             with IP packets"
                .to_owned()
        } else {
            format!("give a capture of a link type that is read: {READ}")
        };
        let problem = format!("none of its records can be read ({}), the first", shown(&bad));
        Err(Error::Capture { name: name.to_owned(), offset, problem, help })
    }
}

/// Counts unreadable records of a link type: apart, or with the `others` that are beyond the limit.
pub(super) fn count<Name: Ord>(
    unread: &mut BTreeMap<Name, u64>,
    link_type: Name,
    others: Name,
    records: u64,
) {
    let is_apart = unread.len() < UNREAD_TYPES_MAX || unread.contains_key(&link_type);
    *unread.entry(if is_apart { link_type } else { others }).or_default() += records;
}

/// Joins the first few parts, as many as a person reads.
fn shown(parts: &[String]) -> String {
    const SHOWN_MAX: usize = 8;
    let shown = parts.iter().take(SHOWN_MAX).cloned().collect::<Vec<_>>().join(", ");
    if parts.len() > SHOWN_MAX { format!("{shown}, …") } else { shown }
}

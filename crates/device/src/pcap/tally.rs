//! Outcome of a capture's records.

use std::collections::BTreeMap;

use forebay_sys::error::{Error, Result};

use super::link::{LinkType, READ};

/// Flaws of a capture that did not end it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Damage {
    /// Records that were passed over.
    pub records: u64,
    /// The first of them: where and what.
    pub first: Option<String>,
}

/// Records that were passed, by what became of them.
#[derive(Default)]
pub(super) struct Tally {
    /// Records that could be read.
    pub(super) read: u64,
    /// Records of link types that are not read, of which there are 65,536 in a capture at most.
    unread: BTreeMap<LinkType, u64>,
    damage: Damage,
    /// Offset of the first that could not be read, or is damaged.
    first_bad: Option<u64>,
}

impl Tally {
    #[cold]
    pub(super) fn count_unread(&mut self, link_type: LinkType, offset: u64) {
        *self.unread.entry(link_type).or_default() += 1;
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

    /// Records of link types that are not read, by their name.
    pub(super) fn unread(&self) -> impl Iterator<Item = (String, u64)> {
        self.unread.iter().map(|(link_type, count)| (link_type.to_string(), *count))
    }

    pub(super) fn unread_records(&self) -> u64 {
        self.unread.values().sum()
    }

    /// Says of a capture that is read to its end whether any of its records could be delivered, if
    /// there were any.
    pub(super) fn verdict(&self, name: &str) -> Result<()> {
        let Some(offset) = self.first_bad.filter(|_| self.read == 0) else { return Ok(()) };
        let unread =
            self.unread().map(|(link_type, count)| format!("{count} of link type {link_type}"));
        let damaged = Some(self.damage.records).filter(|&count| count > 0);
        let damaged = damaged.map(|count| format!("{count} damaged"));
        let bad: Vec<_> = unread.chain(damaged).collect();
        let help = if self.unread.is_empty() {
            "the file is damaged: repair it, or give another".to_owned()
        } else {
            format!("give a capture of a link type that is read: {READ}")
        };
        let problem = format!("none of its records can be read ({}), the first", shown(&bad));
        Err(Error::Capture { name: name.to_owned(), offset, problem, help })
    }
}

/// As many as a person reads.
fn shown(parts: &[String]) -> String {
    const SHOWN_MAX: usize = 8;
    let shown = parts.iter().take(SHOWN_MAX).cloned().collect::<Vec<_>>().join(", ");
    if parts.len() > SHOWN_MAX { format!("{shown}, …") } else { shown }
}

//! Sets of CPUs in text: the kernel's bitmaps, and lists.

use std::fmt;

use forebay_rx::CpuId;

use super::errno::Errno;
use super::number::is_space;

/// Limit of CPU numbers: CPUs 0 to 4095 can be written.
pub const MAX_CPUS: u16 = 4096;

/// CPUs in each group of a bitmap.
const GROUP_BITS: u16 = 32;

/// Hexadecimal digits in each group of a bitmap.
const GROUP_DIGITS: usize = 8;

/// Set of CPUs, in ascending order.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CpuList(Vec<CpuId>);

/// Error in a bitmap or list, by the kernel's errno.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MaskError {
    /// An invalid character (`EINVAL`).
    #[error("a mask is hexadecimal, as in 3 or ff,00000000; a list is as in 0-3,8 (EINVAL)")]
    Invalid,
    /// A group of more than 32 bits, or a CPU number out of range (`EOVERFLOW`).
    #[error("a CPU beyond what there can be, or a group of more than 8 digits (EOVERFLOW)")]
    Overflow,
}

impl From<MaskError> for Errno {
    fn from(error: MaskError) -> Self {
        match error {
            MaskError::Invalid => Self::Inval,
            MaskError::Overflow => Self::Overflow,
        }
    }
}

impl CpuList {
    /// Creates a set of these CPUs.
    #[must_use]
    pub fn new(cpus: impl IntoIterator<Item = CpuId>) -> Self {
        let mut cpus: Vec<_> = cpus.into_iter().collect();
        cpus.sort_unstable();
        cpus.dedup();
        Self(cpus)
    }

    /// Parses a value for `rps_cpus`: a bitmap as the kernel accepts it, or a list if it contains a
    /// dash.
    ///
    /// # Errors
    /// As the kernel's.
    pub fn parse_mask_or_list(text: &str) -> Result<Self, MaskError> {
        Mask::read_or_list(text.as_bytes(), MAX_CPUS)?.without_junk()
    }

    /// Parses a bitmap (`bitmap_parse` in lib/bitmap-str.c): groups of 32 bits in hexadecimal, the
    /// most significant first, separated by any number of commas and white space.
    ///
    /// # Errors
    /// As the kernel's, and for invalid characters that the kernel overlooks.
    pub fn parse_mask(text: &str) -> Result<Self, MaskError> {
        Mask::read(text.as_bytes(), MAX_CPUS)?.without_junk()
    }

    /// Parses a list: numbers and ranges, separated by commas.
    ///
    /// # Errors
    /// If the text is not a list.
    pub fn parse_list(text: &str) -> Result<Self, MaskError> {
        read_list(text, MAX_CPUS)
    }

    /// CPUs in ascending order.
    #[must_use]
    pub fn cpus(&self) -> &[CpuId] {
        &self.0
    }

    /// True if the set is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// True if `cpu` is in the set.
    #[must_use]
    pub fn contains(&self, cpu: CpuId) -> bool {
        self.0.binary_search(&cpu).is_ok()
    }

    /// Copy of the set with `cpu` added, or removed.
    #[must_use]
    pub fn with(&self, cpu: CpuId, is_in: bool) -> Self {
        let others = self.0.iter().copied().filter(|other| *other != cpu);
        Self::new(others.chain(is_in.then_some(cpu)))
    }

    /// Splits the set into the CPUs that are in `others`, and those that are not.
    #[must_use]
    pub fn split_by(&self, others: &Self) -> (Self, Self) {
        let (among, beyond) = self.0.iter().copied().partition(|cpu| others.contains(*cpu));
        (Self(among), Self(beyond))
    }

    /// Bitmap of `cpus` CPUs as the kernel prints it (`%*pb`): the first group only as wide as
    /// needed.
    #[must_use]
    pub fn to_mask(&self, cpus: u16) -> String {
        let width = u32::from(cpus.max(1));
        let groups = width.div_ceil(u32::BITS);
        let mut words = vec![0u32; groups as usize];
        for cpu in &self.0 {
            if let Some(word) = words.get_mut(cpu.index() / 32) {
                *word |= 1 << (cpu.0 % 32);
            }
        }
        let first_bits = width - (groups - 1) * u32::BITS;
        let mut text = String::new();
        for (place, word) in words.iter().rev().enumerate() {
            let digits = if place == 0 { first_bits.div_ceil(4) as usize } else { GROUP_DIGITS };
            let comma = if place == 0 { "" } else { "," };
            text += &format!("{comma}{word:0digits$x}");
        }
        text
    }
}

impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0.as_slice();
        let mut comma = "";
        while let Some(first) = rest.first() {
            let run = (0..).zip(rest).take_while(|(ahead, cpu)| cpu.0 - first.0 == *ahead).count();
            let last = rest[run - 1];
            if run == 1 {
                write!(f, "{comma}{first}")?;
            } else {
                write!(f, "{comma}{first}-{last}")?;
            }
            (rest, comma) = (&rest[run..], ",");
        }
        Ok(())
    }
}

/// Bitmap as the kernel reads it.
#[derive(PartialEq, Eq, Debug)]
pub struct Mask {
    /// CPUs whose bits are set.
    pub cpus: CpuList,
    /// True if an invalid character stands directly in front of eight digits, where the kernel does
    /// not see it.
    pub has_junk: bool,
}

impl Mask {
    /// Parses a list if the text has a dash and is one, else a bitmap, of CPUs below `cpus`. A
    /// newline or a NUL ends the text.
    ///
    /// # Errors
    /// As the kernel's.
    pub fn read_or_list(written: &[u8], cpus: u16) -> Result<Self, MaskError> {
        let line = line(written);
        let list = std::str::from_utf8(line).ok().filter(|line| line.contains('-'));
        match list.map(|list| read_list(list, cpus)) {
            Some(Ok(cpus)) => Ok(Self { cpus, has_junk: false }),
            Some(Err(MaskError::Overflow)) => Err(MaskError::Overflow),
            Some(Err(MaskError::Invalid)) | None => Self::read(line, cpus),
        }
    }

    /// Parses a bitmap of `cpus` bits, from its end as the kernel does: the order decides which
    /// error is reported.
    fn read(written: &[u8], cpus: u16) -> Result<Self, MaskError> {
        let groups = cpus.div_ceil(GROUP_BITS);
        let mut rest = without_separators(line(written));
        let mut found = Vec::new();
        let mut has_junk = false;
        for group in 0.. {
            if rest.is_empty() {
                break;
            }
            // A group beyond the bitmap overflows, even if it is zero.
            if group == groups {
                return Err(MaskError::Overflow);
            }
            let (front, digits) = rest.split_at(rest.len() - last_digits(rest));
            rest = match front.split_last() {
                Some((junk, before)) if !is_separator(*junk) => {
                    // Another character inside a group (`bitmap_get_x32_reverse`).
                    if digits.len() < GROUP_DIGITS {
                        return Err(MaskError::Invalid);
                    }
                    // A ninth digit of a group.
                    if junk.is_ascii_hexdigit() {
                        return Err(MaskError::Overflow);
                    }
                    // The kernel looks only for a ninth digit here, and skips any other character.
                    has_junk = true;
                    without_separators(before)
                }
                _ => without_separators(front),
            };
            let first = u32::from(group * GROUP_BITS);
            found.extend(bits(digits).map(|bit| first + bit));
        }
        let cpus = found.into_iter().map(|number| cpu(number.into(), cpus));
        Ok(Self { cpus: CpuList::new(cpus.collect::<Result<Vec<_>, _>>()?), has_junk })
    }

    fn without_junk(self) -> Result<CpuList, MaskError> {
        if self.has_junk { Err(MaskError::Invalid) } else { Ok(self.cpus) }
    }
}

/// Part of a text that the kernel parses.
fn line(written: &[u8]) -> &[u8] {
    written.split(|byte| matches!(byte, b'\n' | 0)).next().unwrap_or_default()
}

fn is_separator(byte: u8) -> bool {
    is_space(byte) || byte == b','
}

fn without_separators(text: &[u8]) -> &[u8] {
    let separators = text.iter().rev().take_while(|byte| is_separator(**byte)).count();
    &text[..text.len() - separators]
}

/// Number of characters at the end that form one group.
fn last_digits(text: &[u8]) -> usize {
    let last = text.iter().rev().take(GROUP_DIGITS);
    last.take_while(|byte| byte.is_ascii_hexdigit()).count()
}

/// Bits that are set in a group.
fn bits(digits: &[u8]) -> impl Iterator<Item = u32> + use<> {
    let values = digits.iter().filter_map(|digit| char::from(*digit).to_digit(16));
    let group = values.fold(0u32, |group, digit| group << 4 | digit);
    (0..u32::BITS).filter(move |bit| group >> bit & 1 == 1)
}

/// Reads a list. What is none is told before CPUs that cannot be.
fn read_list(text: &str, cpus: u16) -> Result<CpuList, MaskError> {
    let parts = text.trim().split(',').map(str::trim).filter(|part| !part.is_empty());
    let ranges = parts.map(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (list_number(first)?, list_number(last)?);
        if first <= last { Ok((first, last)) } else { Err(MaskError::Invalid) }
    });
    let mut named = vec![false; cpus.into()];
    for (first, last) in ranges.collect::<Result<Vec<_>, _>>()? {
        let (first, last) = (cpu(first, cpus)?, cpu(last, cpus)?);
        named[first.index()..=last.index()].fill(true);
    }
    let named = (0..).zip(named).filter(|(_, is_named)| *is_named);
    Ok(CpuList(named.map(|(number, _)| CpuId(number)).collect()))
}

/// A number of a list; the largest for one that is larger.
fn list_number(text: &str) -> Result<u64, MaskError> {
    let text = text.trim();
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if is_number { Ok(text.parse().unwrap_or(u64::MAX)) } else { Err(MaskError::Invalid) }
}

fn cpu(number: u64, cpus: u16) -> Result<CpuId, MaskError> {
    match u16::try_from(number) {
        Ok(number) if number < cpus => Ok(CpuId(number)),
        _ => Err(MaskError::Overflow),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mask(text: &str) -> Result<String, MaskError> {
        CpuList::parse_mask_or_list(text).map(|cpus| cpus.to_string())
    }

    #[test]
    fn rps_8_masks_parse_as_in_kernel() {
        for (text, cpus) in [
            ("3", "0-1"),
            ("f\n", "0-3"),
            ("0", ""),
            ("", ""),
            (",", ""),
            ("1,,5", "0,2,32"),
            (",44", "2,6"),
            ("1,00000000", "32"),
            ("00000000,00000000,00000000,0003fffe", "1-17"),
            (" A ", "1,3"),
            ("3 4", "2,32-33"),
            (" ,\t1 , ,00000002,\r", "1,32"),
            ("3\n4", "0-1"),
            ("3\0x", "0-1"),
            ("\n3", ""),
        ] {
            assert_eq!(mask(text).as_deref(), Ok(cpus), "{text:?}");
        }
        for text in ["0x3", "g", "3g", "+3", "1.5", "g,3", "0x00000003", "3-x", "all"] {
            assert_eq!(mask(text), Err(MaskError::Invalid), "{text:?}");
        }
        for text in ["123456789", "000000001", &format!("1{}", ",00000000".repeat(128))] {
            assert_eq!(mask(text), Err(MaskError::Overflow), "{text:?}");
        }
    }

    #[test]
    fn rps_8_masks_name_only_possible_cpus() {
        let read = |text: &str, cpus| {
            let mask = Mask::read_or_list(text.as_bytes(), cpus);
            mask.map(|mask| (mask.cpus.to_string(), mask.has_junk))
        };
        let overflow = Err(MaskError::Overflow);
        let cpus = |text: &str| Ok((text.to_owned(), false));
        assert_eq!(read("3", 2), cpus("0-1"));
        assert_eq!(read("4", 2), overflow);
        assert_eq!(read("0,3", 2), overflow);
        assert_eq!(read("g,3", 2), overflow, "it is not looked at");
        assert_eq!(read("3,g", 2), Err(MaskError::Invalid));
        assert_eq!(read("g,3", 33), Err(MaskError::Invalid));
        assert_eq!(read("1,0", 33), cpus("32"));
        assert_eq!(read("2,0", 33), overflow);
        assert_eq!(read("80000000", 32), cpus("31"));
        assert_eq!(read("-00000003", 2), Ok(("0-1".to_owned(), true)), "the kernel overlooks it");
        assert_eq!(read("0x00000001", 33), Ok(("0".to_owned(), true)));
        assert_eq!(read("0x00000001", 32), overflow);
        assert_eq!(read("0-1", 2), cpus("0-1"));
        assert_eq!(read("0-2", 2), overflow);
        assert_eq!(read("3,-3\n-\0af,", 2), Err(MaskError::Invalid), "it is no list");
        assert_eq!(read("7-9,x", 2), Err(MaskError::Invalid));
    }

    #[test]
    fn lists_are_read_as_well() {
        assert_eq!(mask("0-3,8").as_deref(), Ok("0-3,8"));
        assert_eq!(mask("5-5").as_deref(), Ok("5"));
        assert_eq!(CpuList::parse_list("7, 2").map(|cpus| cpus.to_string()).as_deref(), Ok("2,7"));
        for text in ["3-1", "-", "0-", "a-b", "+0-1", "1-2-3"] {
            assert_eq!(mask(text), Err(MaskError::Invalid), "{text:?}");
        }
        for text in ["0-9999", "0-4096", "7,0-99999999999999999999"] {
            assert_eq!(mask(text), Err(MaskError::Overflow), "{text:?}");
        }
    }

    #[test]
    fn rps_12_masks_print_as_in_kernel() {
        let cpus = CpuList::parse_list("1-17").unwrap();
        assert_eq!(cpus.to_mask(128), "00000000,00000000,00000000,0003fffe");
        assert_eq!(CpuList::parse_list("0-1").unwrap().to_mask(2), "3");
        assert_eq!(CpuList::parse_list("32").unwrap().to_mask(34), "1,00000000");
        assert_eq!(CpuList::default().to_mask(8), "00");
    }
}

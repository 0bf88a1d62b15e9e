//! Sets of CPUs as people and scripts write them: the kernel's bitmaps, and lists.

use std::fmt;

use path::CpuId;

/// CPUs beyond this number cannot be written down.
pub const MAX_CPUS: u16 = 4096;

/// Hexadecimal digits in each comma-separated group of a bitmap.
const GROUP_DIGITS: usize = 8;

/// Some CPUs, in ascending order, each once.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CpuList(Vec<CpuId>);

/// What is wrong with a bitmap or list; the names are those of the kernel's errno.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MaskError {
    /// A character that does not belong there (`EINVAL`).
    #[error("a mask is hexadecimal, as in 3 or ff,00000000; a list is as in 0-3,8 (EINVAL)")]
    Invalid,
    /// A group of more than 32 bits, or a CPU that cannot be (`EOVERFLOW`).
    #[error("a CPU beyond what there can be, or a group of more than 8 digits (EOVERFLOW)")]
    Overflow,
}

impl CpuList {
    /// These CPUs.
    #[must_use]
    pub fn new(cpus: impl IntoIterator<Item = CpuId>) -> Self {
        let mut cpus: Vec<_> = cpus.into_iter().collect();
        cpus.sort_unstable();
        cpus.dedup();
        Self(cpus)
    }

    /// Reads what may be written to `rps_cpus`: a bitmap as the kernel takes it
    /// (`bitmap_parse` in lib/bitmap-str.c), or a list if it has a dash in it.
    ///
    /// # Errors
    /// As the kernel's.
    pub fn parse_mask_or_list(text: &str) -> Result<Self, MaskError> {
        if text.contains('-') { Self::parse_list(text) } else { Self::parse_mask(text) }
    }

    /// Reads a bitmap: groups of 32 bits in hexadecimal, the most significant first, commas
    /// between them. Empty groups are zeros.
    ///
    /// # Errors
    /// As the kernel's.
    pub fn parse_mask(text: &str) -> Result<Self, MaskError> {
        let mut cpus = Vec::new();
        for (group, digits) in (0u32..).zip(text.trim().rsplit(',')) {
            let bits = parse_group(digits.trim())?;
            for bit in (0..u32::BITS).filter(|bit| bits >> bit & 1 == 1) {
                cpus.push(cpu(u64::from(group) * u64::from(u32::BITS) + u64::from(bit))?);
            }
        }
        Ok(Self::new(cpus))
    }

    /// Reads a list: numbers and ranges, commas between them.
    ///
    /// # Errors
    /// When it is none.
    pub fn parse_list(text: &str) -> Result<Self, MaskError> {
        let mut cpus = Vec::new();
        for part in text.trim().split(',').filter(|part| !part.trim().is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let number = |text: &str| text.trim().parse::<u64>().map_err(|_| MaskError::Invalid);
            let (first, last) = (cpu(number(first)?)?, cpu(number(last)?)?);
            if first > last {
                return Err(MaskError::Invalid);
            }
            cpus.extend((first.0..=last.0).map(CpuId));
        }
        Ok(Self::new(cpus))
    }

    /// The CPUs.
    #[must_use]
    pub fn cpus(&self) -> &[CpuId] {
        &self.0
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether `cpu` is among them.
    #[must_use]
    pub fn contains(&self, cpu: CpuId) -> bool {
        self.0.binary_search(&cpu).is_ok()
    }

    /// As the kernel prints a bitmap of `cpus` CPUs (`%*pb`): the first group only as wide as
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

fn parse_group(digits: &str) -> Result<u32, MaskError> {
    if !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return Err(MaskError::Invalid);
    }
    if digits.is_empty() {
        return Ok(0);
    }
    if digits.len() > GROUP_DIGITS {
        return Err(MaskError::Overflow);
    }
    u32::from_str_radix(digits, 16).map_err(|_| MaskError::Invalid)
}

fn cpu(number: u64) -> Result<CpuId, MaskError> {
    match u16::try_from(number) {
        Ok(number) if number < MAX_CPUS => Ok(CpuId(number)),
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
    fn rps_8_masks_are_read_as_the_kernel_reads_them() {
        for (text, cpus) in [
            ("3", "0-1"),
            ("f\n", "0-3"),
            ("0", ""),
            ("", ""),
            (",", ""),
            ("1,,5", "0,2,64"),
            (",44", "2,6"),
            ("1,00000000", "32"),
            ("00000000,00000000,00000000,0003fffe", "1-17"),
            (" A ", "1,3"),
        ] {
            assert_eq!(mask(text).as_deref(), Ok(cpus), "{text:?}");
        }
        for text in ["0x3", "g", "3 4", "1.5"] {
            assert_eq!(mask(text), Err(MaskError::Invalid), "{text:?}");
        }
        for text in ["123456789", "000000001", &format!("1{}", ",00000000".repeat(128))] {
            assert_eq!(mask(text), Err(MaskError::Overflow), "{text:?}");
        }
    }

    #[test]
    fn lists_are_read_as_well() {
        assert_eq!(mask("0-3,8").as_deref(), Ok("0-3,8"));
        assert_eq!(mask("5-5").as_deref(), Ok("5"));
        assert_eq!(CpuList::parse_list("7, 2").map(|cpus| cpus.to_string()).as_deref(), Ok("2,7"));
        for text in ["3-1", "-", "0-", "a-b"] {
            assert_eq!(mask(text), Err(MaskError::Invalid), "{text:?}");
        }
        assert_eq!(mask("0-9999"), Err(MaskError::Overflow));
    }

    #[test]
    fn rps_12_masks_are_printed_as_the_kernel_prints_them() {
        let cpus = CpuList::parse_list("1-17").unwrap();
        assert_eq!(cpus.to_mask(128), "00000000,00000000,00000000,0003fffe");
        assert_eq!(CpuList::parse_list("0-1").unwrap().to_mask(2), "3");
        assert_eq!(CpuList::parse_list("32").unwrap().to_mask(34), "1,00000000");
        assert_eq!(CpuList::default().to_mask(8), "00");
    }
}

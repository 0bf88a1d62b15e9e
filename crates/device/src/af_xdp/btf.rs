//! BTF: the kernel's description of its own types and functions (Documentation/bpf/btf.rst), read
//! as far as needed to find a function's id by name.
// The file is not trusted: every read is checked, and each type advances by at least a header.

/// BTF of the running kernel.
pub(super) const KERNEL: &str = "/sys/kernel/btf/vmlinux";

// linux/btf.h
const MAGIC: u16 = 0xeb9f;
const VERSION: u8 = 1;
/// Size of `struct btf_header`, version 1.
const HEADER_BYTES: usize = 24;
/// Size of `struct btf_type`.
const TYPE_BYTES: usize = 12;
const KIND_FUNCTION: u32 = 12;

/// Returns the BTF id of a function, or why there is none: the BTF is invalid, or has no such
/// function.
pub(super) fn function(btf: &[u8], name: &str) -> Result<u32, &'static str> {
    let sections = Sections::of(btf)?;
    let mut rest = sections.types;
    let mut id = 0;
    while !rest.is_empty() {
        id += 1; // id 0 is "void", which has no entry
        let (head, behind) = rest.split_first_chunk::<TYPE_BYTES>().ok_or("a type is cut short")?;
        let [name_offset, info, _] = words(head);
        let (kind, count) = (info >> 24 & 0x1f, info & 0xffff);
        if kind == KIND_FUNCTION && sections.name(name_offset) == Some(name.as_bytes()) {
            return Ok(id);
        }
        // Without its size the next type cannot be found.
        let extra = extra_bytes(kind, count).ok_or("a kind of type is not known")?;
        rest = behind.get(extra..).ok_or("a type is cut short")?;
    }
    Err("no such function")
}

/// Number of bytes behind a type's header (`btf_type_size` in kernel/bpf/btf.c).
fn extra_bytes(kind: u32, count: u32) -> Option<usize> {
    let count = usize::try_from(count).ok()?;
    Some(match kind {
        2 | 7..=12 | 16 | 18 => 0, // pointers, names for types, functions, floats
        1 | 14 | 17 => 4,          // integers, variables, tags of declarations
        3 => 12,                   // arrays
        4 | 5 | 15 | 19 => count * 12, // structs, unions, sections, long enumerations
        6 | 13 => count * 8,       // enumerations, prototypes
        _ => return None,
    })
}

struct Sections<'a> {
    types: &'a [u8],
    names: &'a [u8],
}

impl<'a> Sections<'a> {
    fn of(btf: &'a [u8]) -> Result<Self, &'static str> {
        let header = btf.first_chunk::<HEADER_BYTES>().ok_or("it is cut short")?;
        let &[magic_a, magic_b, version, _, ref rest @ ..] = header;
        if u16::from_ne_bytes([magic_a, magic_b]) != MAGIC || version != VERSION {
            return Err("it is of another form");
        }
        let [header_len, type_offset, type_len, name_offset, name_len] = words(rest);
        // Offsets count from the end of the header.
        let section = |offset: u32, len: u32| {
            let start = usize::try_from(u64::from(header_len) + u64::from(offset)).ok()?;
            btf.get(start..)?.get(..usize::try_from(len).ok()?)
        };
        let types = section(type_offset, type_len).ok_or("its types are cut short")?;
        let names = section(name_offset, name_len).ok_or("its names are cut short")?;
        Ok(Self { types, names })
    }

    fn name(&self, offset: u32) -> Option<&'a [u8]> {
        let behind = self.names.get(usize::try_from(offset).ok()?..)?;
        behind.split(|&byte| byte == 0).next()
    }
}

/// Splits bytes into words in native byte order.
fn words<const BYTES: usize, const WORDS: usize>(bytes: &[u8; BYTES]) -> [u32; WORDS] {
    let mut words = [0; WORDS];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
        *word = u32::from_ne_bytes(*bytes);
    }
    words
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// BTF with a pointer, an enumeration of two values, and functions `one` and `two`.
    fn small() -> Vec<u8> {
        let names = b"\0one\0two\0";
        let types: [u32; 16] =
            [0, 2 << 24, 0, 0, 6 << 24 | 2, 4, 1, 0, 5, 1, 1, 12 << 24, 0, 5, 12 << 24, 0];
        let type_len = 64;
        let mut btf = MAGIC.to_ne_bytes().to_vec();
        btf.extend([VERSION, 0]);
        for word in [24, 0, type_len, type_len, 9].into_iter().chain(types) {
            btf.extend(u32::to_ne_bytes(word));
        }
        btf.extend(names);
        btf
    }

    #[test]
    fn functions_numbered_by_kernel_btf() {
        assert_eq!(function(&small(), "one"), Ok(3));
        assert_eq!(function(&small(), "two"), Ok(4));
        assert_eq!(function(&small(), "tw"), Err("no such function"));
        assert_eq!(function(&[], "one"), Err("it is cut short"));
    }

    proptest! {
        #[test]
        fn damaged_btf_ends_the_search(
            damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
            len in 0..=120_usize,
        ) {
            let mut btf = small();
            for (at, to) in damage {
                *at.get_mut(&mut btf) = to;
            }
            btf.truncate(len);
            let _ = function(&btf, "two");
        }
    }
}

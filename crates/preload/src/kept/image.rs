//! Programs that the loader does not load the library into, so that listeners of ours are lost to them. Those that
//! `forebay exec` itself refuses are found with more care: this is a look at the first page of a file.

use std::ffi::OsStr;
use std::fs::{File, Metadata};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::getxattr;
use rustix::process::{getgid, getuid};

const PAGE_BYTES: u64 = 4096;
const SETUID: u32 = 0o4000;
const SETGID: u32 = 0o2000;

/// Places in the head of a 64-bit ELF file, and in one of its program headers.
const CLASS: usize = 4;
const PROGRAM_HEADERS: usize = 32;
const HEADER_BYTES: usize = 54;
const HEADER_COUNT: usize = 56;
const OFFSET: usize = 8;
const LEN: usize = 32;

const CLASS_64: u8 = 2;
/// Kind of the program header that names the loader (`PT_INTERP`).
const LOADER: u32 = 3;

/// Reason why the library is not loaded into a program. Of one that can be run but not read, only its privileges are known.
pub(super) fn obstacle(path: &Path) -> Option<&'static str> {
    let page = first_page(path).unwrap_or_default();
    match interpreter(&page) {
        // The kernel runs no script with other privileges.
        Some(interpreter) => {
            let path = Path::new(OsStr::from_bytes(interpreter));
            privileges(path).or_else(|| obstacle_of(&first_page(path)?))
        }
        None => privileges(path).or_else(|| obstacle_of(&page)),
    }
}

/// Privileges that a program gets as it is run, with which the loader leaves the library out.
fn privileges(path: &Path) -> Option<&'static str> {
    if becomes_other(&path.metadata().ok()?) {
        return Some("is setuid or setgid");
    }
    let has_capabilities = || getxattr(path, c"security.capability", &mut [0; 64]).is_ok();
    (!getuid().is_root() && has_capabilities()).then_some("has file capabilities")
}

/// True for a program that runs as another user than this process, or in another group.
fn becomes_other(about: &Metadata) -> bool {
    let is_set = |mode| about.mode() & mode != 0;
    is_set(SETUID) && about.uid() != getuid().as_raw()
        || is_set(SETGID) && about.gid() != getgid().as_raw()
}

fn first_page(path: &Path) -> Option<Vec<u8>> {
    let is_file = path.metadata().ok()?.is_file();
    // A pipe might be read for ever.
    let file = is_file.then(|| File::open(path).ok()).flatten()?;
    let mut page = Vec::new();
    file.take(PAGE_BYTES).read_to_end(&mut page).ok()?;
    Some(page)
}

/// Path of a script's interpreter.
fn interpreter(page: &[u8]) -> Option<&[u8]> {
    let line = page.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
    line.split(|byte| byte.is_ascii_whitespace()).find(|word| !word.is_empty())
}

fn obstacle_of(page: &[u8]) -> Option<&'static str> {
    let class = page.strip_prefix(b"\x7fELF").and(page.get(CLASS))?;
    if *class != CLASS_64 {
        return Some("is a 32-bit program");
    }
    match loader(page)? {
        None => Some("is linked statically"),
        Some(loader) if loader.windows(7).any(|it| it == b"ld-musl") => Some("uses musl"),
        Some(_) => None,
    }
}

/// Loader that a program names, cut to what the page has; `None` if the page does not have all program headers.
fn loader(page: &[u8]) -> Option<Option<&[u8]>> {
    let half = |at: usize| Some(usize::from(u16::from_ne_bytes(*page.get(at..)?.first_chunk()?)));
    let long =
        |at: usize| usize::try_from(u64::from_ne_bytes(*page.get(at..)?.first_chunk()?)).ok();
    let (first, len, count) = (long(PROGRAM_HEADERS)?, half(HEADER_BYTES)?, half(HEADER_COUNT)?);
    for index in 0..count {
        let at = first.checked_add(index.checked_mul(len)?)?;
        if u32::from_ne_bytes(*page.get(at..)?.first_chunk()?) == LOADER {
            let from = long(at.checked_add(OFFSET)?)?;
            let name = page.get(from..).unwrap_or_default();
            return Some(Some(name.get(..long(at.checked_add(LEN)?)?).unwrap_or(name)));
        }
    }
    Some(None)
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, chown};

    use super::*;

    #[test]
    fn exe_10_programs_without_loader_are_found() {
        let own = std::env::current_exe().unwrap();
        assert_eq!(obstacle(&own), None);
        let page = first_page(&own).unwrap();
        let mut wide = page.clone();
        wide[CLASS] = 1;
        assert_eq!(obstacle_of(&wide), Some("is a 32-bit program"));
        let name = loader(&page).unwrap().unwrap();
        let at = name.as_ptr() as usize - page.as_ptr() as usize;
        let mut musl = page.clone();
        musl[at..at + 8].copy_from_slice(b"/ld-musl");
        assert_eq!(obstacle_of(&musl), Some("uses musl"));
        let mut none = page.clone();
        let first = usize::from(page[PROGRAM_HEADERS]);
        for index in 0..usize::from(page[HEADER_COUNT]) {
            none[first + index * usize::from(page[HEADER_BYTES])] = 1;
        }
        assert_eq!(obstacle_of(&none), Some("is linked statically"));
        for len in 0..page.len() {
            obstacle_of(&page[..len]); // no panic
        }
    }

    #[test]
    fn exe_10_privileges_of_unreadable_are_found() {
        let program = tempfile::NamedTempFile::new().unwrap();
        let set_mode = |mode| program.as_file().set_permissions(Permissions::from_mode(mode));
        set_mode(SETUID | SETGID | 0o111).unwrap();
        assert_eq!(obstacle(program.path()), None, "it runs as the same user");
        // Only root may give it away.
        if chown(program.path(), Some(1), None).is_ok() {
            set_mode(SETUID | 0o111).unwrap();
            assert_eq!(obstacle(program.path()), Some("is setuid or setgid"));
            assert_eq!(privileges(Path::new("/nowhere")), None);
        }
    }

    #[test]
    fn exe_10_interpreters_of_scripts_are_found() {
        let script = tempfile::NamedTempFile::new().unwrap();
        for (text, found) in [
            ("#!/bin/sh -e\n", Some(&b"/bin/sh"[..])),
            ("#! /bin/sh", Some(b"/bin/sh")),
            ("#!\n/bin/sh", None),
            ("/bin/sh", None),
        ] {
            assert_eq!(interpreter(text.as_bytes()), found, "{text}");
            std::fs::write(script.path(), text).unwrap();
            assert_eq!(obstacle(script.path()), None, "{text}");
        }
        assert_eq!(obstacle(Path::new("/nowhere")), None);
        assert_eq!(obstacle(Path::new("/dev/null")), None);
    }
}

//! Programs that a library cannot be preloaded into, found out before they run.

use std::env;
use std::ffi::OsStr;
use std::fs::{self, File, Metadata};
use std::io::{self, ErrorKind, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use goblin::elf::Elf;
use rustix::fs::getxattr;
use rustix::process::getuid;

use super::usage;
use crate::failure::Failure;

const SETUID_SETGID: u32 = 0o6000;

/// Longest first line of a script (`BINPRM_BUF_SIZE`).
const SCRIPT_BYTES: usize = 256;

/// Other way for a program that cannot be preloaded.
const INSTEAD: &str =
    "let the kernel's stack serve it behind a TUN device: forebay run DEV --to tun:NAME";

/// Path of a program, by `PATH` if its name has no slash.
pub(super) fn find(name: &OsStr) -> Result<PathBuf, Failure> {
    if name.as_bytes().contains(&b'/') {
        return Ok(name.into());
    }
    let path = env::var_os("PATH").unwrap_or_default();
    let found = env::split_paths(&path).map(|folder| folder.join(name)).find(|file| file.is_file());
    found.ok_or_else(|| {
        let problem = format!("there is no program {} in PATH", name.display());
        usage(&problem, "check its name, or give its path")
    })
}

/// Refuses a program that the library would have no effect on.
pub(super) fn check(path: &Path) -> Result<(), Failure> {
    regular(path)?;
    let program = interpreter(path)?.unwrap_or_else(|| path.to_owned());
    let mode = regular(&program)?.permissions().mode();
    let bytes = fs::read(&program).map_err(unreadable(&program))?;
    // The kernel marks no program of root as secure on account of them (`cap_bprm_creds_from_file`).
    let has_capabilities = !getuid().is_root() && has_file_capabilities(&program);
    match obstacle(&bytes, mode, has_capabilities) {
        None => Ok(()),
        Some(why) => Err(usage(&format!("{} {why}", program.display()), INSTEAD)),
    }
}

/// Metadata of a program. A pipe or a device is none, and might be read for ever.
fn regular(program: &Path) -> Result<Metadata, Failure> {
    let found = fs::metadata(program).map_err(unreadable(program))?;
    if found.is_file() {
        return Ok(found);
    }
    Err(unreadable(program)(io::Error::new(ErrorKind::InvalidInput, "it is not a regular file")))
}

fn unreadable(program: &Path) -> impl Fn(io::Error) -> Failure {
    move |error| {
        let problem = format!("cannot read {}: {error}", program.display());
        usage(&problem, "check that it is a program, and may be read")
    }
}

/// Interpreter of a script.
fn interpreter(path: &Path) -> Result<Option<PathBuf>, Failure> {
    let mut start = Vec::with_capacity(SCRIPT_BYTES);
    let read =
        File::open(path).and_then(|file| file.take(SCRIPT_BYTES as u64).read_to_end(&mut start));
    read.map_err(unreadable(path))?;
    let Some(line) = start.strip_prefix(b"#!") else { return Ok(None) };
    let line = line.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let mut words = line.split(|byte| byte.is_ascii_whitespace()).filter(|word| !word.is_empty());
    let name = words.next().and_then(|word| match word.ends_with(b"/env") {
        true => words.find_map(run_by_env),
        false => Some(word),
    });
    name.map(|name| find(OsStr::from_bytes(name))).transpose()
}

/// Program that an argument of `env` names; `None` of an option or a variable.
fn run_by_env(word: &[u8]) -> Option<&[u8]> {
    let split = [&b"-S"[..], b"-vS", b"--split-string="];
    let word = split.iter().find_map(|option| word.strip_prefix(*option)).unwrap_or(word);
    let is_program = !word.is_empty() && !word.starts_with(b"-") && !word.contains(&b'=');
    is_program.then_some(word)
}

/// True for a file by which a program gets capabilities.
fn has_file_capabilities(program: &Path) -> bool {
    getxattr(program, c"security.capability", &mut [0; 64]).is_ok()
}

/// Reason why a library preloaded into this program would have no effect.
fn obstacle(bytes: &[u8], mode: u32, has_capabilities: bool) -> Option<&'static str> {
    if mode & SETUID_SETGID != 0 {
        return Some("is setuid or setgid: the loader ignores preloaded libraries");
    }
    if has_capabilities {
        return Some(
            "has file capabilities (getcap): the loader ignores preloaded libraries, unless root starts it",
        );
    }
    let Ok(elf) = Elf::parse(bytes) else { return Some("is not an ELF program") };
    let is_go = || {
        let names = elf.section_headers.iter().filter_map(|of| elf.shdr_strtab.get_at(of.sh_name));
        names.into_iter().any(|name| name == ".note.go.buildid" || name == ".gopclntab")
    };
    if is_go() {
        return Some("is written in Go, which calls the kernel without the C library");
    }
    if !elf.is_64 {
        return Some("is a 32-bit program");
    }
    match elf.interpreter {
        None => Some("is linked statically: no library can be preloaded"),
        Some(loader) if loader.contains("ld-musl") => {
            Some("uses musl, whose loader cannot load a library for glibc")
        }
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exe_1_obstacles_are_found() {
        let own = fs::read(env::current_exe().unwrap()).unwrap();
        assert_eq!(obstacle(&own, 0o755, false), None);
        assert!(obstacle(&own, 0o4755, false).unwrap().contains("setuid"));
        assert!(obstacle(&own, 0o755, true).unwrap().contains("file capabilities"));
        assert!(obstacle(b"text", 0o755, false).unwrap().contains("ELF"));
        let find = |from: &[u8]| own.windows(from.len()).position(|at| at == from);
        let mut musl = own.clone();
        // The path of the loader, wherever this is built.
        let loader = Elf::parse(&own).unwrap().interpreter.unwrap().as_bytes().to_vec();
        let at = find(&loader).unwrap();
        musl[at..at + 8].copy_from_slice(b"/ld-musl");
        assert!(obstacle(&musl, 0o755, false).unwrap().contains("musl"));
        let mut fixed = own.clone();
        let headers = Elf::parse(&own).unwrap();
        let number = headers.program_headers.iter().position(|of| of.p_type == 3).unwrap();
        let table = usize::try_from(headers.header.e_phoff).unwrap();
        let entry = table + number * usize::from(headers.header.e_phentsize);
        fixed[entry..entry + 4].fill(0); // PT_INTERP becomes PT_NULL
        assert!(obstacle(&fixed, 0o755, false).unwrap().contains("statically"));
    }

    #[test]
    fn exe_1_scripts_name_their_interpreters() {
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("script");
        let lines = [
            "#!/bin/sh -e\n",
            "#! /usr/bin/env sh\n",
            "#!/usr/bin/env -S sh -e\n",
            "#!/usr/bin/env -Ssh -e\n",
            "#!/usr/bin/env --split-string=sh -e\n",
            "#!/usr/bin/env -S WORD=x sh -e\n",
        ];
        for line in lines {
            fs::write(&script, line).unwrap();
            let found = interpreter(&script).unwrap().unwrap();
            assert!(found.ends_with("sh"), "{line}");
        }
        fs::write(&script, "#!/usr/bin/env -S\nsh\n").unwrap();
        assert_eq!(interpreter(&script).unwrap(), None, "other lines are the script's");
        fs::write(&script, "text").unwrap();
        assert_eq!(interpreter(&script).unwrap(), None);
    }
}

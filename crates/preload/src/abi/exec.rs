//! execve and its siblings: the next program of the process gets the listeners that it keeps ([`kept`]).

use std::cell::RefCell;
use std::ffi::{CStr, CString, OsStr, c_char, c_int};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::OnceLock;

use forebay_control::preload_config;

use super::keeping_errno;
use super::next::next;
use super::strings::{Strings, path_at, strings};
use crate::kept::{self, KeptSockets};
use crate::{critical, runtime};

type ByPath = unsafe extern "C" fn(*const c_char, Strings, Strings) -> c_int;
type ByFolder = unsafe extern "C" fn(c_int, *const c_char, Strings, Strings, c_int) -> c_int;
type ByDescriptor = unsafe extern "C" fn(c_int, Strings, Strings) -> c_int;

/// Variable that names libraries to the loader, up to its value.
const PRELOADED: &[u8] = b"LD_PRELOAD=";

/// Folders to search if there is no `PATH` (`_CS_PATH`).
const PATH: &[u8] = b"/bin:/usr/bin";

/// Path of this library.
static LIBRARY: OnceLock<CString> = OnceLock::new();

thread_local! {
    /// Environment of the next program. Not freed by a child of `vfork`, whose memory is the parent's: so it is the thread's, which
    /// waits for the child.
    static ENVIRONMENT: RefCell<Environment> =
        const { RefCell::new(Environment { own: Vec::new(), all: Vec::new() }) };
}

/// Variables for the next program.
struct Environment {
    own: Vec<CString>,
    /// Addresses of all, and null.
    all: Vec<*const c_char>,
}

unsafe extern "C" {
    static environ: Strings;
}

/// Finds the next definitions and the path of this library, when it is loaded: a child, in which the loader's lock may be
/// taken, may make the first call. Then makes the listeners that the process had as another program. True if there are some.
pub(super) fn loaded() -> bool {
    by_path();
    by_search();
    by_folder();
    by_descriptor();
    LIBRARY.get_or_init(library_path);
    // Read now: the program may clear its environment.
    drop(runtime::configuration());
    let kept = std::env::var(kept::VARIABLE);
    if let Ok(name) = CString::new(kept::VARIABLE) {
        // SAFETY: the loader runs this function before the program has a second thread.
        unsafe { libc::unsetenv(name.as_ptr()) };
    }
    kept.is_ok_and(|variable| kept::restore(&variable))
}

fn by_path() -> ByPath {
    next!(execve(*const c_char, Strings, Strings) -> c_int)
}

fn by_search() -> ByPath {
    next!(execvpe(*const c_char, Strings, Strings) -> c_int)
}

fn by_folder() -> ByFolder {
    next!(execveat(c_int, *const c_char, Strings, Strings, c_int) -> c_int)
}

fn by_descriptor() -> ByDescriptor {
    next!(fexecve(c_int, Strings, Strings) -> c_int)
}

/// Path by which the loader has loaded this library.
fn library_path() -> CString {
    let mut about = libc::Dl_info {
        dli_fname: ptr::null(),
        dli_fbase: ptr::null_mut(),
        dli_sname: ptr::null(),
        dli_saddr: ptr::null_mut(),
    };
    let within = loaded as *const ();
    // SAFETY: the structure has room for what the call writes; the address is that of a function.
    let is_found = unsafe { libc::dladdr(within.cast(), &raw mut about) } != 0;
    if !is_found || about.dli_fname.is_null() {
        return CString::default();
    }
    // SAFETY: the loader's string, which lives as long as the library.
    unsafe { CStr::from_ptr(about.dli_fname) }.to_owned()
}

/// Runs the program at a path by `run`, which gets its environment: this one, and what the listeners need that it is to have.
///
/// # Safety
/// `environment` is as [`strings`] takes it.
unsafe fn keeping(
    path: impl FnOnce() -> Option<PathBuf>,
    environment: Strings,
    run: impl FnOnce(Strings) -> c_int,
) -> c_int {
    let sockets = keeping_errno(|| {
        // Not longer: the thread of a child of vfork goes on in its parent.
        let _critical = critical::enter();
        KeptSockets::for_program(path)
    });
    let Some(sockets) = sockets else { return run(environment) };
    let changed = ENVIRONMENT.try_with(|changed| {
        let mut changed = changed.try_borrow_mut().ok()?;
        // SAFETY: the caller's promise.
        changed.set(&unsafe { strings(environment) }?, &sockets);
        Some(changed.all.as_ptr())
    });
    let Ok(Some(changed)) = changed else { return run(environment) };
    sockets.keep();
    let result = run(changed);
    keeping_errno(|| drop(sockets));
    result
}

impl Environment {
    /// Sets the variables that were given, and those of the library in place of what they lack.
    fn set(&mut self, given: &[&CStr], sockets: &KeptSockets) {
        let kept = [kept::VARIABLE.as_bytes(), b"="].concat();
        let configured = [preload_config::VARIABLE.as_bytes(), b"="].concat();
        let library = LIBRARY.get().map(|path| path.to_bytes()).unwrap_or_default();
        let is_loaded = |variable: &CStr| is_among(library, variable.to_bytes());
        let has = |name: &[u8]| given.iter().any(|it| it.to_bytes().starts_with(name));
        let mut own = vec![sockets.variable().unwrap_or_default().into_bytes()];
        if !has(&configured) {
            own.extend(runtime::configuration().map(|it| [&configured, it.as_bytes()].concat()));
        }
        let is_preloaded = given.iter().any(|it| is_loaded(it));
        if !is_preloaded {
            let others = given.iter().find_map(|it| it.to_bytes().strip_prefix(PRELOADED));
            let others = others.filter(|others| !others.is_empty());
            let separator = others.map_or(&b""[..], |_| b":");
            own.push([PRELOADED, library, separator, others.unwrap_or_default()].concat());
        }
        let is_replaced = |variable: &&&CStr| {
            let bytes = variable.to_bytes();
            bytes.starts_with(&kept) || !is_preloaded && bytes.starts_with(PRELOADED)
        };
        self.own = own.into_iter().filter_map(|variable| CString::new(variable).ok()).collect();
        self.all.clear();
        self.all.extend(given.iter().filter(|it| !is_replaced(it)).map(|it| it.as_ptr()));
        self.all.extend(self.own.iter().map(|it| it.as_ptr()));
        self.all.push(ptr::null());
    }
}

/// True for a variable by which the loader loads a library at this path.
fn is_among(library: &[u8], variable: &[u8]) -> bool {
    let Some(paths) = variable.strip_prefix(PRELOADED) else { return false };
    paths.split(|byte| matches!(byte, b':' | b' ')).any(|path| path == library)
}

/// Program of this name in the folders of `PATH`, as `execvp` finds it.
fn search(name: &Path) -> Option<PathBuf> {
    if name.as_os_str().as_bytes().contains(&b'/') {
        return Some(name.to_owned());
    }
    let folders = std::env::var_os("PATH").unwrap_or_else(|| OsStr::from_bytes(PATH).to_owned());
    std::env::split_paths(&folders).map(|folder| folder.join(name)).find(|file| file.is_file())
}

/// Path of what a descriptor is, or of what lies in its folder.
fn path_by_descriptor(fd: c_int, name: &Path) -> PathBuf {
    match fd {
        libc::AT_FDCWD => name.to_owned(),
        _ if name.as_os_str().is_empty() => format!("/proc/self/fd/{fd}").into(),
        _ => Path::new(&format!("/proc/self/fd/{fd}")).join(name),
    }
}

/// # Safety
/// As `execve(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn execve(path: *const c_char, argv: Strings, envp: Strings) -> c_int {
    // SAFETY: the caller's promise, here and below.
    let program = || unsafe { path_at(path) }.map(Path::to_owned);
    // SAFETY: as above.
    let run = |envp| unsafe { by_path()(path, argv, envp) };
    // SAFETY: as above.
    unsafe { keeping(program, envp, run) }
}

/// # Safety
/// As `execv(3)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn execv(path: *const c_char, argv: Strings) -> c_int {
    // SAFETY: the caller's promise, and the program's own environment.
    unsafe { execve(path, argv, environ) }
}

/// # Safety
/// As `execvpe(3)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn execvpe(name: *const c_char, argv: Strings, envp: Strings) -> c_int {
    // SAFETY: the caller's promise, here and below.
    let program = || unsafe { path_at(name) }.and_then(search);
    // SAFETY: as above.
    let run = |envp| unsafe { by_search()(name, argv, envp) };
    // SAFETY: as above.
    unsafe { keeping(program, envp, run) }
}

/// # Safety
/// As `execvp(3)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn execvp(name: *const c_char, argv: Strings) -> c_int {
    // SAFETY: the caller's promise, and the program's own environment.
    unsafe { execvpe(name, argv, environ) }
}

/// # Safety
/// As `execveat(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn execveat(
    folder: c_int,
    path: *const c_char,
    argv: Strings,
    envp: Strings,
    flags: c_int,
) -> c_int {
    // SAFETY: the caller's promise, here and below.
    let program = || unsafe { path_at(path) }.map(|path| path_by_descriptor(folder, path));
    // SAFETY: as above.
    let run = |envp| unsafe { by_folder()(folder, path, argv, envp, flags) };
    // SAFETY: as above.
    unsafe { keeping(program, envp, run) }
}

/// # Safety
/// As `fexecve(3)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn fexecve(fd: c_int, argv: Strings, envp: Strings) -> c_int {
    let program = || Some(path_by_descriptor(fd, Path::new("")));
    // SAFETY: the caller's promise, here and below.
    let run = |envp| unsafe { by_descriptor()(fd, argv, envp) };
    if envp.is_null() {
        // The C library refuses it, unlike the kernel.
        return run(envp);
    }
    // SAFETY: as above.
    unsafe { keeping(program, envp, run) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exe_10_only_whole_paths_are_preloaded() {
        let is_loaded = |variable: &str| is_among(b"/lib/own.so", variable.as_bytes());
        assert!(is_loaded("LD_PRELOAD=/lib/own.so") && is_loaded("LD_PRELOAD=/a.so:/lib/own.so b"));
        for other in ["LD_PRELOAD=", "LD_PRELOAD=/lib/own.so.1", "PRELOAD=/lib/own.so"] {
            assert!(!is_loaded(other), "{other}");
        }
    }

    #[test]
    fn exe_10_program_of_descriptor_is_found() {
        let of = |fd, name| path_by_descriptor(fd, Path::new(name));
        assert_eq!(of(libc::AT_FDCWD, "a/b"), Path::new("a/b"));
        assert_eq!(of(7, ""), Path::new("/proc/self/fd/7"));
        assert_eq!(of(7, "a"), Path::new("/proc/self/fd/7/a"));
        assert_eq!(of(7, "/bin/a"), Path::new("/bin/a"));
        assert_eq!(search(Path::new("./a")).unwrap(), Path::new("./a"));
        assert!(search(Path::new("sh")).unwrap().is_absolute());
    }
}

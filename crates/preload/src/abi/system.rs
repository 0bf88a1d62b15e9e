//! System calls that the safe modules need. They go to the kernel directly, not through the exported functions.

use std::ffi::{c_int, c_long, c_void};
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd, RawFd};
use std::sync::atomic::{AtomicU32, AtomicU64};

use forebay_device::rx_filter::FilterProtocol;
use forebay_stack::tcp::FastOpenKeys;
use forebay_sys::hidden;
use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, retry_on_intr};

use super::next::next;
use super::{address, last_error};
use crate::option::SocketOption;

/// Longest value of an option that is copied: the name of an algorithm (`TCP_CA_NAME_MAX`), `struct linger`.
const VALUE_BYTES_MAX: usize = 16;

/// Commands of `fcntl` for the signals of a file (uapi/asm-generic/fcntl.h).
pub(super) const F_SETSIG: c_int = 10;
const F_GETSIG: c_int = 11;
pub(super) const F_SETOWN_EX: c_int = 15;
const F_GETOWN_EX: c_int = 16;

/// Number of a descriptor.
pub(crate) fn number(descriptor: BorrowedFd<'_>) -> RawFd {
    descriptor.as_raw_fd()
}

/// Value of an option whose type is `int`, or shorter.
pub(crate) fn option_value(socket: BorrowedFd<'_>, option: SocketOption) -> Result<i32, Errno> {
    let mut value = [0; 4];
    read_option(socket, option, &mut value)?;
    Ok(i32::from_ne_bytes(value))
}

/// Keys of a socket's Fast Open cookies, which may be the host's; `None` without any.
pub(crate) fn fast_open_keys(socket: BorrowedFd<'_>) -> Option<FastOpenKeys> {
    let mut value = [0; 32];
    let len = read_option(socket, SocketOption::of_tcp(libc::TCP_FASTOPEN_KEY), &mut value);
    let (primary, rest) = value.split_first_chunk()?;
    match len.ok()? {
        16 => Some(FastOpenKeys { primary: *primary, backup: None }),
        32 => Some(FastOpenKeys { primary: *primary, backup: rest.first_chunk().copied() }),
        _ => None,
    }
}

/// Reads an option as far as it fits. Returns its length.
fn read_option(
    socket: BorrowedFd<'_>,
    option: SocketOption,
    value: &mut [u8],
) -> Result<usize, Errno> {
    let mut len = libc::socklen_t::try_from(value.len()).unwrap_or(0);
    // SAFETY: the call writes at most `len` bytes to `value`, which has as many, and the length to `len`.
    let result = unsafe {
        libc::syscall(
            libc::SYS_getsockopt,
            socket.as_raw_fd(),
            option.level,
            option.name,
            value.as_mut_ptr(),
            &raw mut len,
        )
    };
    if result < 0 { Err(last_error()) } else { Ok(usize::try_from(len).unwrap_or(0)) }
}

/// True if an option is not 0.
pub(crate) fn is_on(socket: BorrowedFd<'_>, option: SocketOption) -> bool {
    option_value(socket, option).is_ok_and(|value| value != 0)
}

/// True for a socket of this protocol over IP that is bound to no interface.
pub(crate) fn is_plain(socket: BorrowedFd<'_>, protocol: FilterProtocol) -> bool {
    let has = |number, expected: &[i32]| {
        option_value(socket, SocketOption::of_socket(number))
            .is_ok_and(|value| expected.contains(&value))
    };
    let (kind, number) = match protocol {
        FilterProtocol::Udp => (libc::SOCK_DGRAM, libc::IPPROTO_UDP),
        FilterProtocol::Tcp => (libc::SOCK_STREAM, libc::IPPROTO_TCP),
    };
    has(libc::SO_DOMAIN, &[libc::AF_INET, libc::AF_INET6])
        && has(libc::SO_TYPE, &[kind])
        && has(libc::SO_PROTOCOL, &[number])
        && has(libc::SO_BINDTOIFINDEX, &[0])
}

/// Value of an option of any type.
pub(crate) fn option_bytes(socket: BorrowedFd<'_>, option: SocketOption) -> Option<Vec<u8>> {
    let mut value = vec![0; VALUE_BYTES_MAX];
    let len = read_option(socket, option, &mut value).ok()?;
    value.truncate(len);
    Some(value)
}

/// True if an option of two sockets differs.
pub(crate) fn option_differs(
    one: BorrowedFd<'_>,
    other: BorrowedFd<'_>,
    option: SocketOption,
) -> bool {
    option_bytes(one, option) != option_bytes(other, option)
}

/// True if a socket has joined a group on an interface: the kernel tells the filter of its sources (`MCAST_MSFILTER`).
pub(crate) fn is_in_group(socket: BorrowedFd<'_>, level: i32, index: u32, group: IpAddr) -> bool {
    const MCAST_MSFILTER: i32 = 48; // linux/in.h
    // `struct group_filter`, with one source: a 32-bit index, the group behind 8 bytes, a mode, the number of sources.
    let mut filter = [0; 272];
    filter[..4].copy_from_slice(&index.to_ne_bytes());
    let encoded = address::encode(SocketAddr::new(group, 0));
    let Some(room) = filter.get_mut(8..8 + encoded.len()) else { return false };
    room.copy_from_slice(&encoded);
    read_option(socket, SocketOption { level, name: MCAST_MSFILTER }, &mut filter).is_ok()
}

/// Gives a socket the value that an option of another one has.
pub(crate) fn copy_option(from: BorrowedFd<'_>, to: BorrowedFd<'_>, option: SocketOption) {
    let is_buffer =
        [libc::SO_RCVBUF, libc::SO_SNDBUF].map(SocketOption::of_socket).contains(&option);
    let value = if is_buffer {
        // Half of it: the kernel doubles what is set.
        option_value(from, option).ok().map(|bytes| (bytes / 2).to_ne_bytes().to_vec())
    } else {
        option_bytes(from, option)
    };
    let Some(value) = value else { return };
    let _ = set_option(to, option, &value); // as far as it has the option
}

/// Restricts a socket that is not bound yet to IPv6, as the kernel does for one bound to an IPv6 address.
pub(crate) fn set_v6_only(socket: BorrowedFd<'_>) {
    // Ignored: the option is shown, and no more.
    let _ = set_option(socket, SocketOption::of_ipv6(libc::IPV6_V6ONLY), &1_i32.to_ne_bytes());
}

pub(super) fn set_option(
    socket: BorrowedFd<'_>,
    option: SocketOption,
    value: &[u8],
) -> Result<(), Errno> {
    let len = libc::socklen_t::try_from(value.len()).unwrap_or(0);
    // SAFETY: the call reads `len` bytes of `value`, which has as many.
    unsafe { set_option_at(socket, option, value.as_ptr().cast(), len) }
}

/// Sets an option by the program's memory.
///
/// # Safety
/// As `setsockopt(2)`.
pub(super) unsafe fn set_option_at(
    socket: BorrowedFd<'_>,
    option: SocketOption,
    value: *const c_void,
    len: libc::socklen_t,
) -> Result<(), Errno> {
    let SocketOption { level, name } = option;
    // SAFETY: the caller's promise.
    let result =
        unsafe { libc::syscall(libc::SYS_setsockopt, socket.as_raw_fd(), level, name, value, len) };
    if result < 0 { Err(last_error()) } else { Ok(()) }
}

/// Lends a descriptor by its number, which is not negative.
pub(crate) fn with_number<T>(number: RawFd, act: impl FnOnce(BorrowedFd<'_>) -> T) -> T {
    assert!(number >= 0, "a descriptor has a number");
    // SAFETY: not -1, as asserted; it is only used for this call, on behalf of the program, and what is called
    // finds out if it is open.
    act(unsafe { BorrowedFd::borrow_raw(number) })
}

/// Reads a file of the kernel. No point of cancellation: the caller may hold locks.
pub(crate) fn read_file(path: &str) -> Result<String, Errno> {
    let file = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let (mut text, mut page) = (Vec::new(), [0; 4096]);
    let end = loop {
        match retry_on_intr(|| rustix::io::read(&file, &mut page)) {
            Ok(0) => break Ok(()),
            Ok(len) => text.extend(page.iter().take(len)),
            Err(error) => break Err(error),
        }
    };
    // SAFETY: this call has opened the descriptor, and nobody else knows it.
    unsafe { rustix::io::close(file.into_raw_fd()) };
    end.map(|()| String::from_utf8_lossy(&text).into_owned())
}

/// Bytes of a file that are locked together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Span {
    pub(crate) first: u32,
    /// `None`: to the end of the longest file.
    pub(crate) len: Option<u32>,
}

/// Locks bytes of a file for this process, together with others. False if another one has some locked for itself.
pub(crate) fn lock_shared(file: BorrowedFd<'_>, span: Span) -> bool {
    lock_call(file, libc::F_SETLK, &mut span.lock(libc::F_RDLCK))
}

/// Locks bytes of a file for this process. False if another one has some locked.
pub(crate) fn lock(file: BorrowedFd<'_>, span: Span) -> bool {
    lock_call(file, libc::F_SETLK, &mut span.lock(libc::F_WRLCK))
}

/// Waits for other processes, and locks bytes of a file for this one. False if that failed.
pub(crate) fn lock_in_turn(file: BorrowedFd<'_>, span: Span) -> bool {
    lock_call(file, libc::F_SETLKW, &mut span.lock(libc::F_WRLCK))
}

/// Ends the locks of this process on bytes of a file.
pub(crate) fn unlock(file: BorrowedFd<'_>, span: Span) {
    lock_call(file, libc::F_SETLK, &mut span.lock(libc::F_UNLCK));
}

/// Process that has bytes of a file locked, other than this one.
pub(crate) fn lock_holder(file: BorrowedFd<'_>, span: Span) -> Option<i32> {
    let mut lock = span.lock(libc::F_WRLCK);
    let is_told = lock_call(file, libc::F_GETLK, &mut lock);
    (is_told && i32::from(lock.l_type) != libc::F_UNLCK).then_some(lock.l_pid)
}

fn lock_call(file: BorrowedFd<'_>, command: c_int, lock: &mut libc::flock) -> bool {
    // SAFETY: the call reads and writes the structure, which outlives it.
    unsafe { libc::syscall(libc::SYS_fcntl, file.as_raw_fd(), command, &raw mut *lock) == 0 }
}

impl Span {
    fn lock(self, kind: c_int) -> libc::flock {
        libc::flock {
            l_type: kind.try_into().unwrap_or_default(),
            l_whence: 0,
            l_start: self.first.into(),
            l_len: self.len.map_or(0, i64::from), // 0: to the end
            l_pid: 0,
        }
    }
}

/// Words at the beginning of a file, shared with all processes that have a copy of this mapping. They are never
/// unmapped.
pub(crate) fn shared_words<T: SharedWord, const N: usize>(
    file: BorrowedFd<'_>,
) -> std::io::Result<&'static [T; N]> {
    rustix::fs::ftruncate(file, size_of::<[T; N]>() as u64)?;
    map_words(file)
}

/// Words that other processes share already. A file that is shorter has none.
pub(crate) fn kept_words<T: SharedWord, const N: usize>(
    file: BorrowedFd<'_>,
) -> std::io::Result<&'static [T; N]> {
    let has_all = u64::try_from(rustix::fs::fstat(file)?.st_size)
        .is_ok_and(|len| len >= size_of::<[T; N]>() as u64);
    if has_all { map_words(file) } else { Err(Errno::INVAL.into()) }
}

/// Maps words of a file that has them.
fn map_words<T: SharedWord, const N: usize>(
    file: BorrowedFd<'_>,
) -> std::io::Result<&'static [T; N]> {
    let bytes = size_of::<[T; N]>();
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping, at an address that the kernel chooses.
    let place = unsafe {
        libc::mmap(std::ptr::null_mut(), bytes, protection, libc::MAP_SHARED, file.as_raw_fd(), 0)
    };
    if place == libc::MAP_FAILED {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the mapping begins at a page, has room for the words, of which all bits are values, and is never unmapped; no
    // process makes the file shorter. All processes only access the words as atomics.
    Ok(unsafe { &*place.cast::<[T; N]>() })
}

/// Word that processes may share.
///
/// # Safety
/// All bits are values, the alignment is at most a page, and the word is an atomic.
pub(crate) unsafe trait SharedWord {}

// SAFETY: an atomic, aligned to its size, of which all bits are values.
unsafe impl SharedWord for AtomicU32 {}
// SAFETY: as above.
unsafe impl SharedWord for AtomicU64 {}

/// True for a socket of IPv6.
pub(crate) fn is_ipv6(socket: BorrowedFd<'_>) -> bool {
    option_value(socket, SocketOption::of_socket(libc::SO_DOMAIN)) == Ok(libc::AF_INET6)
}

/// Puts another file at a descriptor of the program (`dup3`).
pub(crate) fn replace(at: RawFd, by: BorrowedFd<'_>, is_cloexec: bool) -> Result<(), Errno> {
    let flags = if is_cloexec { libc::O_CLOEXEC } else { 0 };
    let next = next!(syscall(c_long, c_int, c_int, c_int) -> c_long);
    // SAFETY: the call touches no memory. The program owns the descriptor, and has asked for another socket at it.
    let result = unsafe { next(libc::SYS_dup3, by.as_raw_fd(), at, flags) };
    if result < 0 { Err(last_error()) } else { Ok(()) }
}

/// Gives a descriptor the owner, the signal and the flag (`O_ASYNC`) by which the program learns of what comes to another one.
pub(crate) fn copy_signals(from: BorrowedFd<'_>, to: BorrowedFd<'_>) {
    let call = |file: BorrowedFd<'_>, command: c_int, argument: usize| {
        // SAFETY: the owner is a structure that both calls have room for, and the other arguments are numbers.
        unsafe { libc::syscall(libc::SYS_fcntl, file.as_raw_fd(), command, argument) }
    };
    let flags = |file| usize::try_from(call(file, libc::F_GETFL, 0)).unwrap_or(0);
    let is_async = usize::try_from(libc::O_ASYNC).unwrap_or(0);
    let mut owner = [0u32; 2]; // struct f_owner_ex
    let place = (&raw mut owner).expose_provenance();
    let signal = usize::try_from(call(from, F_GETSIG, 0)).unwrap_or(0);
    // Ignored: as valid as it was there. The program may set the flag later.
    if call(from, F_GETOWN_EX, place) == 0 && owner[1] != 0 {
        call(to, F_SETOWN_EX, place);
    }
    if signal != 0 {
        call(to, F_SETSIG, signal);
    }
    if flags(from) & is_async != 0 {
        call(to, libc::F_SETFL, flags(to) | is_async);
    }
}

/// Closes a descriptor whose owner is forgotten, not dropped.
pub(crate) fn close_forgotten(descriptor: BorrowedFd<'_>) {
    hidden::reveal(descriptor);
    let next = next!(syscall(c_long, c_int) -> c_long);
    // SAFETY: the call touches no memory. Who calls it forgets the owner, so that it is closed once.
    unsafe { next(libc::SYS_close, descriptor.as_raw_fd()) };
}

/// True if the program has signal handlers, and all of them have `SA_RESTART`.
pub(crate) fn handlers_restart() -> bool {
    let handler = |signal| {
        let mut action = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: the call writes to the structure, unless the signal is reserved.
        unsafe { libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) };
        // SAFETY: zeroes are a value of it: the default handler.
        let action = unsafe { action.assume_init() };
        let is_handled = !matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN);
        is_handled.then_some(action.sa_flags & libc::SA_RESTART != 0)
    };
    let mut handlers = (1..=libc::SIGRTMAX()).filter_map(handler).peekable();
    handlers.peek().is_some() && handlers.all(|restarts| restarts)
}

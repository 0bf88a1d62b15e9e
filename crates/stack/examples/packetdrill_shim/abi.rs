//! The C interface of packetdrill (`packetdrill.h`): a table of functions, each with the state as its
//! first argument.

mod events; // poll, epoll, pipes, and the error queue

use std::ffi::{CStr, c_char, c_int, c_long, c_void};
use std::net::{IpAddr, Shutdown, SocketAddr};
use std::ptr::null;
use std::slice;

use libc::{iovec, msghdr, size_t, sockaddr_in, sockaddr_in6, socklen_t, ssize_t, timeval};

use crate::calls::{Flags, Shim};
use crate::errno::Errno;

/// Entries of the table.
const ENTRIES: usize = 33;

/// `struct packetdrill_interface`.
#[repr(C)]
pub(crate) struct Table([*const c_void; ENTRIES]);

/// Fills in the table.
///
/// # Safety
/// `flags` is null or a string, and `table` points to a table of packetdrill.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn packetdrill_interface_init(
    flags: *const c_char,
    table: *mut Table,
) {
    let flags = if flags.is_null() {
        c""
    } else {
        // SAFETY: not null, and then a string, by the caller's promise.
        unsafe { CStr::from_ptr(flags) }
    };
    let shim = Box::into_raw(Box::new(Shim::new(&flags.to_string_lossy())));
    let mut entries = [null(); ENTRIES];
    let functions: [(usize, *const ()); 24] = [
        (1, free as *const ()),
        (2, socket as *const ()),
        (3, bind as *const ()),
        (4, listen as *const ()),
        (5, accept as *const ()),
        (6, connect as *const ()),
        (7, read as *const ()),
        (8, readv as *const ()),
        (9, recv as *const ()),
        (10, recvfrom as *const ()),
        (11, recvmsg as *const ()),
        (12, write as *const ()),
        (13, writev as *const ()),
        (14, send as *const ()),
        (15, sendto as *const ()),
        (16, sendmsg as *const ()),
        (17, fcntl as *const ()),
        (18, ioctl as *const ()),
        (19, close as *const ()),
        (20, shutdown as *const ()),
        (21, getsockopt as *const ()),
        (22, setsockopt as *const ()),
        (23, events::poll as *const ()),
        (24, netdev_send as *const ()),
    ];
    for (at, function) in functions {
        entries[at] = function.cast();
    }
    entries[0] = shim.cast_const().cast();
    entries[25] = (netdev_receive as *const ()).cast();
    entries[26] = (usleep as *const ()).cast();
    entries[27] = (gettimeofday as *const ()).cast();
    entries[28] = (events::epoll_create as *const ()).cast();
    entries[29] = (events::epoll_ctl as *const ()).cast();
    entries[30] = (events::epoll_wait as *const ()).cast();
    entries[31] = (events::pipe as *const ()).cast();
    entries[32] = (events::splice as *const ()).cast();
    // SAFETY: the caller's table has room for all entries.
    unsafe { table.write(Table(entries)) };
}

fn shim<'a>(state: *mut c_void) -> &'a Shim {
    // SAFETY: packetdrill passes the pointer that it was given, until it calls `free`.
    unsafe { &*state.cast::<Shim>() }
}

/// Bytes of the caller; none of a null pointer.
fn bytes<'a>(start: *const c_void, len: usize) -> &'a [u8] {
    if start.is_null() || len == 0 {
        return &[];
    }
    // SAFETY: the caller's buffer is that long, and is not written to during the call.
    unsafe { slice::from_raw_parts(start.cast(), len) }
}

fn bytes_mut<'a>(start: *mut c_void, len: usize) -> &'a mut [u8] {
    if start.is_null() || len == 0 {
        return &mut [];
    }
    // SAFETY: the caller's buffer is that long, and nobody else uses it during the call.
    unsafe { slice::from_raw_parts_mut(start.cast(), len) }
}

fn set_errno(Errno(number): Errno) {
    // SAFETY: the call has no conditions.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: the place is that of this thread.
    unsafe { *place = number };
}

fn answer(result: Result<i32, Errno>) -> c_int {
    result.unwrap_or_else(|error| {
        set_errno(error);
        -1
    })
}

fn answer_len(result: Result<usize, Errno>) -> ssize_t {
    match result {
        Ok(len) => ssize_t::try_from(len).unwrap_or(ssize_t::MAX),
        Err(error) => {
            set_errno(error);
            -1
        }
    }
}

/// A descriptor of the kernel: packetdrill closes those that are left.
fn new_descriptor() -> c_int {
    // SAFETY: a call on a number.
    unsafe { libc::dup(2) }
}

fn close_descriptor(fd: c_int) -> c_int {
    // SAFETY: a call on a number, which the script holds.
    unsafe { libc::close(fd) }
}

fn address_of(address: *const c_void, len: socklen_t) -> Result<SocketAddr, Errno> {
    let bytes = bytes(address, len as usize);
    let family = bytes.first_chunk().map(|family| i32::from(u16::from_ne_bytes(*family)));
    let port = || Some(u16::from_be_bytes(*bytes.get(2..)?.first_chunk()?));
    let parsed = match family {
        Some(libc::AF_INET) => bytes
            .get(4..)
            .and_then(|rest| rest.first_chunk::<4>())
            .map(|octets| IpAddr::from(*octets)),
        Some(libc::AF_INET6) => bytes
            .get(8..)
            .and_then(|rest| rest.first_chunk::<16>())
            .map(|octets| IpAddr::from(*octets)),
        _ => None,
    };
    let (Some(ip), Some(port)) = (parsed, port()) else { return Err(Errno(libc::EINVAL)) };
    Ok(SocketAddr::new(ip.to_canonical(), port))
}

fn write_address(address: SocketAddr, to: *mut c_void, len: *mut socklen_t) {
    if to.is_null() || len.is_null() {
        return;
    }
    let raw = address_form(address);
    // SAFETY: not null, and then a length of the caller.
    let room = unsafe { *len } as usize;
    let fits = room.min(raw.len());
    bytes_mut(to, fits).copy_from_slice(&raw[..fits]);
    // SAFETY: as above.
    unsafe { *len = socklen_t::try_from(raw.len()).unwrap_or(0) };
}

/// `struct sockaddr_in` or `struct sockaddr_in6`.
pub(crate) fn address_form(address: SocketAddr) -> Vec<u8> {
    let mut raw = Vec::new();
    match address {
        SocketAddr::V4(address) => {
            raw.extend(2_u16.to_ne_bytes());
            raw.extend(address.port().to_be_bytes());
            raw.extend(address.ip().octets());
            raw.resize(size_of::<sockaddr_in>(), 0);
        }
        SocketAddr::V6(address) => {
            raw.extend(10_u16.to_ne_bytes());
            raw.extend(address.port().to_be_bytes());
            raw.extend([0; 4]);
            raw.extend(address.ip().octets());
            raw.resize(size_of::<sockaddr_in6>(), 0);
        }
    }
    raw
}

fn flags_of(flags: c_int) -> Flags {
    Flags {
        peeks: flags & libc::MSG_PEEK != 0,
        is_urgent: flags & libc::MSG_OOB != 0,
        never_waits: flags & libc::MSG_DONTWAIT != 0,
        more_follows: flags & libc::MSG_MORE != 0,
        ends_record: flags & libc::MSG_EOR != 0,
        waits_for_all: flags & libc::MSG_WAITALL != 0,
        wants_errors: flags & libc::MSG_ERRQUEUE != 0,
        zero_copy: flags & libc::MSG_ZEROCOPY != 0,
    }
}

/// The buffers of a vector.
fn buffers(vector: *const iovec, count: usize) -> Vec<(*mut c_void, usize)> {
    if vector.is_null() {
        return Vec::new();
    }
    // SAFETY: the caller's vector has that many entries.
    let entries = unsafe { slice::from_raw_parts(vector, count) };
    entries.iter().map(|entry| (entry.iov_base, entry.iov_len)).collect()
}

/// True if a buffer is nowhere.
fn is_bad(parts: &[(*mut c_void, usize)]) -> bool {
    parts.iter().any(|&(start, len)| start.is_null() && len > 0)
}

fn write_all(
    state: *mut c_void,
    fd: c_int,
    parts: &[(*mut c_void, usize)],
    flags: Flags,
) -> ssize_t {
    write_to(state, fd, parts, flags, None)
}

/// Writes, and opens the connection to a peer if one is given.
fn write_to(
    state: *mut c_void,
    fd: c_int,
    parts: &[(*mut c_void, usize)],
    flags: Flags,
    peer: Option<SocketAddr>,
) -> ssize_t {
    if is_bad(parts) {
        return answer_len(Err(Errno(libc::EFAULT)));
    }
    let whole: Vec<u8> =
        parts.iter().flat_map(|&(start, len)| bytes(start, len).to_vec()).collect();
    answer_len(match peer {
        Some(peer) => shim(state).write_opening(fd, &whole, flags, peer),
        None => shim(state).write(fd, &whole, flags, &packet_ends(parts, flags)),
    })
}

/// Pieces of memory that a packet has place for (`MAX_SKB_FRAGS`), where bytes are not copied into it.
const PIECES: usize = 17;

/// Places at which packets end as they have no place for more pieces.
fn packet_ends(parts: &[(*mut c_void, usize)], flags: Flags) -> Vec<usize> {
    if !flags.zero_copy || parts.len() <= PIECES {
        return Vec::new();
    }
    let whole = parts.chunks(PIECES).map(|pieces| pieces.iter().map(|(_, len)| len).sum::<usize>());
    let mut ends: Vec<usize> = whole
        .scan(0, |end, len| {
            *end += len;
            Some(*end)
        })
        .collect();
    ends.pop();
    ends
}

/// Peer to whom a write opens a connection (`MSG_FASTOPEN`), if it does.
fn opening_peer(
    flags: c_int,
    address: *const c_void,
    len: socklen_t,
) -> Result<Option<SocketAddr>, Errno> {
    if flags & libc::MSG_FASTOPEN == 0 || address.is_null() {
        return Ok(None);
    }
    let family = bytes(address, len as usize).first_chunk();
    if family.map(|family| i32::from(u16::from_ne_bytes(*family))) == Some(libc::AF_UNSPEC) {
        return Err(Errno(libc::EOPNOTSUPP));
    }
    address_of(address, len).map(Some)
}

fn read_into(
    state: *mut c_void,
    fd: c_int,
    parts: &[(*mut c_void, usize)],
    flags: Flags,
) -> ssize_t {
    if is_bad(parts) {
        return answer_len(Err(Errno(libc::EFAULT)));
    }
    let mut room = vec![0; parts.iter().map(|(_, len)| len).sum()];
    let result = shim(state).read(fd, &mut room, flags);
    let mut rest = &room[..result.unwrap_or(0)];
    for &(start, len) in parts {
        let (here, behind) = rest.split_at(len.min(rest.len()));
        bytes_mut(start, here.len()).copy_from_slice(here);
        rest = behind;
    }
    answer_len(result)
}

/// A read without flags. Of nothing, it returns at once.
fn read_some(state: *mut c_void, fd: c_int, parts: &[(*mut c_void, usize)]) -> ssize_t {
    if parts.iter().all(|(_, len)| *len == 0) {
        return answer_len(shim(state).lock().entry(fd).map(|_| 0));
    }
    read_into(state, fd, parts, Flags::default())
}

extern "C" fn free(state: *mut c_void) {
    // SAFETY: the last call with this pointer, which came from a box.
    drop(unsafe { Box::from_raw(state.cast::<Shim>()) });
}

extern "C" fn socket(state: *mut c_void, domain: c_int, _kind: c_int, _protocol: c_int) -> c_int {
    let new = shim(state).new_descriptor();
    answer(new.and_then(|fd| shim(state).socket(fd, domain)))
}

extern "C" fn bind(state: *mut c_void, fd: c_int, address: *const c_void, len: socklen_t) -> c_int {
    answer(address_of(address, len).and_then(|address| shim(state).bind(fd, address)))
}

extern "C" fn listen(state: *mut c_void, fd: c_int, backlog: c_int) -> c_int {
    answer(shim(state).listen(fd, u32::try_from(backlog).unwrap_or(u32::MAX)))
}

extern "C" fn accept(
    state: *mut c_void,
    fd: c_int,
    address: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    let new_fd = match shim(state).new_descriptor() {
        Ok(fd) => fd,
        Err(error) => return answer(Err(error)),
    };
    let accepted = shim(state).accept(fd, new_fd).map(|peer| {
        write_address(shim(state).lock().host.told(peer), address, len);
        new_fd
    });
    if accepted.is_err() {
        shim(state).lock().inlets.remove(&new_fd);
        close_descriptor(new_fd);
    }
    answer(accepted)
}

extern "C" fn connect(
    state: *mut c_void,
    fd: c_int,
    address: *const c_void,
    len: socklen_t,
) -> c_int {
    let family = bytes(address, len as usize).first_chunk();
    if family.map(|family| i32::from(u16::from_ne_bytes(*family))) == Some(libc::AF_UNSPEC) {
        return answer(shim(state).disconnect(fd));
    }
    answer(address_of(address, len).and_then(|peer| shim(state).connect(fd, peer)))
}

extern "C" fn read(state: *mut c_void, fd: c_int, start: *mut c_void, len: size_t) -> ssize_t {
    read_some(state, fd, &[(start, len)])
}

extern "C" fn readv(state: *mut c_void, fd: c_int, vector: *const iovec, count: c_int) -> ssize_t {
    let parts = buffers(vector, usize::try_from(count).unwrap_or(0));
    read_some(state, fd, &parts)
}

extern "C" fn recv(
    state: *mut c_void,
    fd: c_int,
    start: *mut c_void,
    len: size_t,
    flags: c_int,
) -> ssize_t {
    read_into(state, fd, &[(start, len)], flags_of(flags))
}

extern "C" fn recvfrom(
    state: *mut c_void,
    fd: c_int,
    start: *mut c_void,
    len: size_t,
    flags: c_int,
    _address: *mut c_void,
    _address_len: *mut socklen_t,
) -> ssize_t {
    read_into(state, fd, &[(start, len)], flags_of(flags))
}

extern "C" fn recvmsg(
    state: *mut c_void,
    fd: c_int,
    message: *mut msghdr,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the caller's message.
    let message = unsafe { &mut *message };
    if flags & libc::MSG_ERRQUEUE != 0 {
        return answer_len(events::report(shim(state), fd, message));
    }
    read_into(state, fd, &buffers(message.msg_iov, message.msg_iovlen), flags_of(flags))
}

extern "C" fn write(state: *mut c_void, fd: c_int, start: *mut c_void, len: size_t) -> ssize_t {
    write_all(state, fd, &[(start, len)], Flags::default())
}

extern "C" fn writev(state: *mut c_void, fd: c_int, vector: *const iovec, count: c_int) -> ssize_t {
    let parts = buffers(vector, usize::try_from(count).unwrap_or(0));
    write_all(state, fd, &parts, Flags::default())
}

extern "C" fn send(
    state: *mut c_void,
    fd: c_int,
    start: *mut c_void,
    len: size_t,
    flags: c_int,
) -> ssize_t {
    write_all(state, fd, &[(start, len)], flags_of(flags))
}

extern "C" fn sendto(
    state: *mut c_void,
    fd: c_int,
    start: *mut c_void,
    len: size_t,
    flags: c_int,
    address: *const c_void,
    address_len: socklen_t,
) -> ssize_t {
    match opening_peer(flags, address, address_len) {
        Ok(peer) => write_to(state, fd, &[(start, len)], flags_of(flags), peer),
        Err(error) => answer_len(Err(error)),
    }
}

extern "C" fn sendmsg(
    state: *mut c_void,
    fd: c_int,
    message: *const msghdr,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the caller's message.
    let message = unsafe { &*message };
    match opening_peer(flags, message.msg_name, message.msg_namelen) {
        Ok(peer) => {
            let parts = buffers(message.msg_iov, message.msg_iovlen);
            write_to(state, fd, &parts, flags_of(flags), peer)
        }
        Err(error) => answer_len(Err(error)),
    }
}

extern "C" fn fcntl(state: *mut c_void, fd: c_int, command: c_int, argument: c_long) -> c_int {
    let mut state = shim(state).lock();
    answer(state.entry(fd).map(|entry| match command {
        libc::F_GETFL if entry.is_nonblocking => libc::O_RDWR | libc::O_NONBLOCK,
        libc::F_GETFL => libc::O_RDWR,
        libc::F_SETFL => {
            entry.is_nonblocking = argument & c_long::from(libc::O_NONBLOCK) != 0;
            0
        }
        _ => 0,
    }))
}

extern "C" fn ioctl(state: *mut c_void, fd: c_int, request: u64, argument: *mut c_int) -> c_int {
    const SIOCINQ: u64 = 0x541b;
    const SIOCOUTQ: u64 = 0x5411;
    const SIOCATMARK: u64 = 0x8905;
    const SIOCOUTQNSD: u64 = 0x894b;
    let mut state = shim(state).lock();
    let socket = state.entry(fd).map(|entry| entry.socket);
    answer(socket.and_then(|socket| {
        let tcp = &state.host.tcp;
        let value = match request {
            SIOCINQ => tcp.queued_bytes(socket)?.1,
            SIOCOUTQ => tcp.queued_bytes(socket)?.0,
            SIOCATMARK => tcp.is_at_urgent(socket)?.into(),
            SIOCOUTQNSD => {
                tcp.queued_bytes(socket)?;
                tcp.info(socket)?.map_or(0, |info| info.unsent_bytes)
            }
            _ => return Err(Errno(libc::ENOTTY)),
        };
        // SAFETY: these requests point to an int of the caller.
        unsafe { *argument = c_int::try_from(value).unwrap_or(c_int::MAX) };
        Ok(0)
    }))
}

extern "C" fn close(state: *mut c_void, fd: c_int) -> c_int {
    if !shim(state).lock().has(fd) {
        return close_descriptor(fd);
    }
    let closed = shim(state).close(fd);
    close_descriptor(fd);
    answer(closed)
}

extern "C" fn shutdown(state: *mut c_void, fd: c_int, how: c_int) -> c_int {
    let how = match how {
        libc::SHUT_RD => Shutdown::Read,
        libc::SHUT_WR => Shutdown::Write,
        libc::SHUT_RDWR => Shutdown::Both,
        _ => return answer(Err(Errno(libc::EINVAL))),
    };
    answer(shim(state).shutdown(fd, how))
}

extern "C" fn getsockopt(
    state: *mut c_void,
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    answer(shim(state).getsockopt(fd, (level, name)).map(|told| {
        // SAFETY: the caller's length.
        let room = unsafe { *len } as usize;
        let fits = room.min(told.len());
        bytes_mut(value, fits).copy_from_slice(&told[..fits]);
        // SAFETY: as above.
        unsafe { *len = socklen_t::try_from(fits).unwrap_or(0) };
        0
    }))
}

extern "C" fn setsockopt(
    state: *mut c_void,
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    answer(shim(state).setsockopt(fd, (level, name), bytes(value, len as usize)))
}

extern "C" fn netdev_send(state: *mut c_void, start: *const c_void, len: size_t) -> c_int {
    shim(state).deliver(bytes(start, len));
    0
}

extern "C" fn netdev_receive(
    state: *mut c_void,
    start: *mut c_void,
    len: *mut size_t,
    time_us: *mut i64,
) -> c_int {
    let (packet, at_us) = shim(state).receive().unwrap_or_default();
    // SAFETY: the caller's length.
    let room = unsafe { *len };
    let fits = room.min(packet.len());
    bytes_mut(start, fits).copy_from_slice(&packet[..fits]);
    // SAFETY: as above.
    unsafe { *len = fits };
    // SAFETY: the caller's place for the time.
    unsafe { *time_us = i64::try_from(at_us).unwrap_or(i64::MAX) };
    0
}

extern "C" fn usleep(state: *mut c_void, us: u32) -> c_int {
    shim(state).sleep(us.into());
    0
}

extern "C" fn gettimeofday(state: *mut c_void, time: *mut timeval, _zone: *mut c_void) -> c_int {
    let now_us = i64::try_from(shim(state).now_us()).unwrap_or(i64::MAX);
    let now = timeval { tv_sec: now_us / 1_000_000, tv_usec: now_us % 1_000_000 };
    // SAFETY: the caller's place for the time.
    unsafe { time.write(now) };
    0
}

//! `poll` and `epoll`.

use std::collections::BTreeMap;

use forebay_stack::tcp::Readiness;

use crate::calls::{Entry, Shim, State};
use crate::errno::Errno;

/// One descriptor of a poll.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Polled {
    pub(crate) fd: i32,
    pub(crate) events: i16,
    pub(crate) revents: i16,
}

/// Descriptors that an `epoll` watches.
#[derive(Debug, Default)]
pub(crate) struct Epoll(BTreeMap<i32, Watched>);

/// A descriptor that is watched.
#[derive(Debug)]
struct Watched {
    events: u32,
    data: u64,
    /// Seen at the last report, if only changes are reported.
    seen: Seen,
    /// True after a report that was to be the only one (`EPOLLONESHOT`).
    is_spent: bool,
}

/// Signs of a change: events, bytes received so far, and writes that found no room.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Seen {
    events: u32,
    received_bytes: u64,
    full_writes: u32,
    report_wakes: u32,
}

impl Seen {
    /// True if there is news since then.
    fn has_changed(&self, now: &Self) -> bool {
        let is_writable = now.events & POLLOUT != 0;
        now.events & !self.events != 0
            || now.report_wakes != self.report_wakes
            || now.received_bytes != self.received_bytes
            || is_writable && now.full_writes != self.full_writes
    }
}

const POLLOUT: u32 = libc::EPOLLOUT.cast_unsigned();
const EDGE: u32 = libc::EPOLLET.cast_unsigned();
const ONCE: u32 = libc::EPOLLONESHOT.cast_unsigned();

impl Epoll {
    pub(crate) fn forget(&mut self, fd: i32) {
        self.0.remove(&fd);
    }
}

impl Shim {
    pub(crate) fn poll(
        &self,
        polled: &mut [Polled],
        timeout_us: Option<u64>,
    ) -> Result<i32, Errno> {
        let result = self.wait(timeout_us != Some(0), timeout_us, |state| {
            let mut count = 0;
            for polled in polled.iter_mut() {
                polled.revents = match state.readiness(polled.fd) {
                    Ok(ready) => revents(&ready, polled.events),
                    Err(_) => libc::POLLNVAL,
                };
                count += i32::from(polled.revents != 0);
            }
            if count > 0 { Ok(count) } else { Err(Errno::AGAIN) }
        });
        match result {
            Err(Errno::AGAIN) => Ok(0),
            other => other,
        }
    }

    pub(crate) fn epoll_create(&self, fd: i32) -> i32 {
        self.lock().epolls.insert(fd, Epoll::default());
        fd
    }

    pub(crate) fn epoll_ctl(
        &self,
        (epoll, fd): (i32, i32),
        operation: i32,
        (events, data): (u32, u64),
    ) -> Result<i32, Errno> {
        let mut state = self.lock();
        state.entry(fd)?;
        let Epoll(watched) = state.epolls.get_mut(&epoll).ok_or(Errno(libc::EINVAL))?;
        let is_known = watched.contains_key(&fd);
        match operation {
            libc::EPOLL_CTL_ADD if is_known => return Err(Errno(libc::EEXIST)),
            libc::EPOLL_CTL_MOD | libc::EPOLL_CTL_DEL if !is_known => {
                return Err(Errno(libc::ENOENT));
            }
            libc::EPOLL_CTL_ADD | libc::EPOLL_CTL_MOD => {
                let fresh = Watched { events, data, seen: Seen::default(), is_spent: false };
                watched.insert(fd, fresh);
            }
            libc::EPOLL_CTL_DEL => {
                watched.remove(&fd);
            }
            _ => return Err(Errno(libc::EINVAL)),
        }
        Ok(0)
    }

    /// Events and data of descriptors with news.
    pub(crate) fn epoll_wait(
        &self,
        epoll: i32,
        count: usize,
        timeout_us: Option<u64>,
    ) -> Result<Vec<(u32, u64)>, Errno> {
        let result = self.wait(timeout_us != Some(0), timeout_us, |state| {
            let mut watched = state.epolls.remove(&epoll).ok_or(Errno(libc::EBADF))?;
            let news = watched.0.iter_mut().filter_map(|(&fd, watched)| watched.news(fd, state));
            let told: Vec<_> = news.take(count).collect();
            state.epolls.insert(epoll, watched);
            if told.is_empty() { Err(Errno::AGAIN) } else { Ok(told) }
        });
        match result {
            Err(Errno::AGAIN) => Ok(Vec::new()),
            other => other,
        }
    }
}

impl Watched {
    fn news(&mut self, fd: i32, state: &mut State) -> Option<(u32, u64)> {
        let ready = state.readiness(fd).ok()?;
        let &mut Entry { socket, full_writes, .. } = state.entry(fd).ok()?;
        let wanted = (self.events & 0xffff).to_le_bytes();
        let events = revents(&ready, i16::from_le_bytes([wanted[0], wanted[1]]));
        let info = state.host.tcp.info(socket).ok().flatten();
        let now = Seen {
            events: i32::from(events).cast_unsigned(),
            received_bytes: info.map_or(0, |info| info.tally.bytes_received),
            full_writes,
            report_wakes: state.host.tcp.report_wakes(socket).unwrap_or(0),
        };
        let is_due = self.events & EDGE == 0 || self.seen.has_changed(&now);
        if now.events == 0 || self.is_spent || !is_due {
            self.seen.events &= now.events;
            return None;
        }
        self.seen = now;
        self.is_spent = self.events & ONCE != 0;
        Some((now.events, self.data))
    }
}

impl State {
    /// Readiness of a descriptor. An error alone is not readable, as in the kernel.
    pub(crate) fn readiness(&mut self, fd: i32) -> Result<Readiness, Errno> {
        let socket = self.entry(fd)?.socket;
        let mut ready = self.host.tcp.readiness(socket)?;
        if ready.failed && !ready.peer_closed {
            let unread = self.host.tcp.info(socket)?.map_or(0, |info| info.unread_bytes);
            ready.readable = unread >= self.options(fd)?.low_water_bytes;
        }
        Ok(ready)
    }
}

/// Events of a poll, as the kernel tells them.
fn revents(ready: &Readiness, events: i16) -> i16 {
    let mut is = 0;
    let mut note = |is_so: bool, event: i16| is |= if is_so { event } else { 0 };
    note(ready.readable, libc::POLLIN | libc::POLLRDNORM);
    note(ready.writable, libc::POLLOUT | libc::POLLWRNORM);
    note(ready.peer_closed, libc::POLLRDHUP);
    note(ready.urgent, libc::POLLPRI);
    let always = libc::POLLERR | libc::POLLHUP;
    note(ready.hung_up, libc::POLLHUP);
    note(ready.failed || ready.reported, libc::POLLERR);
    is & (events | always)
}

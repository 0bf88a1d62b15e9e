//! Listeners that this process closes while others serve their addresses: connections that were not accepted are passed to
//! those processes. Also the connections that such processes pass to this one.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::process;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use forebay::net::TcpListener;
use forebay_device::rx_filter::FilterProtocol;
use forebay_stack::tcp::PassedConnection;
use forebay_sys::signals::with_all_blocked;

use crate::listener::{OtherCopies, Served};
use crate::membership::Closed;
use crate::runtime::{Runtime, forks, is_running, is_taken, running};
use crate::socket::Socket;
use crate::table::Found;
use crate::{fork_locks, table};

/// Longest wait for the end of a closed listener, and pause between two looks.
const STOP_MAX: Duration = Duration::from_secs(1);
const STOP_LOOK: Duration = Duration::from_millis(1);

/// Closed listeners that live on.
static LEAVING: Mutex<Vec<Arc<Leaving>>> = Mutex::new(Vec::new());

/// Threads that go on with connections which others have passed on, and the process's end, after which none begins to: what
/// a thread has taken would end with it.
static ADOPTING: AtomicUsize = AtomicUsize::new(0);
static IS_ENDING: AtomicBool = AtomicBool::new(false);

/// Permission to take connections that others have passed on: the end of the process waits until it is dropped.
pub(crate) struct Adopting(());

impl Adopting {
    /// `None` once the process ends.
    pub(crate) fn begin() -> Option<Self> {
        ADOPTING.fetch_add(1, Ordering::SeqCst);
        let this = Self(());
        // After the count: who ends the process looks at it later.
        (!Self::are_over()).then_some(this)
    }

    /// True once the process ends.
    pub(crate) fn are_over() -> bool {
        IS_ENDING.load(Ordering::SeqCst)
    }
}

impl Drop for Adopting {
    fn drop(&mut self) {
        ADOPTING.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Stops taking connections, as the process ends.
pub(crate) fn end_adopting() {
    IS_ENDING.store(true, Ordering::SeqCst);
}

/// Forgets, in a child, what threads of the parent were doing.
pub(crate) fn forked() {
    ADOPTING.store(0, Ordering::Relaxed);
    IS_ENDING.store(false, Ordering::Relaxed);
}

/// A closed listener whose connections other processes are to take over.
struct Leaving {
    addresses: Vec<SocketAddr>,
    /// True once this process listens anew.
    is_stopped: AtomicBool,
    /// Number of forks of its process: in a child it does not live.
    forks: usize,
}

/// A closed listener with its engine's.
struct ClosedListener<'a> {
    leaving: &'a Leaving,
    tcp: &'a TcpListener,
    others: Option<&'a OtherCopies>,
}

impl Closed for ClosedListener<'_> {
    fn is_stopped(&self) -> bool {
        self.leaving.is_stopped.load(Ordering::SeqCst)
    }

    fn is_open_elsewhere(&self) -> bool {
        self.others.is_some_and(OtherCopies::exist)
    }

    fn handshake_count(&self) -> u32 {
        self.tcp.handshake_count()
    }

    fn pass_on(&self) -> Option<PassedConnection> {
        self.tcp.pass_on()
    }
}

/// Keeps the lock of this module until the process has forked.
pub(crate) fn keep_locks() {
    fork_locks::lock(&LEAVING).into_iter().for_each(fork_locks::keep);
}

/// Lets other processes take over the connections that a closed listener would get: those that serve its addresses, or that
/// will, as they have a copy of it. Until they have what has come, it lives on.
pub(crate) fn leave(served: Arc<Served>, addresses: Vec<SocketAddr>, others: Option<OtherCopies>) {
    let Some(membership) = served.membership.clone() else { return };
    let addresses: Vec<_> =
        addresses.into_iter().filter(|address| membership.close(*address)).collect();
    let leaving = Leaving { addresses, is_stopped: AtomicBool::default(), forks: forks() };
    let closed = ClosedListener { leaving: &leaving, tcp: &served.tcp, others: others.as_ref() };
    let has_others = |address: &SocketAddr| membership.has_others(*address);
    if !closed.is_open_elsewhere() && !leaving.addresses.iter().any(has_others) {
        return leaving.addresses.into_iter().for_each(|address| membership.abandon(address));
    }
    others.iter().for_each(|others| membership.note_copies(others.clone()));
    let leaving = Arc::new(leaving);
    all_leaving().push(Arc::clone(&leaving));
    let (this, part) = (Arc::clone(&leaving), Arc::clone(&membership));
    let leave = move || {
        let others = others.as_ref();
        let closed = ClosedListener { leaving: &this, tcp: &served.tcp, others };
        this.addresses.iter().for_each(|address| part.leave(*address, &closed));
        drop(served);
        end_leaving(&this);
    };
    let name = "forebay-leave";
    if let Err(error) = with_all_blocked(|| thread::Builder::new().name(name.into()).spawn(leave)) {
        report!(
            "forebay: process {} resets the connections that it has not accepted at {:?}, which it has closed, as it \
             cannot start a thread that passes them on: {error}; check the limits on threads and memory (ulimit -u, \
             ulimit -v)",
            process::id(),
            leaving.addresses
        );
        leaving.addresses.iter().for_each(|address| membership.abandon(*address));
        end_leaving(&leaving);
    }
}

/// Ends closed listeners that this process still has at an address, before it listens there anew.
pub(crate) fn stop_leaving(address: SocketAddr) {
    let is_same = |other: &SocketAddr| {
        let [ours, others] = [address, *other].map(|address| address.ip());
        let is_any = ours.is_unspecified() || others.is_unspecified();
        other.port() == address.port()
            && ours.is_ipv4() == others.is_ipv4()
            && (ours == others || is_any)
    };
    let is_its = |it: &&Arc<Leaving>| it.forks == forks() && it.addresses.iter().any(is_same);
    let stop = || {
        let stops = |it: &Arc<Leaving>| it.is_stopped.store(true, Ordering::SeqCst);
        all_leaving().iter().filter(is_its).map(stops).count() > 0
    };
    let began = Instant::now();
    while stop() && began.elapsed() < STOP_MAX {
        thread::sleep(STOP_LOOK);
    }
}

/// True while a thread goes on with connections of other processes: it may add to a listener, and then close it, if the
/// program has.
pub(crate) fn is_some_adopting() -> bool {
    ADOPTING.load(Ordering::SeqCst) > 0
}

/// True while closed listeners live on.
pub(crate) fn any_leaving() -> bool {
    all_leaving().iter().any(|leaving| leaving.forks == forks())
}

/// Adds a connection that another process has passed on to a listener of its address. False without such a listener, or
/// without room.
pub(crate) fn adopt(passed: &PassedConnection) -> bool {
    listeners_of(passed.flow().ours).into_iter().any(|address| adopt_at(address, passed))
}

/// Addresses of listeners that connections to `ours` are for: this very one first, as of a SYN.
pub(crate) fn listeners_of(ours: SocketAddr) -> [SocketAddr; 2] {
    let any: IpAddr = match ours {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    [ours.ip(), any].map(|ip| SocketAddr::new(ip, ours.port()))
}

/// Adds a connection to a listener whose address this is.
fn adopt_at(address: SocketAddr, passed: &PassedConnection) -> bool {
    let is_adopted = |socket: Found| {
        let Socket::Listener(listener) = &*socket else { return false };
        listener.addresses().any(|its| its == address)
            && listener.served_here().is_some_and(|served| served.tcp.adopt(passed))
    };
    table::within(0, u32::MAX).filter_map(table::look).any(is_adopted)
}

/// Resets a connection that no process goes on with. False if that is not possible.
pub(crate) fn reset(passed: &PassedConnection) -> bool {
    if !is_running() {
        return false;
    }
    let Ok(runtime) = running() else { return false };
    // As every listener that is closed, this one resets what nobody has accepted.
    let closed = listener_of_none(runtime, passed.flow().ours.ip());
    closed.is_some_and(|listener| listener.adopt(passed))
}

/// Listener at a port whose packets never come here.
fn listener_of_none(runtime: &Runtime, ip: IpAddr) -> Option<TcpListener> {
    let addresses = (1..=u16::MAX).map(|port| SocketAddr::new(ip, port));
    let address = addresses.rev().find(|it| !is_taken(FilterProtocol::Tcp, *it))?;
    let options = runtime.net.socket().reuse_port();
    options.listen_reserved(address, 1, None, None).ok()
}

fn end_leaving(ended: &Arc<Leaving>) {
    all_leaving().retain(|leaving| !Arc::ptr_eq(leaving, ended));
}

fn all_leaving() -> MutexGuard<'static, Vec<Arc<Leaving>>> {
    LEAVING.lock().unwrap_or_else(PoisonError::into_inner)
}

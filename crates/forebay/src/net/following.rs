//! Changes in the kernel that this host follows: addresses, gateways, and MTUs of its devices.

use std::cell::Cell;
use std::io;
use std::mem::take;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_device::Device;
use forebay_sys::clock::Clock;
use forebay_sys::error::{Error, Result};
use forebay_sys::host_facts::HostFacts;
use forebay_sys::interface::InterfaceIndex;
use forebay_sys::network_changes::{ChangesSeen, NetworkChanges};

use super::identities;
use super::shared::{CpuIndex, NetState};
use super::tcp::MtuChange;

/// CPU that follows the kernel.
const FOLLOWING_CPU: CpuIndex = CpuIndex(0);

/// Interval of looks for notifications while the CPU is at work, in ns.
const LOOK_NS: u64 = 1_000_000;

/// Shortest interval of readings, in ns, however much changes.
const READ_NS: u64 = 100_000_000;

/// Interval before a reading that failed is tried again, in ns.
const AGAIN_NS: u64 = 1_000_000_000;

/// Sockets of the namespace that the devices are in, whichever threads use them.
#[derive(Debug)]
pub(super) struct Following {
    changes: NetworkChanges,
    /// True from a change on until a reading begins, which is repeated if it fails.
    /// Locked for a look, so that nobody finds it false while another thread has taken the notification.
    has_unread: Mutex<bool>,
    /// Locked for a whole reading: an older one never replaces a newer one.
    facts: Mutex<HostFacts>,
}

impl Following {
    /// Opens the sockets, if the kernel has one of the devices.
    ///
    /// # Errors
    /// If the kernel refuses them: the process has no descriptor left.
    pub(super) fn open(devices: &[Device]) -> Result<Option<Self>> {
        let Some(device) = devices.iter().find(|device| device.via.is_interface()) else {
            return Ok(None);
        };
        let refused = |source| Error::Device {
            name: device.name.clone(),
            what: "ask for its addresses".to_owned(),
            source,
            help: "check that this process may use netlink sockets".to_owned(),
        };
        // First: what changes from now on is told.
        let changes = NetworkChanges::open().map_err(refused)?;
        let facts = Mutex::new(HostFacts::open().map_err(refused)?);
        Ok(Some(Self { changes, has_unread: Mutex::new(false), facts }))
    }

    /// Looks for notifications about these interfaces.
    ///
    /// # Errors
    /// If the program has closed the descriptor.
    fn look(&self, interfaces: &[InterfaceIndex]) -> io::Result<ChangesSeen> {
        let mut has_unread = self.has_unread();
        let seen = self.changes.look(interfaces);
        *has_unread |= seen.as_ref().map_or(true, |seen| seen.has_changed);
        seen
    }

    fn has_unread(&self) -> MutexGuard<'_, bool> {
        self.has_unread.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lends the socket for questions.
    pub(super) fn with_facts<R>(&self, ask: impl FnOnce(&mut HostFacts) -> R) -> R {
        ask(&mut self.facts.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl NetState {
    /// Reads the kernel's addresses and the MTUs again, whether it has told of a change or not.
    ///
    /// # Errors
    /// If the kernel does not answer.
    pub(super) fn follow_kernel(&self) -> Result<()> {
        let Some(following) = &self.following else { return Ok(()) };
        *following.has_unread() = true;
        self.read_now(following)
    }

    /// Reads what the kernel has told of since the last reading, on the thread that needs it.
    ///
    /// # Errors
    /// If the kernel does not answer.
    pub(super) fn follow_news(&self) -> Result<()> {
        let Some(following) = &self.following else { return Ok(()) };
        // The rest of many notifications may be about anything.
        if following.look(&self.interfaces()).is_ok_and(|seen| seen.has_more) {
            *following.has_unread() = true;
        }
        self.read_now(following)
    }

    /// Reads on a thread other than that of the CPU that follows the kernel, which goes on with the rest.
    fn read_now(&self, following: &Following) -> Result<()> {
        let read = self.read_unread(following);
        if self.mtu_walk.is_under_way() || read.is_err() {
            self.tcp.look_soon(FOLLOWING_CPU);
        }
        read
    }

    /// Reads the kernel's addresses and the MTUs again, if something has changed, and begins to tell those that depend on
    /// them. Waits for the end of a reading of another thread.
    ///
    /// # Errors
    /// If the kernel does not answer.
    fn read_unread(&self, following: &Following) -> Result<()> {
        let mtus = || self.devices.iter().map(|device| device.identity.load().mtu);
        following.with_facts(|facts| {
            if !take(&mut *following.has_unread()) {
                return Ok(());
            }
            let before: Vec<_> = mtus().collect();
            let read = identities::refresh(&self.devices, facts);
            let changes = before.into_iter().zip(mtus());
            let changes: Vec<_> =
                changes.map(|(before, now)| MtuChange::new(before, now)).collect();
            self.mtu_walk.begin(&changes, self.tcp.shard_count());
            if read.is_err() {
                *following.has_unread() = true;
            }
            read
        })
    }

    fn interfaces(&self) -> Vec<InterfaceIndex> {
        self.devices.iter().filter_map(|device| device.interface).collect()
    }
}

/// One CPU's part in following the kernel.
pub(super) struct Follower {
    shared: Arc<NetState>,
    interfaces: Vec<InterfaceIndex>,
    clock: Clock,
    /// Time of the last look by the engine's clock, in ns; that of the next reading by the own one, if one is due.
    looked_ns: u64,
    due_ns: Option<u64>,
    read_ns: u64,
    /// True if notifications may wait: the CPU looks again when it is time, and does not wait for them.
    has_more: bool,
    /// True if one may have ended a sleep since the last look.
    is_awaited: Cell<bool>,
    /// True once the program has closed the descriptor.
    is_lost: bool,
}

impl Follower {
    /// `None` if another CPU follows the kernel, or there is nothing to follow.
    pub(super) fn of(cpu: CpuIndex, shared: &Arc<NetState>) -> Option<Self> {
        if cpu != FOLLOWING_CPU || shared.following.is_none() {
            return None;
        }
        Some(Self {
            shared: Arc::clone(shared),
            interfaces: shared.interfaces(),
            clock: shared.tcp.clock().clone(),
            looked_ns: 0,
            due_ns: None,
            read_ns: 0,
            has_more: false,
            is_awaited: Cell::new(false),
            is_lost: false,
        })
    }

    /// Looks for changes, and reads what has changed if it is time.
    pub(super) fn tick(&mut self, now_ns: u64) {
        if self.shared.mtu_walk.is_under_way() {
            self.shared.walk_mtus();
        }
        let is_awaited = self.is_awaited.take();
        if now_ns.saturating_sub(self.looked_ns) < LOOK_NS {
            self.has_more |= is_awaited;
            return;
        }
        self.looked_ns = now_ns;
        self.look();
        let now_ns = self.clock.now_ns();
        if self.due_ns.is_some_and(|due_ns| due_ns <= now_ns) {
            let following = self.shared.following.as_ref();
            let is_read =
                following.is_none_or(|following| self.shared.read_unread(following).is_ok());
            self.read_ns = self.clock.now_ns();
            self.due_ns = (!is_read).then(|| self.read_ns.saturating_add(AGAIN_NS));
        }
    }

    fn look(&mut self) {
        let Some(following) = self.shared.following.as_ref().filter(|_| !self.is_lost) else {
            return;
        };
        let seen = following.look(&self.interfaces);
        self.is_lost = seen.is_err();
        let ChangesSeen { has_changed, has_more } = seen.unwrap_or_default();
        self.has_more = has_more;
        let soon_ns = self.read_ns.saturating_add(READ_NS);
        if has_changed {
            self.due_ns = Some(soon_ns);
        } else if *following.has_unread() {
            self.due_ns.get_or_insert(soon_ns);
        }
    }

    /// Descriptor that is readable once something has changed.
    pub(super) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        let following = self.shared.following.as_ref()?;
        let is_awaited = !self.has_more && !self.is_lost;
        self.is_awaited.set(is_awaited);
        is_awaited.then(|| following.changes.descriptor())
    }

    /// Time that the CPU may sleep, in ns.
    pub(super) fn sleep_max_ns(&self) -> Option<u64> {
        let walk_ns = self.shared.mtu_walk.is_under_way().then_some(0);
        let look_ns = self.has_more.then_some(LOOK_NS);
        let read_ns = self.due_ns.map(|due_ns| due_ns.saturating_sub(self.clock.now_ns()));
        walk_ns.into_iter().chain(look_ns).chain(read_ns).min()
    }
}

#[cfg(test)]
mod tests {
    use super::super::NetConfig;
    use super::super::rig::{Recording, host};
    use super::*;

    /// The descriptor stays readable until the CPU looks again.
    #[test]
    fn udp_28_notifications_do_not_keep_awake() {
        let mut state = host(vec![vec![Box::<Recording>::default() as _]], NetConfig::TCP);
        let following = Following {
            changes: NetworkChanges::open().unwrap(),
            has_unread: Mutex::new(false),
            facts: Mutex::new(HostFacts::open().unwrap()),
        };
        Arc::get_mut(&mut state).unwrap().following = Some(following);
        let mut follower = Follower::of(FOLLOWING_CPU, &state).unwrap();
        let awaits = |follower: &mut Follower, now_ns| {
            follower.tick(now_ns);
            follower.descriptor().is_some()
        };
        // Those of other tests' interfaces may wait.
        let first = (1..1000).map(|number| number * LOOK_NS);
        let looked_ns = first.into_iter().find(|&now_ns| awaits(&mut follower, now_ns)).unwrap();
        assert!(!awaits(&mut follower, looked_ns + 1), "one may have ended the sleep");
        assert!(follower.sleep_max_ns().is_some_and(|sleep_ns| sleep_ns <= LOOK_NS));
        assert!(!awaits(&mut follower, looked_ns + LOOK_NS - 1));
        assert!(awaits(&mut follower, looked_ns + LOOK_NS), "none waits");
        follower.tick(looked_ns + 3 * LOOK_NS);
        follower.tick(looked_ns + 3 * LOOK_NS + 1);
        assert!(follower.descriptor().is_some(), "the CPU has not slept");
    }
}

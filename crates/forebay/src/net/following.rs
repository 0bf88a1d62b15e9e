//! Changes in the kernel that this host follows: addresses, gateways, and MTUs of its devices.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};

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
        Ok(Some(Self { changes, facts }))
    }

    /// Lends the socket for questions.
    pub(super) fn with_facts<R>(&self, ask: impl FnOnce(&mut HostFacts) -> R) -> R {
        ask(&mut self.facts.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl NetState {
    /// Reads the kernel's addresses and the MTUs again, and tells those that depend on them.
    ///
    /// # Errors
    /// If the kernel does not answer.
    pub(super) fn follow_kernel(&self) -> Result<()> {
        let Some(following) = &self.following else { return Ok(()) };
        let mtus = || self.devices.iter().map(|device| device.identity.load().mtu);
        let (changes, read) = following.with_facts(|facts| {
            let before: Vec<_> = mtus().collect();
            let read = identities::refresh(&self.devices, facts);
            let changes = before.into_iter().zip(mtus());
            (changes.map(|(before, now)| MtuChange { before, now }).collect::<Vec<_>>(), read)
        });
        if changes.iter().any(|change| change.before != change.now) {
            self.change_mtus(&changes);
        }
        read
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
    has_more: bool,
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
            is_lost: false,
        })
    }

    /// Looks for changes, and reads what has changed if it is time.
    pub(super) fn tick(&mut self, now_ns: u64) {
        if now_ns.saturating_sub(self.looked_ns) < LOOK_NS {
            return;
        }
        self.looked_ns = now_ns;
        self.look();
        let now_ns = self.clock.now_ns();
        if self.due_ns.is_some_and(|due_ns| due_ns <= now_ns) {
            let is_read = self.shared.follow_kernel().is_ok();
            self.read_ns = self.clock.now_ns();
            self.due_ns = (!is_read).then(|| self.read_ns.saturating_add(AGAIN_NS));
        }
    }

    fn look(&mut self) {
        let Some(following) = self.shared.following.as_ref().filter(|_| !self.is_lost) else {
            return;
        };
        let seen = following.changes.look(&self.interfaces);
        self.is_lost = seen.is_err();
        let ChangesSeen { has_changed, has_more } = seen.unwrap_or_default();
        self.has_more = has_more;
        if has_changed {
            self.due_ns = Some(self.read_ns.saturating_add(READ_NS));
        }
    }

    /// Descriptor that is readable once something has changed.
    pub(super) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        let following = self.shared.following.as_ref()?;
        (!self.has_more && !self.is_lost).then(|| following.changes.descriptor())
    }

    /// Time that the CPU may sleep, in ns.
    pub(super) fn sleep_max_ns(&self) -> Option<u64> {
        let look_ns = self.has_more.then_some(LOOK_NS);
        let read_ns = self.due_ns.map(|due_ns| due_ns.saturating_sub(self.clock.now_ns()));
        look_ns.into_iter().chain(read_ns).min()
    }
}

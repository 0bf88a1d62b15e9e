//! Takeover of new connections by the newest of several processes: the older ones serve those that they have.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::thread;
use std::time::Duration;

use forebay::Device;
use forebay::net::Net;
use forebay_device::rx_filter::nothing;
use forebay_sys::socket_filter::{FilterInstruction, attach, attached};

use crate::claim::Claim;
use crate::socket::Socket;
use crate::{protected, table};

/// Time between two checks of whether the devices' filters are attached, and the number of checks: 10 s.
const ATTACHED_LOOK: Duration = Duration::from_millis(1);
const ATTACHED_LOOKS_MAX: u32 = 10_000;

/// Time between two checks of whether the last connection has ended.
const ENDED_LOOK: Duration = Duration::from_millis(100);

/// Time between two checks of whether the older processes have ended.
const OLDER_LOOK: Duration = Duration::from_secs(1);

/// Time in which others take new connections, too: they may have the SYNs of those that came before the filter, and
/// this process may not use all its listeners yet.
const OVERLAP: Duration = Duration::from_millis(10);

/// Sockets that the packets of an engine come from.
pub(crate) struct Rings(Vec<OwnedFd>);

impl Rings {
    /// Sockets of the devices.
    pub(crate) fn of(devices: &[Device]) -> io::Result<Self> {
        let sources = devices.iter().flat_map(|device| &device.sources);
        let sockets = sources.filter_map(|source| source.descriptor());
        let rings = sockets.map(protected::duplicate).collect::<Result<Vec<_>, _>>()?;
        rings.iter().for_each(|ring| protected::protect(ring.as_fd()));
        Ok(Self(rings))
    }

    /// Filters of all, once they are attached.
    fn filters(&self) -> Option<Vec<Vec<FilterInstruction>>> {
        let filters = self.0.iter().map(|ring| attached(ring.as_fd()).ok());
        let filters: Vec<_> = filters.collect::<Option<_>>()?;
        filters.iter().all(|filter| *filter != nothing()).then_some(filters)
    }

    fn attach<'a>(&self, filters: impl Iterator<Item = &'a [FilterInstruction]>) {
        for (ring, filter) in self.0.iter().zip(filters) {
            // Ignored: the device is gone, which its engine tells.
            let _ = attach(ring.as_fd(), filter);
        }
    }
}

/// Takes new connections once packets come, and leaves them to any newer process. Goes on as long as the process.
pub(crate) fn take_turns(claim: &Claim, rings: &Rings, net: &Net) {
    let looks = || {
        thread::sleep(ATTACHED_LOOK);
        rings.filters()
    };
    let Some(filters) = (0..ATTACHED_LOOKS_MAX).find_map(|_| looks()) else { return };
    thread::sleep(OVERLAP);
    if !claim.has_newer() {
        claim.lead();
    }
    loop {
        await_successor(claim);
        stop_receiving_when_idle(claim, rings, net);
        let resume = || {
            rings.attach(filters.iter().map(Vec::as_slice));
            claim.lead();
        };
        if !claim.await_newer(resume) {
            return;
        }
    }
}

/// Waits until another process takes new connections. Looks for the end of older ones, if there are such.
fn await_successor(claim: &Claim) {
    let place = claim.place();
    while place.leads() {
        claim.await_successor(place.has_older().then_some(OLDER_LOOK));
        if place.has_older() && !claim.has_older() {
            place.set_has_older(false);
        }
    }
}

/// Stops receiving once all connections have ended, unless the newer processes end before.
fn stop_receiving_when_idle(claim: &Claim, rings: &Rings, net: &Net) {
    let has_udp = || {
        let sockets = table::within(0, u32::MAX).filter_map(table::find);
        sockets.into_iter().any(|socket| matches!(&*socket, Socket::Udp(_)))
    };
    while claim.has_newer() {
        if net.flow_count() == 0 && !has_udp() {
            let nothing = nothing();
            return rings.attach(rings.0.iter().map(|_| &nothing[..]));
        }
        thread::sleep(ENDED_LOOK);
    }
}

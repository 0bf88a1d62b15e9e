//! Ways by which a socket's last datagrams came from devices that only this process has: what is then sent to their sources is an
//! answer, which need not wait for a neighbour, nor solicit one that a spoofed source pretends to be.

use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use forebay_rx::Packet;
use forebay_sys as sys;
use siphasher::sip::SipHasher13;

use super::neighbours::WayBack;

/// Number of sets, each of the ways back to some sources.
const SETS: usize = 64;
/// Number of sources in a set; a new one displaces the one that came first.
const SET_SOURCES: usize = 8;

/// Ways back to the sources of the last datagrams, at most 512. Takes memory from the first datagram on.
#[derive(Default)]
pub(super) struct WaysBack(Mutex<Option<Sets>>);

struct Sets {
    /// Secret, so that nobody can aim at a set.
    key: SipHasher13,
    sets: Box<[SourceSet; SETS]>,
}

#[derive(Clone, Copy, Default)]
struct SourceSet {
    /// Place of the next source.
    next: usize,
    sources: [Option<(u8, WayBack)>; SET_SOURCES],
}

impl WaysBack {
    /// Records the way of a packet, unless its device has no link layer.
    pub(super) fn record(&self, packet: &Packet) {
        let back = packet.view().source().and_then(|source| WayBack::of(packet, source));
        let Some(back) = back else { return };
        let device = packet.headers.device;
        let mut sets = self.lock();
        let sets = sets.get_or_insert_with(|| Sets {
            key: SipHasher13::new_with_key(&sys::random_key()),
            sets: Box::new([SourceSet::default(); SETS]),
        });
        let at = sets.place(back.source);
        let SourceSet { next, sources } = &mut sets.sets[at];
        let is_its = |known: &&mut Option<(u8, WayBack)>| {
            known.is_some_and(|(by, known)| (by, known.source) == (device, back.source))
        };
        match sources.iter_mut().find(is_its) {
            Some(known) => *known = Some((device, back)),
            None => {
                sources[*next] = Some((device, back));
                *next = (*next + 1) % SET_SOURCES;
            }
        }
    }

    /// Finds the way back to a source by a device.
    pub(super) fn find(&self, device: usize, source: IpAddr) -> Option<WayBack> {
        let sets = self.lock();
        let sets = sets.as_ref()?;
        let mut ways = sets.sets[sets.place(source)].sources.iter().flatten();
        let is_its =
            |(by, way): &&(u8, WayBack)| usize::from(*by) == device && way.source == source;
        ways.find(is_its).map(|&(_, way)| way)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Sets>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Sets {
    fn place(&self, source: IpAddr) -> usize {
        let hash = match source {
            IpAddr::V4(source) => self.key.hash(&source.octets()),
            IpAddr::V6(source) => self.key.hash(&source.octets()),
        };
        usize::try_from(hash % SETS as u64).unwrap_or(0)
    }
}

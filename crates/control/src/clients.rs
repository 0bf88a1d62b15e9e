//! Slots for the clients of the control socket: their number is limited, and a silent client makes
//! room for a new one.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use forebay_sys::hidden::Hidden;

/// Maximum number of clients served at once.
pub(super) const CLIENTS_MAX: usize = 16;

/// Maximum number of clients that watch; the other slots remain for requests.
pub(super) const WATCHES_MAX: usize = 12;

/// All slots.
#[derive(Debug, Default)]
pub(super) struct ClientSlots(Mutex<TakenSlot>);

#[derive(Debug, Default)]
struct TakenSlot {
    places: Vec<ClientPlace>,
    /// Number of the next client.
    next: u64,
    /// True if no client is admitted any more.
    is_closed: bool,
}

#[derive(Debug)]
struct ClientPlace {
    client: u64,
    stream: Hidden<UnixStream>,
    /// Time of the client's last request or answer.
    heard: Instant,
    watches: bool,
}

/// A client's slot, freed on drop.
#[derive(Debug)]
pub(super) struct ClientSlot {
    client: u64,
    slots: Arc<ClientSlots>,
}

/// Mark of a client that watches, removed on drop.
pub(super) struct Watching<'a>(&'a ClientSlot);

impl ClientSlots {
    /// Takes a slot for a client. If all are taken, the client that was silent longest is
    /// disconnected; `None` if all of them watch, or the slots are closed.
    pub(super) fn take(self: &Arc<Self>, stream: &UnixStream) -> io::Result<Option<ClientSlot>> {
        let stream = Hidden::duplicate(stream)?;
        let mut taken = self.taken();
        if taken.is_closed {
            return Ok(None);
        }
        if taken.places.len() >= CLIENTS_MAX {
            let silent = (0..taken.places.len()).filter(|&index| !taken.places[index].watches);
            let Some(index) = silent.min_by_key(|&index| taken.places[index].heard) else {
                return Ok(None);
            };
            taken.places.swap_remove(index).disconnect();
        }
        let client = taken.next;
        taken.next += 1;
        taken.places.push(ClientPlace { client, stream, heard: Instant::now(), watches: false });
        Ok(Some(ClientSlot { client, slots: Arc::clone(self) }))
    }

    /// Disconnects all clients, and admits no more.
    pub(super) fn close(&self) {
        let mut taken = self.taken();
        taken.is_closed = true;
        taken.places.drain(..).for_each(|place| place.disconnect());
    }

    fn taken(&self) -> MutexGuard<'_, TakenSlot> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ClientSlot {
    /// Records a request or an answer.
    pub(super) fn heard(&self) {
        self.change(|place| place.heard = Instant::now());
    }

    /// Marks the client as watching, unless [`WATCHES_MAX`] clients watch already.
    pub(super) fn watch(&self) -> Option<Watching<'_>> {
        let mut taken = self.slots.taken();
        let watches = taken.places.iter().filter(|place| place.watches).count();
        let mut places = taken.places.iter_mut();
        let place = places.find(|place| place.client == self.client)?;
        (watches < WATCHES_MAX).then(|| {
            place.watches = true;
            Watching(self)
        })
    }

    fn change(&self, change: impl FnOnce(&mut ClientPlace)) {
        let mut taken = self.slots.taken();
        if let Some(place) = taken.places.iter_mut().find(|place| place.client == self.client) {
            change(place);
        }
    }
}

impl ClientPlace {
    fn disconnect(self) {
        // The client's thread finds the end of the stream. An error means that the client has gone.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

impl Drop for ClientSlot {
    fn drop(&mut self) {
        self.slots.taken().places.retain(|place| place.client != self.client);
    }
}

impl Drop for Watching<'_> {
    fn drop(&mut self) {
        self.0.change(|place| place.watches = false);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    /// A client's end of a connection, and its slot.
    fn come(slots: &Arc<ClientSlots>) -> (UnixStream, Option<ClientSlot>) {
        let (client, server) = UnixStream::pair().unwrap();
        let slot = slots.take(&server).unwrap();
        (client, slot)
    }

    #[test]
    fn promise_3_longest_silent_client_makes_room() {
        let slots = Arc::new(ClientSlots::default());
        let mut clients: Vec<_> = (0..CLIENTS_MAX).map(|_| come(&slots)).collect();
        clients[0].1.as_ref().unwrap().heard();
        let (_newcomer, slot) = come(&slots);
        assert!(slot.is_some());
        assert_eq!(clients[1].0.read(&mut [0]).unwrap(), 0, "the second was silent longest");
        clients[0].0.set_nonblocking(true).unwrap();
        assert!(clients[0].0.read(&mut [0]).is_err(), "the first is still there");
        drop(clients);
        assert_eq!(slots.taken().places.len(), 1);
        slots.close();
        assert!(come(&slots).1.is_none());
    }

    #[test]
    fn promise_3_watchers_leave_place_for_others() {
        let slots = Arc::new(ClientSlots::default());
        let clients: Vec<_> = (0..CLIENTS_MAX).map(|_| come(&slots).1.unwrap()).collect();
        let watching: Vec<_> = clients.iter().filter_map(ClientSlot::watch).collect();
        assert_eq!(watching.len(), WATCHES_MAX);
        for _ in 0..2 * CLIENTS_MAX {
            assert!(come(&slots).1.is_some());
        }
        let watches = slots.taken().places.iter().filter(|place| place.watches).count();
        assert_eq!(watches, WATCHES_MAX);
        drop(watching);
        assert!(clients[0].watch().is_some());
    }
}

//! Datagram that the program sends in parts (`MSG_MORE`, `UDP_CORK`).

use std::borrow::Cow;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use forebay::net::message::Transmit;
use rustix::io::Errno;

use crate::ancillary::SendControl;

/// Destination and control data, which are those of the first part.
pub(crate) type Envelope = (SocketAddr, SendControl);

/// Parts of a datagram that is not whole yet.
#[derive(Default)]
pub(crate) struct Corked {
    /// True while all calls send parts (`UDP_CORK`).
    is_on: AtomicBool,
    /// True if there are some: without them, a call that sends takes no lock.
    has_some: AtomicBool,
    parts: Mutex<Option<(Vec<u8>, Envelope)>>,
}

impl Corked {
    pub(crate) fn set_on(&self, is_on: bool) {
        self.is_on.store(is_on, Ordering::Relaxed);
    }

    pub(crate) fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    pub(crate) fn is_empty(&self) -> bool {
        !self.has_some.load(Ordering::Acquire)
    }

    /// Adds a part. `envelope` is called for the first one, and `check` for all so far, with whether this is the first.
    /// Returns the datagram if no part follows.
    ///
    /// # Errors
    /// Errors of `envelope`, of the part and of `check`; `EMSGSIZE` if the datagram is too long. All parts are then dropped.
    pub(crate) fn add(
        &self,
        part: Result<Cow<'_, [u8]>, Errno>,
        more_follows: bool,
        envelope: impl FnOnce() -> Result<Envelope, Errno>,
        check: impl FnOnce(&[u8], Envelope, bool) -> Result<(), Errno>,
    ) -> Result<Option<(Vec<u8>, Envelope)>, Errno> {
        let mut parts = self.parts();
        let (is_first, (mut payload, envelope)) = match parts.take() {
            Some(before) => (false, before),
            None => (true, (Vec::new(), envelope()?)),
        };
        self.has_some.store(false, Ordering::Release);
        let part = part?;
        payload.extend_from_slice(&part);
        check(&payload, envelope, is_first)?;
        if payload.len() > Transmit::payload_bytes_max(envelope.0) {
            return Err(Errno::MSGSIZE);
        }
        if !more_follows {
            return Ok(Some((payload, envelope)));
        }
        *parts = Some((payload, envelope));
        self.has_some.store(true, Ordering::Release);
        Ok(None)
    }

    /// Takes the parts, of a datagram that ends here.
    pub(crate) fn take(&self) -> Option<(Vec<u8>, Envelope)> {
        if self.is_empty() {
            return None;
        }
        let mut parts = self.parts();
        self.has_some.store(false, Ordering::Release);
        parts.take()
    }

    fn parts(&self) -> MutexGuard<'_, Option<(Vec<u8>, Envelope)>> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exe_3_parts_make_one_datagram() {
        const TO: SocketAddr =
            SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 9);
        let corked = Corked::default();
        let add = |part: &'static [u8], more, envelope: fn() -> Result<Envelope, Errno>| {
            corked.add(Ok(Cow::Borrowed(part)), more, envelope, |_, _, _| Ok(()))
        };
        let first = || Ok((TO, SendControl::default()));
        let later = || -> Result<Envelope, Errno> {
            unreachable!("the destination is that of the first part")
        };
        assert_eq!(add(b"ab", true, first), Ok(None));
        assert!(!corked.is_empty());
        assert_eq!(add(b"", true, later), Ok(None));
        let whole = Some((b"abc".to_vec(), (TO, SendControl::default())));
        assert_eq!(add(b"c", false, later), Ok(whole));
        assert!(corked.is_empty() && corked.take().is_none());
        assert_eq!(add(b"", true, || Err(Errno::DESTADDRREQ)), Err(Errno::DESTADDRREQ));
        assert_eq!(add(&[0; 65_507], true, first), Ok(None));
        assert_eq!(add(b"x", false, later), Err(Errno::MSGSIZE));
        assert!(corked.is_empty());
    }
}

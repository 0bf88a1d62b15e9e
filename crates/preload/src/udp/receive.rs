//! Datagrams that are received or looked at.

use std::cell::RefCell;

use forebay::net::Datagrams;
use rustix::io::Errno;

use super::{RECEIVING, Udp};
use crate::datagram::{Message, ReceiveMode};
use crate::socket::CallWait;

/// Length of the longest payload of a datagram, or of several merged.
const PAYLOAD_BYTES_MAX: usize = 1 << 16;

impl Udp {
    /// Receives at most `max` datagrams, waiting for the first if the socket and the call permit. The index of
    /// each is passed on with it. 0 if `shutdown` has ended the waiting.
    pub(crate) fn receive(
        &self,
        max: usize,
        mode: ReceiveMode,
        mut each: impl FnMut(usize, &Message<'_>),
    ) -> Result<usize, Errno> {
        self.check()?;
        self.begin_use()?;
        if mode.peek {
            let peeked = self.peek(mode, |message| each(0, message))?;
            return Ok(peeked.map_or(0, |()| 1));
        }
        let mut batch = Datagrams::new();
        self.attempt(mode, || self.udp.recv_batch(&mut batch, max))?;
        for (index, datagram) in batch.iter().enumerate() {
            each(index, &Message::Taken(datagram));
        }
        Ok(batch.len())
    }

    fn peek(
        &self,
        mode: ReceiveMode,
        each: impl FnOnce(&Message<'_>),
    ) -> Result<Option<()>, Errno> {
        thread_local! {
            static PEEKED: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
        }
        let mut buffer = PEEKED.try_with(RefCell::take).unwrap_or_default();
        buffer.resize(PAYLOAD_BYTES_MAX, 0);
        let peeked = self.attempt(mode, || self.udp.peek_msg(&mut buffer));
        let result = peeked.map(|received| {
            received.map(|received| each(&Message::Peeked(&buffer[..received.len], &received)))
        });
        let _ = PEEKED.try_with(|kept| kept.replace(buffer)); // a thread that ends has none
        result
    }

    /// Length of the next datagram, or 0 (`FIONREAD`).
    pub(crate) fn next_len(&self) -> Result<usize, Errno> {
        self.check()?;
        self.begin_use()?;
        let mut len = 0;
        let mode = ReceiveMode { dont_wait: true, peek: true, has_part: false };
        match self.peek(mode, |message| message.each_piece(|piece| len += piece.len())) {
            Ok(_) | Err(Errno::AGAIN) => Ok(len),
            Err(error) => {
                // The length is told beside an error, which stays.
                let _ = self.peek(mode, |message| message.each_piece(|piece| len += piece.len()));
                self.set_pending_error(error);
                Ok(len)
            }
        }
    }

    /// Attempts until there is something. `None` if `shutdown` has ended the waiting.
    fn attempt<T>(
        &self,
        mode: ReceiveMode,
        mut attempt: impl FnMut() -> std::io::Result<T>,
    ) -> Result<Option<T>, Errno> {
        let mut wait = CallWait::default();
        loop {
            match attempt().map_err(|error| self.errno(&error)) {
                Err(Errno::AGAIN) if !mode.dont_wait && !self.settings.load().is_nonblocking => {
                    if self.has_ended(RECEIVING) {
                        return Ok(None);
                    }
                    wait.readable(self.readiness()?, mode.has_part)?;
                    // The handler of a signal may have forked: the child has no copy of what has arrived.
                    self.check()?;
                }
                result => return result.map(Some),
            }
        }
    }
}

//! Datagrams that are sent, whole or in parts.

use std::borrow::Cow;

use forebay::net::message::{DeviceIndex, Transmit};
use forebay_stack::socket::shown;
use forebay_sys::interface::InterfaceIndex;
use forebay_sys::udp_send::{self, SendControl};
use rustix::io::Errno;

use super::{LENGTH_FIELD_MAX, SENDING, Udp};
use crate::abi;
use crate::corked::Envelope;
use crate::datagram::{DatagramFamily, DatagramMode, OutgoingDatagram};
use crate::option::SocketOption;
use crate::runtime::interfaces;
use crate::socket::CallWait;
use crate::udp_options::{RECVERR, Settings, UDP_CORK};

impl Udp {
    /// Sends a datagram, or a part of one. Of an outgoing message the parts are looked at in the kernel's order.
    pub(crate) fn send<'a>(
        &self,
        outgoing: &impl OutgoingDatagram<'a>,
        mode: DatagramMode,
    ) -> Result<usize, Errno> {
        self.check()?;
        self.touch();
        let len = outgoing.len_bytes();
        if !self.is_ipv6 && len > LENGTH_FIELD_MAX {
            return Err(Errno::MSGSIZE);
        }
        if !self.is_ipv6 && mode.is_urgent {
            return Err(Errno::OPNOTSUPP);
        }
        let envelope = || self.envelope(outgoing, mode);
        let is_part = mode.more_follows || self.corked.is_on();
        if self.corked.is_empty() && (!is_part || mode.is_probe) {
            let envelope = envelope()?;
            if mode.is_probe {
                return self.probe(envelope).map(|()| len);
            }
            return self.send_whole(&payload_of(outgoing)?, envelope, mode.dont_wait);
        }
        let payload = match len {
            // Nothing is added, and what there is may be whole.
            _ if mode.is_probe && len <= LENGTH_FIELD_MAX => Ok(Cow::default()),
            _ => payload_of(outgoing),
        };
        let check = |parts: &[u8], envelope, is_first| self.check_part(parts, envelope, is_first);
        if let Some((payload, envelope)) = self.corked.add(payload, is_part, envelope, check)? {
            self.send_parts(&payload, envelope, mode.dont_wait)?;
        }
        Ok(len)
    }

    /// Destination and control data of a message that is to be sent.
    fn envelope<'a>(
        &self,
        outgoing: &impl OutgoingDatagram<'a>,
        mode: DatagramMode,
    ) -> Result<Envelope, Errno> {
        let named = outgoing.destination(self.family())?.map(|to| shown(to, self.is_ipv6));
        let to = named.or_else(|| self.udp.peer_addr()).ok_or(Errno::DESTADDRREQ)?;
        let is_v4 = to.ip().to_canonical().is_ipv4();
        if is_v4 && self.v6_only {
            return Err(Errno::NETUNREACH);
        }
        // IPv6 looks at the length with the route (`udpv6_sendmsg`).
        if is_v4 && outgoing.len_bytes() > LENGTH_FIELD_MAX {
            return Err(Errno::MSGSIZE);
        }
        if is_v4 && mode.is_urgent {
            return Err(Errno::OPNOTSUPP);
        }
        // A peer may have port 0, but a mapped one counts as named (`udpv6_sendmsg`).
        if to.port() == 0 && (named.is_some() || is_v4 && self.is_ipv6) {
            return Err(Errno::INVAL);
        }
        let family = match is_v4 {
            true if self.is_ipv6 => DatagramFamily::Mapped,
            true => DatagramFamily::V4,
            false => DatagramFamily::V6,
        };
        let control = outgoing.control(family)?;
        control.check_link([to, self.local()])?;
        Ok((to, control))
    }

    /// Looks at the route of a datagram alone (`MSG_PROBE`).
    fn probe(&self, envelope: Envelope) -> Result<(), Errno> {
        let message = self.message(&[], envelope, &self.settings.load());
        self.udp.check_msg(&message).map_err(|error| self.errno(&error))
    }

    /// Checks the parts of a datagram so far: the first as a whole one (`ip_append_data`), later ones for their length.
    fn check_part(&self, parts: &[u8], envelope: Envelope, is_first: bool) -> Result<(), Errno> {
        let settings = self.settings.load();
        let message = self.message(parts, envelope, &settings);
        self.check_length(&message)?;
        if is_first { self.check_sending() } else { Ok(()) }
    }

    /// Checks addresses, route and length. The kernel's queue of errors tells of a length, if the program reads it.
    fn check_length(&self, message: &Transmit<'_>) -> Result<(), Errno> {
        match self.udp.check_msg(message).map_err(|error| self.errno(&error)) {
            Err(Errno::MSGSIZE) if self.asks_errors() => self.refuse_length(message).map(drop),
            result => result,
        }
    }

    /// Takes the error that waits, and refuses to send after `shutdown` (`sock_alloc_send_pskb`).
    fn check_sending(&self) -> Result<(), Errno> {
        match self.take_error()? {
            Some(error) => Err(error),
            None if self.has_ended(SENDING) => Err(Errno::PIPE),
            None => Ok(()),
        }
    }

    /// Reads `UDP_CORK` again. Without it the datagram that was not whole, if there is one, is sent as it is.
    pub(crate) fn adopt_cork(&self) {
        let is_on = abi::is_on(self.kernel(), SocketOption::of_udp(UDP_CORK));
        self.corked.set_on(is_on);
        if is_on {
            return;
        }
        if let Some((payload, envelope)) = self.corked.take() {
            let _ = self.send_parts(&payload, envelope, true); // as in the kernel, an error is lost
        }
    }

    /// Sends a datagram of one part.
    fn send_whole(
        &self,
        payload: &[u8],
        envelope: Envelope,
        dont_wait: bool,
    ) -> Result<usize, Errno> {
        if self.has_ended(SENDING) {
            self.check_length(&self.message(payload, envelope, &self.settings.load()))?;
            self.check_sending()?;
        }
        self.send_parts(payload, envelope, dont_wait)
    }

    /// Sends a datagram whose first part was checked: its other parts leave after `shutdown`, too.
    fn send_parts(
        &self,
        payload: &[u8],
        envelope: Envelope,
        dont_wait: bool,
    ) -> Result<usize, Errno> {
        let settings = self.settings.load();
        let message = self.message(payload, envelope, &settings);
        let mut wait = CallWait::default();
        loop {
            match self.udp.send_msg(&message).map_err(|error| self.errno(&error)) {
                Err(Errno::AGAIN) if !dont_wait && !settings.is_nonblocking => {
                    wait.writable(self.readiness()?, settings.write_timeout, true)?;
                }
                Err(Errno::MSGSIZE) if self.asks_errors() => return self.refuse_length(&message),
                result => return result,
            }
        }
    }

    /// True if the program reads errors from the queue.
    pub(super) fn asks_errors(&self) -> bool {
        abi::keeping_errno(|| RECVERR.iter().any(|option| abi::is_on(self.kernel(), *option)))
    }

    /// Has the kernel refuse a datagram that is too long, and queue an error with the MTU (`ip_local_error`). It sends the
    /// datagram if it knows of a larger one.
    fn refuse_length(&self, of: &Transmit<'_>) -> Result<usize, Errno> {
        let Some(kernels) = self.reserved().filter(|_| of.gso_size == 0) else {
            return Err(Errno::MSGSIZE);
        };
        let interface = of.device.and_then(|DeviceIndex(at)| interfaces().get(usize::from(at)));
        let control = SendControl {
            source: of.source,
            interface: interface.copied().map(InterfaceIndex),
            traffic_class: of.traffic_class.unwrap_or_default(),
            ttl: of.ttl,
        };
        let to = shown(of.destination, self.is_ipv6);
        udp_send::send(kernels, of.payload, to, &control).map_err(|_| Errno::MSGSIZE)
    }

    /// Datagram with what the program has set for it, and for all of the socket.
    fn message<'a>(
        &self,
        payload: &'a [u8],
        (to, control): Envelope,
        settings: &Settings,
    ) -> Transmit<'a> {
        let is_mapped = self.is_ipv6 && to.ip().to_canonical().is_ipv4();
        let of_v4 = settings.v4_marks.filter(|_| is_mapped);
        let is_group = to.ip().to_canonical().is_multicast();
        Transmit {
            source: control.source,
            device: control.device,
            // Options of an IPv6 socket for IPv4 are others than for IPv6.
            traffic_class: control.traffic_class.or(of_v4.map(|(class, _)| class)),
            ttl: control.ttl.or(of_v4.filter(|_| !is_group).map(|(_, ttl)| ttl)),
            gso_size: control.gso_size.unwrap_or(settings.gso_size),
            ..Transmit::new(payload, to)
        }
    }
}

/// Payload of a message; of one that is too long, another that is too long: it is not copied.
fn payload_of<'a>(outgoing: &impl OutgoingDatagram<'a>) -> Result<Cow<'a, [u8]>, Errno> {
    static TOO_LONG: [u8; LENGTH_FIELD_MAX + 1] = [0; LENGTH_FIELD_MAX + 1];
    match outgoing.len_bytes() {
        ..=LENGTH_FIELD_MAX => outgoing.payload(),
        _ => Ok(Cow::Borrowed(&TOO_LONG)),
    }
}

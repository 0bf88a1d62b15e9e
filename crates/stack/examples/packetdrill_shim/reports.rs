//! The error queue, as `recvmsg` tells it.

use std::net::SocketAddr;

use forebay_stack::tcp::kernel_form::extended_error;
use forebay_stack::tcp::{TcpReport, Timestamping};

use crate::abi::address_form;
use crate::calls::Shim;
use crate::errno::Errno;
use crate::options::SECOND_US;

/// Bytes of a `struct sock_extended_err`.
const ERROR_BYTES: usize = 16;
/// Bytes of the addresses behind a `struct sock_extended_err`.
const ADDRESS_BYTES: usize = size_of::<libc::sockaddr_in>();
const ADDRESS_BYTES_V6: usize = size_of::<libc::sockaddr_in6>();
/// Times of a `struct scm_timestamping`.
const TIMES: usize = 3;

/// A control message: level, type and data.
pub(crate) type Control = ((i32, i32), Vec<u8>);

/// Result of `recvmsg` from the error queue.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) controls: Vec<Control>,
    /// Flags beside `MSG_ERRQUEUE`.
    pub(crate) flags: i32,
    /// Peer that a segment was for.
    pub(crate) peer: Option<SocketAddr>,
}

impl Shim {
    /// Takes the oldest report of a socket.
    pub(crate) fn take_report(&self, fd: i32) -> Result<Report, Errno> {
        let mut state = self.lock();
        let socket = state.entry(fd)?.socket;
        let report = state.host.tcp.take_report(socket)?.ok_or(Errno::AGAIN)?;
        let timestamping = state.host.tcp.options(socket)?.timestamping;
        let mut controls = Vec::new();
        let (mut flags, mut peer, mut offender) = (0, None, Vec::new());
        if let TcpReport::Time { at_us, lacks_packet, .. } = report {
            if timestamping.has(Timestamping::SOFTWARE) {
                let option = (libc::SOL_SOCKET, libc::SCM_TIMESTAMPING);
                controls.push((option, times(at_us)));
            }
            flags = if lacks_packet { libc::MSG_TRUNC } else { 0 };
        }
        if let TcpReport::Path { message, to, .. } = report {
            (flags, peer) = (libc::MSG_TRUNC, Some(state.host.told(to)));
            let from = message.from.map(|from| state.host.told(SocketAddr::new(from, 0)));
            offender = from.map_or_else(Vec::new, address_form);
        }
        let is_ipv6 = state.host.has_ipv6_sockets();
        let option = match is_ipv6 {
            true => (libc::IPPROTO_IPV6, libc::IPV6_RECVERR),
            false => (libc::IPPROTO_IP, libc::IP_RECVERR),
        };
        let number_of = |error| Errno::from(error).0.cast_unsigned();
        let mut error = extended_error(&report, number_of).to_vec();
        error.extend(offender);
        let address_bytes = if is_ipv6 { ADDRESS_BYTES_V6 } else { ADDRESS_BYTES };
        error.resize(ERROR_BYTES + address_bytes, 0);
        controls.push((option, error));
        Ok(Report { controls, flags, peer })
    }
}

/// `struct scm_timestamping` with a time of software.
fn times(at_us: u64) -> Vec<u8> {
    let mut words = [0; 2 * TIMES];
    (words[0], words[1]) = (at_us / SECOND_US, at_us % SECOND_US * 1000);
    words.iter().flat_map(|word: &u64| word.to_ne_bytes()).collect()
}

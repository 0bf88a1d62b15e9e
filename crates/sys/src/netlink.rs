//! Requests to the kernel over netlink. They concern the network namespace of the thread that opens the
//! socket, which sysfs may not show.

use std::io;

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkDeserializable, NetlinkHeader,
    NetlinkMessage, NetlinkPayload, NetlinkSerializable,
};
use netlink_packet_route::RouteNetlinkMessage;
use rustix::io::retry_on_intr;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{self, AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType};

use super::hidden::Hidden;

/// `NETLINK_ROUTE`, whose number is 0.
const ROUTE: Option<Protocol> = None;

/// Buffer for the largest batch of messages: the kernel fills at most 32 KiB of a dump at once, and
/// one link's message is far smaller (`netlink_recvmsg` in net/netlink/af_netlink.c).
const ANSWER_BYTES: usize = 64 << 10;

/// Most attempts at a dump that changes interrupt (`NLM_F_DUMP_INTR`).
const DUMPS_MAX: usize = 8;

/// Requests one object, and returns the kernel's answers.
///
/// # Errors
/// The kernel's error: `ENODEV` for a link that does not exist.
pub(super) fn ask(request: RouteNetlinkMessage) -> io::Result<Vec<RouteNetlinkMessage>> {
    NetlinkSocket::open(ROUTE)?.ask(request)
}

/// Requests all objects of a kind.
///
/// # Errors
/// The kernel's error, or `ResourceBusy` if changes interrupted every attempt.
pub(super) fn dump(request: &RouteNetlinkMessage) -> io::Result<Vec<RouteNetlinkMessage>> {
    NetlinkSocket::open(ROUTE)?.dump(request)
}

/// Consistency of a dump: whole, or interrupted by a change.
pub(super) enum Whole {
    Yes,
    Interrupted,
}

/// Sends one request and collects its answers up to the end or the acknowledgement.
pub(super) fn exchange<M>(
    protocol: Option<Protocol>,
    request: M,
    flags: u16,
    answers: &mut Vec<M>,
) -> io::Result<Whole>
where
    M: NetlinkSerializable + NetlinkDeserializable,
{
    NetlinkSocket::open(protocol)?.exchange(request, flags, answers)
}

/// Socket for one request after another. They concern the network namespace of the thread that opened it.
#[derive(Debug)]
pub(super) struct NetlinkSocket {
    socket: Hidden,
    /// Number of the last request, which its answers repeat.
    sequence: u32,
    buffer: Vec<u8>,
}

impl NetlinkSocket {
    pub(super) fn open(protocol: Option<Protocol>) -> io::Result<Self> {
        let (family, flags) = (AddressFamily::NETLINK, SocketFlags::CLOEXEC);
        let socket = Hidden::new(net::socket_with(family, SocketType::RAW, flags, protocol)?)?;
        // Connected to the kernel, so messages of other senders are not received.
        net::connect(&socket, &SocketAddrNetlink::new(0, 0))?;
        Ok(Self { socket, sequence: 0, buffer: vec![0; ANSWER_BYTES] })
    }

    /// Opens a socket for requests of `NETLINK_ROUTE`.
    pub(super) fn of_routes() -> io::Result<Self> {
        Self::open(ROUTE)
    }

    /// Requests one object, and returns the kernel's answers.
    ///
    /// # Errors
    /// The kernel's error.
    pub(super) fn ask(
        &mut self,
        request: RouteNetlinkMessage,
    ) -> io::Result<Vec<RouteNetlinkMessage>> {
        let mut answers = Vec::new();
        self.exchange(request, NLM_F_REQUEST | NLM_F_ACK, &mut answers)?;
        Ok(answers)
    }

    /// Requests all objects of a kind.
    ///
    /// # Errors
    /// As [`dump`].
    pub(super) fn dump(
        &mut self,
        request: &RouteNetlinkMessage,
    ) -> io::Result<Vec<RouteNetlinkMessage>> {
        for _ in 0..DUMPS_MAX {
            let mut answers = Vec::new();
            match self.exchange(request.clone(), NLM_F_REQUEST | NLM_F_DUMP, &mut answers)? {
                Whole::Yes => return Ok(answers),
                Whole::Interrupted => {}
            }
        }
        Err(io::ErrorKind::ResourceBusy.into())
    }

    /// Requests a change.
    ///
    /// # Errors
    /// The kernel's error.
    pub(super) fn request_change(
        &mut self,
        request: RouteNetlinkMessage,
        flags: u16,
    ) -> io::Result<()> {
        self.exchange(request, flags, &mut Vec::new()).map(|_| ())
    }

    fn exchange<M>(&mut self, request: M, flags: u16, answers: &mut Vec<M>) -> io::Result<Whole>
    where
        M: NetlinkSerializable + NetlinkDeserializable,
    {
        self.sequence = self.sequence.wrapping_add(1);
        let mut header = NetlinkHeader::default();
        (header.flags, header.sequence_number) = (flags, self.sequence);
        let mut message = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(request));
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        retry_on_intr(|| net::send(&self.socket, &bytes, SendFlags::empty()))?;

        let mut whole = Whole::Yes;
        loop {
            let received =
                retry_on_intr(|| net::recv(&self.socket, &mut self.buffer[..], RecvFlags::TRUNC));
            let (_, received_bytes) = received?;
            // Truncated: longer than any message that the kernel sends at once.
            let batch = self.buffer.get(..received_bytes);
            let batch = batch.ok_or(io::ErrorKind::FileTooLarge)?;
            if read_batch(batch, self.sequence, answers, &mut whole)? {
                return Ok(whole);
            }
        }
    }
}

/// Collects the answers to the request of this number from a batch of messages. True if the batch has the end or the
/// acknowledgement.
///
/// # Errors
/// The kernel's error, also of a dump that failed after some of its answers; `InvalidData` of what is no message.
fn read_batch<M>(
    mut rest: &[u8],
    sequence: u32,
    answers: &mut Vec<M>,
    whole: &mut Whole,
) -> io::Result<bool>
where
    M: NetlinkDeserializable,
{
    while !rest.is_empty() {
        let message = NetlinkMessage::<M>::deserialize(rest);
        let message = message.map_err(|error| {
            io::Error::new(io::ErrorKind::InvalidData, format!("netlink: {error}"))
        })?;
        let length = usize::try_from(message.header.length).unwrap_or(rest.len());
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        if message.header.sequence_number != sequence {
            continue; // the rest of an earlier answer that could not be read
        }
        if message.header.flags & NLM_F_DUMP_INTR != 0 {
            *whole = Whole::Interrupted;
        }
        match message.payload {
            NetlinkPayload::InnerMessage(answer) => answers.push(answer),
            NetlinkPayload::Done(done) => match done.code {
                0.. => return Ok(true),
                code => return Err(io::Error::from_raw_os_error(code.saturating_neg())),
            },
            NetlinkPayload::Error(error) => match error.code {
                None => return Ok(true), // an acknowledgement
                Some(_) => return Err(error.to_io()),
            },
            _ => {}
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use netlink_packet_core::DoneMessage;
    use netlink_packet_route::link::LinkMessage;
    use rustix::io::Errno;

    use super::*;

    const SEQUENCE: u32 = 7;

    fn message(sequence: u32, payload: NetlinkPayload<RouteNetlinkMessage>) -> Vec<u8> {
        let mut header = NetlinkHeader::default();
        header.sequence_number = sequence;
        let mut message = NetlinkMessage::new(header, payload);
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        bytes
    }

    fn done(code: i32) -> NetlinkPayload<RouteNetlinkMessage> {
        let mut done = DoneMessage::default();
        done.code = code;
        NetlinkPayload::Done(done)
    }

    /// A dump of one link that ends with a code: number of answers, and whether it has ended.
    fn read(code: i32) -> (usize, io::Result<bool>) {
        let link = RouteNetlinkMessage::NewLink(LinkMessage::default());
        let batch = [
            message(SEQUENCE - 1, done(-1)), // of an earlier request
            message(SEQUENCE, NetlinkPayload::InnerMessage(link)),
            message(SEQUENCE, done(code)),
        ];
        let (mut answers, mut whole) = (Vec::<RouteNetlinkMessage>::new(), Whole::Yes);
        let ended = read_batch(&batch.concat(), SEQUENCE, &mut answers, &mut whole);
        (answers.len(), ended)
    }

    #[test]
    fn failed_dump_is_no_whole_one() {
        let (count, ended) = read(0);
        assert_eq!((count, ended.unwrap()), (1, true));
        let (_, ended) = read(-Errno::NOMEM.raw_os_error());
        assert_eq!(ended.unwrap_err().raw_os_error(), Some(Errno::NOMEM.raw_os_error()));
    }
}

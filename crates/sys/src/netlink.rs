//! Requests to the kernel over netlink. They always concern the network namespace of the calling
//! thread, which sysfs may not show.

use std::io;

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkDeserializable, NetlinkHeader,
    NetlinkMessage, NetlinkPayload, NetlinkSerializable,
};
use netlink_packet_route::RouteNetlinkMessage;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{self, AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType};

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
    let mut answers = Vec::new();
    exchange(ROUTE, request, NLM_F_REQUEST | NLM_F_ACK, &mut answers)?;
    Ok(answers)
}

/// Requests a change.
///
/// # Errors
/// The kernel's error.
pub(super) fn tell(request: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
    exchange(ROUTE, request, flags, &mut Vec::new()).map(|_| ())
}

/// Requests all objects of a kind.
///
/// # Errors
/// The kernel's error, or `ResourceBusy` if changes interrupted every attempt.
pub(super) fn dump(request: &RouteNetlinkMessage) -> io::Result<Vec<RouteNetlinkMessage>> {
    for _ in 0..DUMPS_MAX {
        let mut answers = Vec::new();
        match exchange(ROUTE, request.clone(), NLM_F_REQUEST | NLM_F_DUMP, &mut answers)? {
            Whole::Yes => return Ok(answers),
            Whole::Interrupted => {}
        }
    }
    Err(io::ErrorKind::ResourceBusy.into())
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
    let socket =
        net::socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, protocol)?;
    // Connected to the kernel, so messages of other senders are not received.
    net::connect(&socket, &SocketAddrNetlink::new(0, 0))?;

    let mut header = NetlinkHeader::default();
    header.flags = flags;
    let mut message = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(request));
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    net::send(&socket, &bytes, SendFlags::empty())?;

    let mut whole = Whole::Yes;
    let mut buffer = vec![0; ANSWER_BYTES];
    loop {
        let (_, received_bytes) = net::recv(&socket, &mut buffer[..], RecvFlags::TRUNC)?;
        // Truncated: longer than any message that the kernel sends at once.
        let mut rest = buffer.get(..received_bytes).ok_or(io::ErrorKind::FileTooLarge)?;
        while !rest.is_empty() {
            let message = NetlinkMessage::<M>::deserialize(rest);
            let message = message.map_err(|error| {
                io::Error::new(io::ErrorKind::InvalidData, format!("netlink: {error}"))
            })?;
            if message.header.flags & NLM_F_DUMP_INTR != 0 {
                whole = Whole::Interrupted;
            }
            match message.payload {
                NetlinkPayload::InnerMessage(answer) => answers.push(answer),
                NetlinkPayload::Done(_) => return Ok(whole),
                NetlinkPayload::Error(error) => match error.code {
                    None => return Ok(whole), // an acknowledgement
                    Some(_) => return Err(error.to_io()),
                },
                _ => {}
            }
            let length = usize::try_from(message.header.length).unwrap_or(rest.len());
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        }
    }
}

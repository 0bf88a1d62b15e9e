//! The program on its interface, and the map of its sockets.

use std::os::fd::{AsFd, BorrowedFd};

use super::metadata::MetadataLayout;
use super::program;
use crate::device::take::Take;
use crate::error::{Error, Result};
use crate::sys::bpf::{Refused, XdpLink, XdpLoad, XdpPlace, XdpProgram, XskMap};

/// How the program is to be attached.
#[derive(Clone, Copy, Debug)]
pub struct AttachOptions<'a> {
    /// Receive queues of the interface: sockets may be put in for those below.
    pub queues: u32,
    /// Where, the first that works.
    pub places: &'a [XdpPlace],
    /// Takes packets that come in several buffers too: the sockets must be bound with `XDP_USE_SG`.
    pub is_multi_buffer: bool,
    /// Asks the device for its hash.
    pub device_hash: bool,
    /// Takes the place of another's program, if need be.
    pub replace: bool,
}

/// A program that is attached: as long as this lives, and this process.
#[derive(Debug)]
pub struct Attached {
    interface: String,
    map: XskMap,
    _link: XdpLink,
    place: XdpPlace,
    metadata: Option<MetadataLayout>,
}

impl Attached {
    /// Loads the program that takes these packets, and attaches it. Until sockets are put in, all
    /// packets go to the kernel still.
    ///
    /// # Errors
    /// When the kernel refuses: it lacks something, this process may not, or another's program is
    /// there.
    pub fn open(
        interface: &str,
        index: u32,
        take: &Take,
        options: &AttachOptions<'_>,
    ) -> Result<Self> {
        let refused = |refused| refusal(interface, &refused);
        let map = XskMap::create(options.queues).map_err(refused)?;
        let instructions = program::build(take, map.as_fd(), None);
        let how = XdpLoad { is_multi_buffer: options.is_multi_buffer, bound_to: None };
        let program = XdpProgram::load(&instructions, how).map_err(refused)?;
        let (&last, before) = options.places.split_last().unwrap_or((&XdpPlace::Generic, &[]));
        let attach = |place| XdpLink::create(&program, index, place).map(|link| (link, place));
        let attached = before.iter().find_map(|&place| attach(place).ok());
        let (link, place) = attached.map_or_else(|| attach(last), Ok).map_err(refused)?;
        Ok(Self { interface: interface.to_owned(), map, _link: link, place, metadata: None })
    }

    /// Packets of `queue` go to this socket from now on.
    ///
    /// # Errors
    /// When the kernel refuses: the queue is not below `queues`.
    pub fn insert(&self, queue: u32, socket: BorrowedFd<'_>) -> Result<()> {
        self.map.insert(queue, socket).map_err(|refused| refusal(&self.interface, &refused))
    }

    /// Packets of `queue` go to the kernel from now on.
    ///
    /// # Errors
    /// When the kernel refuses: the queue is not below `queues`.
    pub fn remove(&self, queue: u32) -> Result<()> {
        self.map.remove(queue).map_err(|refused| refusal(&self.interface, &refused))
    }

    /// What stands before each packet, if the device is asked for its hash.
    pub fn metadata(&self) -> Option<MetadataLayout> {
        self.metadata
    }

    /// What the report says of it.
    pub fn facts(&self) -> Vec<(&'static str, String)> {
        let place = match self.place {
            XdpPlace::Native => "native",
            XdpPlace::Generic => "generic",
        };
        vec![("xdp", place.to_owned())]
    }
}

fn refusal(interface: &str, refused: &Refused) -> Error {
    let mut problem = format!("the kernel does not {}: {}", refused.asked, refused.errno);
    if !refused.log.is_empty() {
        problem.push_str("\n");
        problem.push_str(&refused.log);
    }
    Error::Xdp { interface: interface.to_owned(), problem, help: String::new() }
}

//! The XDP program of an interface, and the map of its sockets.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use forebay_sys::bpf::{
    BpfRequest, VerifierRefusal, XdpLink, XdpLoad, XdpPlace, XdpProgram, XskMap,
};
use forebay_sys::error::{Error, Result};
use forebay_sys::interface::Interface;
use forebay_sys::packet::PacketSocket;
use forebay_sys::privilege;
use forebay_sys::xdp_attached::{self, AttachedProgram};
use rustix::io::Errno;

use super::metadata::{HashCall, MetadataLayout};
use super::program;
use crate::rx_filter::RxFilter;

/// Options for attaching the program.
#[derive(Clone, Copy, Debug)]
pub struct AttachOptions<'a> {
    /// Number of receive queues of the interface: sockets can be inserted for queues below.
    pub queues: u32,
    /// Places to try, in order; the first that works is used.
    pub places: &'a [XdpPlace],
    /// True to take packets in several buffers too: sockets must be bound with `XDP_USE_SG`.
    pub is_multi_buffer: bool,
    /// True to ask the device for its hash.
    pub device_hash: bool,
    /// True to replace another program.
    pub replace: bool,
    /// True for promiscuous mode: frames for other stations are received too.
    pub promiscuous: bool,
}

/// Attached program. It is detached on drop, or when the process ends.
#[derive(Debug)]
pub struct Attached {
    interface: String,
    map: XskMap,
    _link: XdpLink,
    /// Keeps the interface promiscuous: the kernel ends that mode when the socket is closed.
    _promiscuous: Option<PacketSocket>,
    place: XdpPlace,
    metadata: Option<MetadataLayout>,
    facts: Vec<(&'static str, String)>,
}

impl Attached {
    /// Loads the program for these packets, and attaches it. Until sockets are inserted, all
    /// packets go to the kernel.
    ///
    /// # Errors
    /// If the kernel lacks a feature, the process lacks a privilege, or another program is
    /// attached.
    pub fn open(
        interface: &Interface,
        take: &RxFilter,
        options: &AttachOptions<'_>,
    ) -> Result<Self> {
        privilege::for_af_xdp(&interface.name, *take != RxFilter::All)?;
        make_room(interface, options.replace)?;
        let refused = |refused| refusal(&interface.name, &refused);
        let map = XskMap::create(options.queues).map_err(refused)?;
        let promiscuous = options.promiscuous.then(|| be_promiscuous(interface)).transpose()?;
        let mut facts = Vec::new();
        if options.device_hash {
            match attach_with_hash(interface, take, &map, options) {
                Ok((link, metadata)) => {
                    let facts = vec![
                        ("mode", XdpPlace::Native.to_string()),
                        ("device_hash", "yes".to_owned()),
                    ];
                    let (interface, place) = (interface.name.clone(), XdpPlace::Native);
                    let metadata = Some(metadata);
                    return Ok(Self {
                        interface,
                        map,
                        _link: link,
                        _promiscuous: promiscuous,
                        place,
                        metadata,
                        facts,
                    });
                }
                Err(why) => facts.push(("device_hash", format!("no: {why}"))),
            }
        }
        let instructions = program::build(take, map.as_fd(), None);
        let how = XdpLoad { is_multi_buffer: options.is_multi_buffer, bound_to: None };
        let program = XdpProgram::load(&instructions, how).map_err(refused)?;
        let (link, place, mode) = attach(interface, &program, options.places)?;
        facts.insert(0, ("mode", mode));
        let interface = interface.name.clone();
        Ok(Self {
            interface,
            map,
            _link: link,
            _promiscuous: promiscuous,
            place,
            metadata: None,
            facts,
        })
    }

    /// Redirects packets of `queue` to this socket from now on.
    ///
    /// # Errors
    /// If the kernel refuses: `queue` is not below `queues`.
    pub fn insert(&self, queue: u32, socket: BorrowedFd<'_>) -> Result<()> {
        self.map.insert(queue, socket).map_err(|refused| refusal(&self.interface, &refused))
    }

    /// Leaves packets of `queue` to the kernel from now on.
    ///
    /// # Errors
    /// If the kernel refuses: `queue` is not below `queues`.
    pub fn remove(&self, queue: u32) -> Result<()> {
        self.map.remove(queue).map_err(|refused| refusal(&self.interface, &refused))
    }

    /// Returns the place where the program runs.
    #[must_use]
    pub fn place(&self) -> XdpPlace {
        self.place
    }

    /// Returns the layout of the metadata before each packet, if the device provides its hash.
    #[must_use]
    pub fn metadata(&self) -> Option<MetadataLayout> {
        self.metadata
    }

    /// Returns facts for the report.
    #[must_use]
    pub fn facts(&self) -> &[(&'static str, String)] {
        &self.facts
    }
}

/// Opens a socket that receives nothing but keeps the interface promiscuous while it is open: XDP
/// sees only frames that the device accepts.
fn be_promiscuous(interface: &Interface) -> Result<PacketSocket> {
    let socket = PacketSocket::open().and_then(|socket| {
        socket.be_promiscuous(interface.index.0)?;
        Ok(socket)
    });
    socket.map_err(|source| Error::Device {
        name: interface.name.clone(),
        what: "make it promiscuous".to_owned(),
        source,
        help: "check that this kernel has AF_PACKET (CONFIG_PACKET), or leave out --promiscuous"
            .to_owned(),
    })
}

/// Attaches the program in the first place that works. Returns that place, with the error of the
/// place before in the mode's text.
fn attach(
    interface: &Interface,
    program: &XdpProgram,
    places: &[XdpPlace],
) -> Result<(XdpLink, XdpPlace, String)> {
    let mut first = None;
    for &place in places {
        match XdpLink::create(program, interface.index.0, place) {
            Ok(link) => {
                let mode = match first {
                    None => place.to_string(),
                    Some(VerifierRefusal { errno, .. }) => {
                        format!("{place}: the driver refused, {errno}")
                    }
                };
                return Ok((link, place, mode));
            }
            Err(refused) => {
                first.get_or_insert(refused);
            }
        }
    }
    let Some(refused) = first else {
        let why = "no mode is given".to_owned();
        return Err(Error::Setting { what: "the XDP mode", value: String::new(), why });
    };
    if matches!(refused.errno, Errno::BUSY | Errno::EXIST) {
        make_room(interface, false)?; // names the program that was attached in between
    }
    Err(refusal(&interface.name, &refused))
}

/// Attaches a program that asks the device for its hash, or returns why that is impossible.
fn attach_with_hash(
    interface: &Interface,
    take: &RxFilter,
    map: &XskMap,
    options: &AttachOptions<'_>,
) -> Result<(XdpLink, MetadataLayout), String> {
    // Only drivers provide the metadata functions that return the hash.
    if !options.places.contains(&XdpPlace::Native) {
        return Err("generic mode has none".to_owned());
    }
    let why = |refused: VerifierRefusal| {
        format!("the kernel cannot {}: {}", refused.asked, refused.errno)
    };
    let call = HashCall::find(interface.index)?;
    let instructions = program::build(take, map.as_fd(), Some(call));
    let bound_to = Some(interface.index.0);
    let how = XdpLoad { is_multi_buffer: options.is_multi_buffer, bound_to };
    let program = XdpProgram::load(&instructions, how).map_err(why)?;
    let link = XdpLink::create(&program, interface.index.0, XdpPlace::Native).map_err(why)?;
    Ok((link, call.layout()))
}

/// Checks that no other program is attached, and with `replace` detaches one.
fn make_room(interface: &Interface, replace: bool) -> Result<()> {
    let name = &interface.name;
    let failed = |source: io::Error| match source.raw_os_error() {
        Some(errno) if errno == Errno::NODEV.raw_os_error() => {
            Error::DeviceGone { name: name.clone() }
        }
        _ => xdp(name, format!("the kernel does not tell its XDP programs: {source}"), "see dmesg"),
    };
    for program in xdp_attached::attached_to(interface.index).map_err(failed)? {
        let is_free = replace && program.link.is_none();
        // A program that a link holds can be detached by the owner of the link only.
        if !is_free || xdp_attached::detach(interface.index, &program).is_err() {
            return Err(taken(name, &program, replace));
        }
    }
    Ok(())
}

/// Error for another program that stays attached.
fn taken(name: &str, program: &AttachedProgram, replace: bool) -> Error {
    let off = match program.place {
        XdpPlace::Native => "xdpdrv off",
        XdpPlace::Generic => "xdpgeneric off",
    };
    let held = match program.link {
        Some(link) => format!(
            "`bpftool link show id {link}` tells which process holds it there: end that, or use \
             another interface"
        ),
        None if replace => "a link holds it there, and `bpftool link show` tells whose: end that \
             process, or use another interface"
            .to_owned(),
        None => format!("take it off with `ip link set dev {name} {off}`, or give --replace"),
    };
    let cannot = if replace { ", and cannot be replaced" } else { "" };
    xdp(name, format!("{program}, is attached already{cannot}"), held)
}

/// Converts the kernel's refusal to an error.
fn refusal(interface: &str, refused: &VerifierRefusal) -> Error {
    let name = interface.to_owned();
    let unsupported = |what: &str, since, option: &str| Error::Unsupported {
        what: what.to_owned(),
        since,
        help: format!("use a newer kernel, built with {option}, or --via af_packet"),
    };
    let help = match (refused.asked, refused.errno) {
        (_, Errno::NODEV) => return Error::DeviceGone { name },
        (_, Errno::NOSYS) => return unsupported("bpf(2)", "3.18", "CONFIG_BPF_SYSCALL"),
        (BpfRequest::CreateMap, Errno::INVAL) => {
            return unsupported("AF_XDP", "4.18", "CONFIG_XDP_SOCKETS");
        }
        (_, Errno::PERM) => {
            "check that CAP_BPF and CAP_NET_ADMIN are there (those of a user namespace, as in a rootless \
             container, do not count: --via af_packet does without), and on a kernel before 5.11 that \
             enough memory may be locked (ulimit -l)"
        }
        (BpfRequest::Insert | BpfRequest::Remove, _) => {
            "see with `ethtool -l` how many queues the interface has"
        }
        (BpfRequest::Attach(XdpPlace::Native), Errno::OPNOTSUPP) => {
            "its driver has no place for XDP programs: give --xdp-mode generic, or auto"
        }
        (BpfRequest::Attach(XdpPlace::Native), _) => {
            "drivers refuse an MTU that is too large, queues that are too few, and offloads such \
             as LRO: see dmesg, or give --xdp-mode generic"
        }
        (BpfRequest::Attach(XdpPlace::Generic), Errno::INVAL) => {
            "Linux has XDP links since 5.9: use a newer kernel, or --via af_packet"
        }
        (BpfRequest::Load, _) => "please report it with the lines above and `uname -r`",
        _ => "see dmesg, or go by --via af_packet",
    };
    let mut problem = format!("the kernel refuses to {}: {}", refused.asked, refused.errno);
    if !refused.log.is_empty() {
        problem.push('\n');
        problem.push_str(&refused.log);
    }
    xdp(interface, problem, help)
}

fn xdp(interface: &str, problem: String, help: impl Into<String>) -> Error {
    Error::Xdp { interface: interface.to_owned(), problem, help: help.into() }
}

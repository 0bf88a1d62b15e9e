//! XDP programs that others attached to an interface, and the links that hold them.

use std::os::fd::AsFd;
use std::{fmt, io};

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{LinkAttribute, LinkMessage, LinkXdp};
use rustix::io::Errno;

use super::bpf::{XdpPlace, address_of, call, count_of, descriptor_of, number_of};
use super::hidden::Hidden;
use super::interface::InterfaceIndex;
use super::netlink;

/// Program attached to an interface.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AttachedProgram {
    /// Native or generic.
    pub place: XdpPlace,
    /// Id of the program.
    pub id: u32,
    /// Name, if it has one and this process may read it.
    pub name: Option<String>,
    /// Id of the link that holds the program, if one does and this process may read it. Otherwise
    /// the program was attached by rtnetlink, as `ip link set dev … xdp` does, and can be detached
    /// by others.
    pub link: Option<u32>,
}

impl fmt::Display for AttachedProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "XDP program {}", self.id)?;
        if let Some(name) = &self.name {
            write!(f, " ({name})")?;
        }
        write!(f, ", {}", self.place)
    }
}

/// Programs that run on this machine for an interface's frames; those offloaded to its hardware are
/// left out.
///
/// # Errors
/// If the netlink request fails: `ENODEV` if there is no such interface.
pub fn attached_to(interface: InterfaceIndex) -> io::Result<Vec<AttachedProgram>> {
    let mut request = LinkMessage::default();
    request.header.index = interface.0;
    let answers = netlink::ask(RouteNetlinkMessage::GetLink(request))?;
    let mut programs = Vec::new();
    for answer in answers {
        let RouteNetlinkMessage::NewLink(link) = answer else { continue };
        for attribute in link.attributes {
            let LinkAttribute::Xdp(told) = attribute else { continue };
            programs.extend(told.iter().filter_map(|told| program_of(told, interface)));
        }
    }
    Ok(programs)
}

/// Detaches a program that no link holds.
///
/// # Errors
/// The kernel's error: `EBUSY` if a link holds the program.
pub fn detach(interface: InterfaceIndex, program: &AttachedProgram) -> io::Result<()> {
    const NO_PROGRAM: i32 = -1;
    let mut link = LinkMessage::default();
    link.header.index = interface.0;
    let xdp = vec![LinkXdp::Fd(NO_PROGRAM), LinkXdp::Flags(program.place.flags())];
    link.attributes.push(LinkAttribute::Xdp(xdp));
    netlink::ask(RouteNetlinkMessage::SetLink(link)).map(|_| ())
}

fn program_of(told: &LinkXdp, interface: InterfaceIndex) -> Option<AttachedProgram> {
    let (place, id) = match told {
        LinkXdp::DrvProgId(id) => (XdpPlace::Native, *id),
        LinkXdp::SkbProgId(id) => (XdpPlace::Generic, *id),
        _ => return None,
    };
    Some(AttachedProgram { place, id, name: name_of(id), link: link_of(id, interface) })
}

fn name_of(program: u32) -> Option<String> {
    let descriptor = object(PROG_GET_FD_BY_ID, program).ok()?;
    let mut info = ProgramInfo::default();
    read_info(&descriptor, &mut info).ok()?;
    let name = info.name.split(|&byte| byte == 0).next().unwrap_or_default();
    (!name.is_empty()).then(|| String::from_utf8_lossy(name).into_owned())
}

/// Id of the link that holds a program on an interface.
fn link_of(program: u32, interface: InterfaceIndex) -> Option<u32> {
    let mut last = 0;
    while let Ok(id) = next_link(last) {
        last = id;
        let Ok(descriptor) = object(LINK_GET_FD_BY_ID, id) else { continue };
        let mut info = LinkInfo::default();
        let is_xdp = read_info(&descriptor, &mut info).is_ok() && info.kind == LINK_TYPE_XDP;
        // An interface of another network namespace may have the same index, but not this program.
        if is_xdp && (info.program, info.interface) == (program, interface.0) {
            return Some(id);
        }
    }
    None
}

// enum bpf_cmd and bpf_link_type, linux/bpf.h
const PROG_GET_FD_BY_ID: u32 = 13;
const OBJ_GET_INFO_BY_FD: u32 = 15;
const LINK_GET_FD_BY_ID: u32 = 30;
const LINK_GET_NEXT_ID: u32 = 31;
const LINK_TYPE_XDP: u32 = 6;

/// `union bpf_attr` for `BPF_*_GET_*_ID`.
#[repr(C)]
#[derive(Default)]
struct ObjectId {
    id: u32,
    next: u32,
    flags: u32,
}

/// `union bpf_attr` for `BPF_OBJ_GET_INFO_BY_FD`.
#[repr(C)]
#[derive(Default)]
struct ObjectInfo {
    object: u32,
    info_bytes: u32,
    info: u64,
}

/// Beginning of `struct bpf_prog_info`.
#[repr(C)]
#[derive(Default)]
struct ProgramInfo {
    kind: u32,
    id: u32,
    tag: [u8; 8],
    code_bytes: [u32; 2],
    code: [u64; 2],
    loaded_ns: u64,
    user: u32,
    map_count: u32,
    maps: u64,
    name: [u8; 16],
}

/// Beginning of `struct bpf_link_info` for an XDP link.
#[repr(C)]
#[derive(Default)]
struct LinkInfo {
    kind: u32,
    id: u32,
    program: u32,
    padding: u32,
    interface: u32,
    rest: u32,
}

/// Types that the kernel may write for `BPF_OBJ_GET_INFO_BY_FD`: made of numbers only.
///
/// # Safety
/// Any bytes are a value of the type, which has no padding; zeros in it request no writes to other
/// memory.
unsafe trait Info: Default {}

// SAFETY: numbers; with counts of 0 the kernel writes nothing where `code` and `maps` point.
unsafe impl Info for ProgramInfo {}
// SAFETY: numbers.
unsafe impl Info for LinkInfo {}

fn read_info<T: Info>(object: &Hidden, info: &mut T) -> Result<(), Errno> {
    let mut attributes = ObjectInfo {
        object: number_of(object.as_fd()),
        info_bytes: count_of(size_of::<T>()),
        info: address_of(std::ptr::from_mut(info)),
    };
    *info = T::default();
    // SAFETY: `info` is ours, as long as `info_bytes` says, outlives the call, and any bytes are
    // valid.
    unsafe { call(OBJ_GET_INFO_BY_FD, &mut attributes) }.map(|_| ())
}

fn object(command: u32, id: u32) -> Result<Hidden, Errno> {
    let mut attributes = ObjectId { id, ..ObjectId::default() };
    // SAFETY: the attributes hold no address.
    unsafe { descriptor_of(command, &mut attributes) }
}

fn next_link(after: u32) -> Result<u32, Errno> {
    let mut attributes = ObjectId { id: after, ..ObjectId::default() };
    // SAFETY: the attributes hold no address.
    unsafe { call(LINK_GET_NEXT_ID, &mut attributes) }?;
    Ok(attributes.next)
}

//! bpf(2): maps, programs and links, without a C toolchain. The kernel reads and writes only
//! buffers of this file's functions, during one call.

use std::ffi::{c_long, c_uint};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::{fmt, io};

use rustix::io::Errno;

use super::hidden::Hidden;

/// One eBPF instruction (`struct bpf_insn`, linux/bpf.h).
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Instruction {
    /// Operation: class, source and operation, or class, size and mode.
    pub code: u8,
    /// Destination register in the low half, source register in the high half.
    pub registers: u8,
    /// Distance of a jump, or memory offset of a load or store.
    pub offset: i16,
    /// Immediate operand.
    pub immediate: i32,
}

/// Request to the kernel, for error messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BpfRequest {
    /// Create an XSKMAP.
    CreateMap,
    /// Insert a socket into the map.
    Insert,
    /// Remove a socket from the map.
    Remove,
    /// Verify and translate a program.
    Load,
    /// Run a program on a test frame.
    Run,
    /// Attach a program.
    Attach(XdpPlace),
}

impl fmt::Display for BpfRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::CreateMap => f.write_str("create an XSKMAP"),
            Self::Insert => f.write_str("put a socket into the XSKMAP"),
            Self::Remove => f.write_str("take a socket out of the XSKMAP"),
            Self::Load => f.write_str("load a program"),
            Self::Run => f.write_str("run the XDP program"),
            Self::Attach(place) => write!(f, "attach the XDP program ({place})"),
        }
    }
}

/// A request that the kernel refused.
#[derive(Debug)]
pub struct VerifierRefusal {
    /// Request.
    pub asked: BpfRequest,
    /// The kernel's errno.
    pub errno: Errno,
    /// Last lines of the verifier's log, if any.
    pub log: String,
}

impl VerifierRefusal {
    fn to(asked: BpfRequest) -> impl FnOnce(Errno) -> Self {
        move |errno| Self { asked, errno, log: String::new() }
    }
}

/// `BPF_MAP_TYPE_XSKMAP`: maps a receive queue to the AF_XDP socket that takes its packets.
#[derive(Debug)]
pub struct XskMap(Hidden);

impl XskMap {
    /// Creates an empty map for queues below `queues`.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn create(queues: u32) -> Result<Self, VerifierRefusal> {
        const WORD_BYTES: u32 = 4;
        let mut attributes = MapCreate {
            map_type: MAP_TYPE_XSKMAP,
            key_bytes: WORD_BYTES,
            value_bytes: WORD_BYTES,
            max_entries: queues,
            name: name("forebay_queues"),
            ..MapCreate::default()
        };
        // SAFETY: the attributes hold no address.
        let map = unsafe { descriptor_of(MAP_CREATE, &mut attributes) };
        map.map(Self).map_err(VerifierRefusal::to(BpfRequest::CreateMap))
    }

    /// Directs packets of `queue` to this AF_XDP socket.
    ///
    /// # Errors
    /// The kernel's error: the queue is beyond the map, or the descriptor is not an AF_XDP socket.
    pub fn insert(&self, queue: u32, socket: BorrowedFd<'_>) -> Result<(), VerifierRefusal> {
        let value = number_of(socket);
        let mut attributes = MapElement {
            map: number_of(self.0.as_fd()),
            key: address_of(&raw const queue),
            value: address_of(&raw const value),
            ..MapElement::default()
        };
        // SAFETY: key and value are words, as the map declares, and outlive the call.
        let done = unsafe { call(MAP_UPDATE_ELEM, &mut attributes) };
        done.map(|_| ()).map_err(VerifierRefusal::to(BpfRequest::Insert))
    }

    /// Directs packets of `queue` to the kernel, if they were not before.
    ///
    /// # Errors
    /// The kernel's error: the queue is beyond the map.
    pub fn remove(&self, queue: u32) -> Result<(), VerifierRefusal> {
        let mut attributes = MapElement {
            map: number_of(self.0.as_fd()),
            key: address_of(&raw const queue),
            ..MapElement::default()
        };
        // SAFETY: the key is a word, as the map declares, and outlives the call.
        match unsafe { call(MAP_DELETE_ELEM, &mut attributes) } {
            Ok(_) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(VerifierRefusal::to(BpfRequest::Remove)(errno)),
        }
    }
}

impl AsFd for XskMap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Attributes for loading an XDP program.
#[derive(Clone, Copy, Default, Debug)]
pub struct XdpLoad {
    /// True if packets may come in several buffers (`BPF_F_XDP_HAS_FRAGS`).
    pub is_multi_buffer: bool,
    /// Index of the only interface that the program may run on; the program may then call its
    /// driver's metadata functions (`BPF_F_XDP_DEV_BOUND_ONLY`).
    pub bound_to: Option<u32>,
}

/// XDP program that the kernel has verified.
#[derive(Debug)]
pub struct XdpProgram(Hidden);

impl XdpProgram {
    /// Loads a program, which the kernel verifies and translates.
    ///
    /// # Errors
    /// The kernel's error, and the verifier's last lines.
    pub fn load(instructions: &[Instruction], how: XdpLoad) -> Result<Self, VerifierRefusal> {
        let attributes = ProgramLoad {
            program_type: PROG_TYPE_XDP,
            flags: if how.is_multi_buffer { F_XDP_HAS_FRAGS } else { 0 }
                | if how.bound_to.is_some() { F_XDP_DEV_BOUND_ONLY } else { 0 },
            interface: how.bound_to.unwrap_or(0),
            expected_attach_type: ATTACH_XDP,
            ..ProgramLoad::default()
        };
        load(instructions, attributes).map(Self)
    }

    /// Runs the program on a frame as if received on queue 0 of the loopback device, and returns
    /// the verdict, which is not carried out.
    ///
    /// # Errors
    /// The kernel's error: `EINVAL` if the frame is shorter than an Ethernet header.
    pub fn run(&self, frame: &[u8]) -> Result<XdpAction, VerifierRefusal> {
        let mut attributes = TestRun {
            program: number_of(self.0.as_fd()),
            data_in_bytes: count_of(frame.len()),
            data_in: address_of(frame.as_ptr()),
            repeat: 1,
            ..TestRun::default()
        };
        // SAFETY: the frame outlives the call, which only reads it; no output buffer is given.
        let run = unsafe { call(PROG_TEST_RUN, &mut attributes) };
        run.map_err(VerifierRefusal::to(BpfRequest::Run))?;
        Ok(match attributes.decided {
            1 => XdpAction::Drop,
            2 => XdpAction::Pass,
            3 => XdpAction::Transmit,
            4 => XdpAction::Redirect,
            _ => XdpAction::Aborted,
        })
    }
}

/// Verdict of a program (`enum xdp_action`, linux/bpf.h).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum XdpAction {
    /// The program failed: the kernel drops the frame and reports it to tracers.
    Aborted,
    /// The kernel drops the frame.
    Drop,
    /// The kernel's stack processes the frame.
    Pass,
    /// The frame is sent out of the interface it came from.
    Transmit,
    /// The frame goes to another device, CPU or socket.
    Redirect,
}

/// Program that examines one packet and returns a number (`BPF_PROG_TYPE_SOCKET_FILTER`).
#[derive(Debug)]
pub struct FilterProgram(Hidden);

impl FilterProgram {
    /// Loads a program, which the kernel verifies and translates.
    ///
    /// # Errors
    /// The kernel's error, and the verifier's last lines.
    pub fn load(instructions: &[Instruction]) -> Result<Self, VerifierRefusal> {
        let attributes =
            ProgramLoad { program_type: PROG_TYPE_SOCKET_FILTER, ..ProgramLoad::default() };
        load(instructions, attributes).map(Self)
    }
}

impl AsFd for FilterProgram {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Loads a program; `attributes` gives its type and flags.
fn load(
    instructions: &[Instruction],
    mut attributes: ProgramLoad,
) -> Result<Hidden, VerifierRefusal> {
    attributes.instruction_count = count_of(instructions.len());
    attributes.instructions = address_of(instructions.as_ptr());
    attributes.license = address_of(LICENSE.to_bytes_with_nul().as_ptr());
    attributes.name = name("forebay");
    // SAFETY: instructions and license outlive the call, which only reads them; no log is
    // requested.
    let first = unsafe { descriptor_of(PROG_LOAD, &mut attributes) };
    let errno = match first {
        Ok(program) => return Ok(program),
        Err(errno) => errno,
    };
    // The log is requested only on failure: it costs the verifier time, and one that does not fit
    // is an error of its own.
    let mut log = vec![0_u8; LOG_BYTES];
    attributes.log_level = 1;
    attributes.log_bytes = count_of(log.len());
    attributes.log = address_of(log.as_mut_ptr());
    // SAFETY: as above, and the log is ours alone and has `log_bytes` bytes.
    let second = unsafe { descriptor_of(PROG_LOAD, &mut attributes) };
    second.map_err(|_| VerifierRefusal { asked: BpfRequest::Load, errno, log: last_lines(&log) })
}

/// Place of an interface at which a program can be attached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum XdpPlace {
    /// In the driver, before the kernel makes an `sk_buff` of the frame.
    Native,
    /// Behind the driver, on an `sk_buff`: works for any interface, but slower.
    Generic,
}

impl XdpPlace {
    /// Flag for rtnetlink and links.
    pub(super) fn flags(self) -> u32 {
        match self {
            Self::Native => XDP_FLAGS_DRV_MODE,
            Self::Generic => XDP_FLAGS_SKB_MODE,
        }
    }
}

impl fmt::Display for XdpPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Native => "native",
            Self::Generic => "generic",
        })
    }
}

/// Attachment of a program to an interface. The program is detached when this is closed, also by
/// the end of the process, however it ends.
#[derive(Debug)]
#[must_use = "dropping it detaches the program"]
pub struct XdpLink {
    _descriptor: Hidden,
}

impl XdpLink {
    /// Attaches `program` to the interface with this index.
    ///
    /// # Errors
    /// The kernel's error: `EBUSY` if another program is attached in either place, `EOPNOTSUPP` if
    /// the driver does not support programs, or not this one.
    pub fn create(
        program: &XdpProgram,
        interface: u32,
        at: XdpPlace,
    ) -> Result<Self, VerifierRefusal> {
        let mut attributes = LinkCreate {
            program: number_of(program.0.as_fd()),
            interface,
            attach_type: ATTACH_XDP,
            flags: at.flags(),
        };
        // SAFETY: the attributes hold no address.
        let link = unsafe { descriptor_of(LINK_CREATE, &mut attributes) };
        link.map(|descriptor| Self { _descriptor: descriptor })
            .map_err(VerifierRefusal::to(BpfRequest::Attach(at)))
    }
}

// enum bpf_cmd, linux/bpf.h
const MAP_CREATE: c_uint = 0;
const MAP_UPDATE_ELEM: c_uint = 2;
const MAP_DELETE_ELEM: c_uint = 3;
const PROG_LOAD: c_uint = 5;
const PROG_TEST_RUN: c_uint = 10;
const LINK_CREATE: c_uint = 28;

// enum bpf_map_type, bpf_prog_type, bpf_attach_type and flags, linux/bpf.h
const MAP_TYPE_XSKMAP: u32 = 17;
const PROG_TYPE_SOCKET_FILTER: u32 = 1;
const PROG_TYPE_XDP: u32 = 6;
const ATTACH_XDP: u32 = 37;
const F_XDP_HAS_FRAGS: u32 = 1 << 5;
const F_XDP_DEV_BOUND_ONLY: u32 = 1 << 6;

// linux/if_link.h
const XDP_FLAGS_SKB_MODE: u32 = 1 << 1;
const XDP_FLAGS_DRV_MODE: u32 = 1 << 2;

const NAME_BYTES: usize = 16;
/// Some helper functions require a license that is compatible with the GPL.
const LICENSE: &std::ffi::CStr = c"Dual MIT/GPL";
/// Size of the verifier's log for programs as short as ours.
const LOG_BYTES: usize = 1 << 20;
const LOG_LINES: usize = 6;

/// `union bpf_attr` for `BPF_MAP_CREATE`.
#[repr(C)]
#[derive(Default)]
struct MapCreate {
    map_type: u32,
    key_bytes: u32,
    value_bytes: u32,
    max_entries: u32,
    flags: u32,
    inner_map: u32,
    numa_node: u32,
    name: [u8; NAME_BYTES],
}

/// `union bpf_attr` for `BPF_MAP_*_ELEM`.
#[repr(C)]
#[derive(Default)]
struct MapElement {
    map: u32,
    padding: u32,
    key: u64,
    value: u64,
    flags: u64,
}

/// `union bpf_attr` for `BPF_PROG_LOAD`.
#[repr(C)]
#[derive(Default)]
struct ProgramLoad {
    program_type: u32,
    instruction_count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_bytes: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; NAME_BYTES],
    interface: u32,
    expected_attach_type: u32,
}

/// `union bpf_attr` for `BPF_PROG_TEST_RUN`.
#[repr(C)]
#[derive(Default)]
struct TestRun {
    program: u32,
    decided: u32,
    data_in_bytes: u32,
    data_out_bytes: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration_ns: u32,
}

/// `union bpf_attr` for `BPF_LINK_CREATE`.
#[repr(C)]
#[derive(Default)]
struct LinkCreate {
    program: u32,
    interface: u32,
    attach_type: u32,
    flags: u32,
}

/// Calls bpf(2).
///
/// # Safety
/// `T` is `union bpf_attr` of `command`, without padding by the compiler, and the memory at its
/// addresses may be read, or written as the command does, until the call returns.
pub(super) unsafe fn call<T>(command: c_uint, attributes: &mut T) -> Result<c_long, Errno> {
    let attributes: *mut T = attributes;
    // SAFETY: the caller's promise; the size is that of the attributes.
    let done = unsafe { libc::syscall(libc::SYS_bpf, command, attributes, size_of::<T>()) };
    if done < 0 { Err(last_errno()) } else { Ok(done) }
}

/// Calls bpf(2) for a command that returns a descriptor.
///
/// # Safety
/// As [`call`]; the command returns a new descriptor.
pub(super) unsafe fn descriptor_of<T>(
    command: c_uint,
    attributes: &mut T,
) -> Result<Hidden, Errno> {
    // SAFETY: the caller's promise.
    let number = unsafe { call(command, attributes) }?;
    let number = RawFd::try_from(number).map_err(|_| Errno::BADF)?;
    // SAFETY: the kernel made the descriptor for this call, and nothing else has it.
    let descriptor = unsafe { OwnedFd::from_raw_fd(number) };
    Hidden::new(descriptor)
}

fn last_errno() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// Descriptor as in the kernel's attributes; an open one is never negative.
pub(super) fn number_of(descriptor: BorrowedFd<'_>) -> u32 {
    u32::try_from(descriptor.as_raw_fd()).unwrap_or(u32::MAX)
}

pub(super) fn address_of<T>(place: *const T) -> u64 {
    place.expose_provenance() as u64
}

/// Count as in the kernel's attributes, which refuses the saturated value anyway.
pub(super) fn count_of(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// Name as `bpftool` shows it: truncated to 15 bytes, and a NUL.
fn name(of: &str) -> [u8; NAME_BYTES] {
    let mut name = [0; NAME_BYTES];
    for (to, &from) in name[..NAME_BYTES - 1].iter_mut().zip(of.as_bytes()) {
        *to = from;
    }
    name
}

/// Last lines of a NUL-terminated log.
fn last_lines(log: &[u8]) -> String {
    let text = log.split(|&byte| byte == 0).next().unwrap_or_default();
    let text = String::from_utf8_lossy(text);
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(LOG_LINES)..].join("\n")
}

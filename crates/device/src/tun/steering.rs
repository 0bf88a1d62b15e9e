//! eBPF programs of a device, run by the kernel on each packet for it: one chooses the packet's
//! queue, one drops all packets.

use std::os::fd::AsFd;

use forebay_sys::bpf::{FilterProgram, Instruction};
use forebay_sys::tun::TunQueue;

/// Programs of a device; absent without the privilege to load them (`CAP_BPF`).
#[derive(Debug, Default)]
pub(super) struct TunSteering {
    /// Chooses a packet's queue by its flow alone, on a device with several queues. Without this
    /// program the kernel chooses the queue that last sent packets of the flow: if packets are sent
    /// to the device too, a flow may change its queue, and its order is lost.
    by_flow: Option<FilterProgram>,
    /// Drops every packet. Without this program, packets between the last read and the close are
    /// not counted.
    nothing: Option<FilterProgram>,
    queues: u16,
}

impl TunSteering {
    /// Loads the programs for `queues` queues, and attaches the one that chooses the queue.
    pub(super) fn of(device: &TunQueue, queues: u16) -> Self {
        let by_flow = if queues > 1 { FilterProgram::load(&queue_of_flow()).ok() } else { None };
        let by_flow = by_flow.filter(|program| device.set_steering(Some(program.as_fd())).is_ok());
        let nothing = FilterProgram::load(&[set(Register::R0, 0), EXIT]).ok();
        Self { by_flow, nothing, queues }
    }

    /// Makes the kernel drop, and count, further packets for the device.
    pub(super) fn close(&self, device: &TunQueue) {
        if let Some(nothing) = &self.nothing {
            // A refused program is treated as a missing one.
            let _ = device.set_filter(Some(nothing.as_fd()));
        }
    }

    /// Detaches all programs from the device: these, or those of an earlier run. A run that is killed at its end leaves the one
    /// that drops all packets, and a persistent device keeps it.
    pub(super) fn detach_all(device: &TunQueue) {
        // These calls fail if the device was removed, and its programs with it, or the kernel knows no programs.
        let _ = device.set_filter(None);
        let _ = device.set_steering(None);
    }

    /// Returns the fact for the report.
    pub(super) fn fact(&self) -> Option<String> {
        let fact = match self {
            Self { queues: 0 | 1, .. } => return None,
            Self { by_flow: Some(_), .. } => "by flow",
            Self { by_flow: None, .. } => {
                "the kernel's (no CAP_BPF): a flow that is also sent to the device may change its \
                 queue, and its order with it"
            }
        };
        Some(fact.to_owned())
    }
}

/// Register of the eBPF machine.
#[derive(Clone, Copy)]
#[repr(u8)]
enum Register {
    /// Value of packet loads, and return value.
    R0 = 0,
    /// Context (`struct __sk_buff`) at the start of the program.
    R1 = 1,
    /// Context for packet loads.
    R6 = 6,
    /// Hash so far; callee-saved, so packet loads keep it.
    R7 = 7,
    /// Offset of the transport header.
    R8 = 8,
}

/// Number of bytes that a load moves.
#[derive(Clone, Copy)]
#[repr(u8)]
enum Width {
    Word = 0x00,
    Half = 0x08,
    Byte = 0x10,
}

// Instructions: linux/bpf_common.h and linux/bpf.h.
const LOAD_PACKET: u8 = 0x20; //      R0 = bytes at an offset in the packet; returns 0 if outside
const LOAD_PACKET_AT: u8 = 0x40; //   the same, relative to a register
const LOAD_CONTEXT: u8 = 0x61;
const MOVE: u8 = 0xbf;
const MOVE_NUMBER: u8 = 0xb7;
const XOR: u8 = 0xaf;
const AND_NUMBER: u8 = 0x57;
const SHIFT_LEFT_NUMBER: u8 = 0x67;
const MULTIPLY_NUMBER_32: u8 = 0x24;
const SHIFT_RIGHT_NUMBER_32: u8 = 0x74;
const JUMP: u8 = 0x05;
const JUMP_EQUAL_NUMBER: u8 = 0x15;
const JUMP_ANY_BIT_NUMBER: u8 = 0x45;
const JUMP_NOT_EQUAL_NUMBER: u8 = 0x55;
const EXIT: Instruction = Instruction { code: 0x95, registers: 0, offset: 0, immediate: 0 };

/// `SKF_NET_OFF`: offsets count from the network header (linux/filter.h).
const NETWORK: i32 = -0x10_0000;

/// Offset of `protocol` in `struct __sk_buff`: the EtherType, in network byte order.
const PROTOCOL: i16 = 16;

const TCP: i32 = 6;
const UDP: i32 = 17;

/// Program that hashes the addresses, and also the ports of unfragmented TCP and UDP packets. The
/// hash is 0 for protocols other than IP. Segments of one flow share a queue, as do fragments of
/// one datagram.
fn queue_of_flow() -> Vec<Instruction> {
    let ipv4 = ipv4();
    let ipv6 = ipv6();
    let skip = |block: &[Instruction]| i16::try_from(block.len()).unwrap_or(0);
    let be = |ethertype: u16| i32::from(ethertype.to_be());
    let mut program = vec![
        copy(Register::R6, Register::R1),
        set(Register::R7, 0),
        Instruction {
            code: LOAD_CONTEXT,
            registers: Register::R0 as u8 | (Register::R6 as u8) << 4,
            offset: PROTOCOL,
            immediate: 0,
        },
        jump(JUMP_EQUAL_NUMBER, be(forebay_rx::parse::ETHERTYPE_IPV4), 2),
        jump(JUMP_EQUAL_NUMBER, be(forebay_rx::parse::ETHERTYPE_IPV6), skip(&ipv4) + 2),
        jump(JUMP, 0, skip(&ipv4) + skip(&ipv6) + 1),
    ];
    program.extend(&ipv4);
    program.push(jump(JUMP, 0, skip(&ipv6)));
    program.extend(&ipv6);
    // The upper half of a product depends on all bits (Knuth, volume 3, section 6.4).
    program.extend([
        copy(Register::R0, Register::R7),
        number(MULTIPLY_NUMBER_32, Register::R0, 0x9e37_79b1_u32.cast_signed()),
        number(SHIFT_RIGHT_NUMBER_32, Register::R0, 16),
        EXIT,
    ]);
    program
}

fn ipv4() -> Vec<Instruction> {
    let ports = [
        load(Width::Byte, 0),
        number(AND_NUMBER, Register::R0, 0x0f),
        number(SHIFT_LEFT_NUMBER, Register::R0, 2),
        copy(Register::R8, Register::R0),
        Instruction {
            code: LOAD_PACKET_AT | Width::Word as u8,
            registers: (Register::R8 as u8) << 4,
            offset: 0,
            immediate: NETWORK,
        },
        mix(),
    ];
    let mut block = [mix_word(12), mix_word(16)].concat();
    // Only the first fragment of a datagram has ports.
    block.extend([load(Width::Half, 6), jump(JUMP_ANY_BIT_NUMBER, 0x3fff, 3 + 6)]);
    block.extend([
        load(Width::Byte, 9),
        jump(JUMP_EQUAL_NUMBER, TCP, 1),
        jump(JUMP_NOT_EQUAL_NUMBER, UDP, 6),
    ]);
    block.extend(ports);
    block
}

fn ipv6() -> Vec<Instruction> {
    let mut block: Vec<_> = (8..40).step_by(4).flat_map(mix_word).collect();
    block.extend([
        load(Width::Byte, 6),
        jump(JUMP_EQUAL_NUMBER, TCP, 1),
        jump(JUMP_NOT_EQUAL_NUMBER, UDP, 2),
    ]);
    block.extend(mix_word(40));
    block
}

/// Mixes four bytes of the network header into the hash.
fn mix_word(at: i32) -> [Instruction; 2] {
    [load(Width::Word, at), mix()]
}

fn mix() -> Instruction {
    two(XOR, Register::R7, Register::R0)
}

fn load(width: Width, at: i32) -> Instruction {
    let code = LOAD_PACKET | width as u8;
    Instruction { code, registers: 0, offset: 0, immediate: NETWORK + at }
}

fn set(to: Register, value: i32) -> Instruction {
    number(MOVE_NUMBER, to, value)
}

fn copy(to: Register, from: Register) -> Instruction {
    two(MOVE, to, from)
}

fn number(code: u8, to: Register, immediate: i32) -> Instruction {
    Instruction { code, registers: to as u8, offset: 0, immediate }
}

fn two(code: u8, to: Register, from: Register) -> Instruction {
    Instruction { code, registers: to as u8 | (from as u8) << 4, offset: 0, immediate: 0 }
}

/// Jumps `further` instructions ahead if R0 meets the condition.
fn jump(code: u8, immediate: i32, further: i16) -> Instruction {
    Instruction { code, registers: 0, offset: further, immediate }
}

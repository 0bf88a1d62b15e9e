//! The XDP program: packets that are ours go to the AF_XDP socket of their queue, all others to the
//! kernel.

use std::os::fd::BorrowedFd;

use super::assembler::{Assembler, Register, Width};
use super::metadata::HashCall;
use crate::device::take::Take;
use crate::sys::bpf::Instruction;

use Register::{R0, R1, R2, R3, R6};

/// What the program does besides.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct ProgramOptions {
    /// Puts the device's hash before each packet.
    pub(super) hash: Option<HashCall>,
}

// struct xdp_md, linux/bpf.h
const MD_RX_QUEUE_INDEX: i16 = 16;
/// `enum xdp_action`
const XDP_PASS: i32 = 2;
/// `enum bpf_func_id`
const REDIRECT_MAP: i32 = 51;

/// The program for an XSKMAP.
pub(super) fn build(
    _take: &Take,
    map: BorrowedFd<'_>,
    _options: &ProgramOptions,
) -> Vec<Instruction> {
    let mut program = Assembler::default();
    let pass = program.label();
    program.copy(R6, R1);
    redirect(&mut program, map);
    program.place(pass);
    program.set(R0, XDP_PASS);
    program.exit();
    program.finish()
}

/// Goes to the socket of the packet's queue; to the kernel when there is none.
fn redirect(program: &mut Assembler, map: BorrowedFd<'_>) {
    program.set_map(R1, map);
    program.load(Width::Word, R2, R6, MD_RX_QUEUE_INDEX);
    program.set(R3, XDP_PASS);
    program.call(REDIRECT_MAP);
    program.exit();
}

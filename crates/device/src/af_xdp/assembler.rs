//! Assembler for eBPF, as far as the XDP program needs it: a line for each instruction, and labels.
//! The kernel's verifier refuses a program with a label that was never placed, or with a jump that
//! is too far.

use std::os::fd::{AsRawFd, BorrowedFd};

use forebay_sys::bpf::Instruction;

/// Register of the eBPF machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum EbpfRegister {
    /// Return value of functions and of the program. Calls overwrite it.
    R0 = 0,
    /// First argument. Calls overwrite the arguments.
    R1 = 1,
    /// Second argument.
    R2 = 2,
    /// Third argument.
    R3 = 3,
    /// Callee-saved: kept over calls.
    R6 = 6,
    /// Callee-saved: kept over calls.
    R7 = 7,
    /// Callee-saved: kept over calls.
    R8 = 8,
    /// Frame pointer: the top of the stack, read-only.
    R10 = 10,
}

/// Number of bytes that a load or a store moves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum EbpfWidth {
    Byte = 0x10,
    Half = 0x08,
    Word = 0x00,
}

/// Condition of a jump: an unsigned comparison of a register with the other value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum If {
    Equal = 0x10,
    Above = 0x20,
    NotEqual = 0x50,
    Below = 0xa0,
    NotAbove = 0xb0,
}

/// Jump target in the program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Label(usize);

/// Program being written.
#[derive(Default, Debug)]
pub(super) struct Assembler {
    instructions: Vec<Instruction>,
    /// Index of the instruction behind each label, once the label is placed.
    places: Vec<Option<usize>>,
    /// Jump instructions and their targets.
    jumps: Vec<(usize, Label)>,
}

// Instruction classes, operations and modes: linux/bpf_common.h, linux/bpf.h.
const LOAD_NUMBER: u8 = 0x18;
const LOAD: u8 = 0x61;
const STORE: u8 = 0x63;
const STORE_NUMBER: u8 = 0x62;
const MOVE: u8 = 0xbf;
const MOVE_NUMBER: u8 = 0xb7;
const ADD: u8 = 0x0f;
const ADD_NUMBER: u8 = 0x07;
const AND_NUMBER: u8 = 0x57;
const SHIFT_LEFT_NUMBER: u8 = 0x67;
const SHIFT_RIGHT_NUMBER: u8 = 0x77;
const TO_BIG_ENDIAN: u8 = 0xdc;
const JUMP: u8 = 0x05;
/// Jump on a comparison with a register; or-ed with the condition.
const JUMP_IF: u8 = 0x0d;
/// Jump on a comparison with a number; or-ed with the condition.
const JUMP_IF_NUMBER: u8 = 0x05;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
/// Source register number for [`LOAD_NUMBER`]: the number is a map's file descriptor.
const PSEUDO_MAP_FD: u8 = 1;
/// Source register number for [`CALL`]: the number is the BTF id of a kernel function.
const PSEUDO_KFUNC_CALL: u8 = 2;

impl Assembler {
    /// Returns a new label, to be placed later.
    pub(super) fn label(&mut self) -> Label {
        self.places.push(None);
        Label(self.places.len() - 1)
    }

    /// Places a label before the next instruction.
    pub(super) fn place(&mut self, label: Label) {
        if let Some(place) = self.places.get_mut(label.0) {
            *place = Some(self.instructions.len());
        }
    }

    /// `to = *(from + offset)`
    pub(super) fn load(
        &mut self,
        width: EbpfWidth,
        to: EbpfRegister,
        from: EbpfRegister,
        offset: i16,
    ) {
        self.push(LOAD | width as u8, to as u8, from as u8, offset, 0);
    }

    /// `*(to + offset) = from`
    pub(super) fn store(
        &mut self,
        width: EbpfWidth,
        to: EbpfRegister,
        offset: i16,
        from: EbpfRegister,
    ) {
        self.push(STORE | width as u8, to as u8, from as u8, offset, 0);
    }

    /// `*(to + offset) = number`
    pub(super) fn store_number(
        &mut self,
        width: EbpfWidth,
        to: EbpfRegister,
        offset: i16,
        number: i32,
    ) {
        self.push(STORE_NUMBER | width as u8, to as u8, 0, offset, number);
    }

    /// `to = from`
    pub(super) fn copy(&mut self, to: EbpfRegister, from: EbpfRegister) {
        self.push(MOVE, to as u8, from as u8, 0, 0);
    }

    /// `to = number`
    pub(super) fn set(&mut self, to: EbpfRegister, number: i32) {
        self.push(MOVE_NUMBER, to as u8, 0, 0, number);
    }

    /// `to = the map`
    pub(super) fn set_map(&mut self, to: EbpfRegister, map: BorrowedFd<'_>) {
        self.push(LOAD_NUMBER, to as u8, PSEUDO_MAP_FD, 0, map.as_raw_fd());
        self.push(0, 0, 0, 0, 0); // the upper half of the number
    }

    /// `to += from`
    pub(super) fn add_register(&mut self, to: EbpfRegister, from: EbpfRegister) {
        self.push(ADD, to as u8, from as u8, 0, 0);
    }

    /// `to += number`
    pub(super) fn add(&mut self, to: EbpfRegister, number: i32) {
        self.push(ADD_NUMBER, to as u8, 0, 0, number);
    }

    /// `to &= number`
    pub(super) fn and(&mut self, to: EbpfRegister, number: i32) {
        self.push(AND_NUMBER, to as u8, 0, 0, number);
    }

    /// `to <<= bits`
    pub(super) fn shift_left(&mut self, to: EbpfRegister, bits: i32) {
        self.push(SHIFT_LEFT_NUMBER, to as u8, 0, 0, bits);
    }

    /// `to >>= bits`
    pub(super) fn shift_right(&mut self, to: EbpfRegister, bits: i32) {
        self.push(SHIFT_RIGHT_NUMBER, to as u8, 0, 0, bits);
    }

    /// Converts two bytes from network byte order to the host's.
    pub(super) fn be16(&mut self, of: EbpfRegister) {
        self.push(TO_BIG_ENDIAN, of as u8, 0, 0, 16);
    }

    /// Jumps to `to`.
    pub(super) fn jump(&mut self, to: Label) {
        self.push_jump(JUMP, 0, 0, 0, to);
    }

    /// Jumps to `to` if `left` compares as `so` with a number.
    pub(super) fn jump_if(&mut self, left: EbpfRegister, so: If, number: i32, to: Label) {
        self.push_jump(JUMP_IF_NUMBER | so as u8, left as u8, 0, number, to);
    }

    /// Jumps to `to` if `left` compares as `so` with `right`.
    pub(super) fn jump_if_register(
        &mut self,
        left: EbpfRegister,
        so: If,
        right: EbpfRegister,
        to: Label,
    ) {
        self.push_jump(JUMP_IF | so as u8, left as u8, right as u8, 0, to);
    }

    /// `R0 = helper(R1, R2, …)`, by number (`enum bpf_func_id`).
    pub(super) fn call(&mut self, helper: i32) {
        self.push(CALL, 0, 0, 0, helper);
    }

    /// `R0 = function(R1, R2, …)`: a kernel function (kfunc), by BTF id.
    pub(super) fn call_kernel(&mut self, function: i32) {
        self.push(CALL, 0, PSEUDO_KFUNC_CALL, 0, function);
    }

    /// Returns R0.
    pub(super) fn exit(&mut self) {
        self.push(EXIT, 0, 0, 0, 0);
    }

    /// Returns the program, with the distance of every jump filled in.
    pub(super) fn finish(mut self) -> Vec<Instruction> {
        for &(at, label) in &self.jumps {
            let place = self.places.get(label.0).copied().flatten();
            let Some(distance) = place.and_then(|place| jump_distance(at, place)) else { continue };
            if let Some(jump) = self.instructions.get_mut(at) {
                jump.offset = distance;
            }
        }
        self.instructions
    }

    fn push(&mut self, code: u8, to: u8, from: u8, offset: i16, immediate: i32) {
        self.instructions.push(Instruction { code, registers: to | from << 4, offset, immediate });
    }

    fn push_jump(&mut self, code: u8, left: u8, right: u8, number: i32, to: Label) {
        self.jumps.push((self.instructions.len(), to));
        /// Jump to itself: refused by the verifier unless [`Assembler::finish`] fills in the
        /// distance.
        const NOWHERE: i16 = -1;
        self.push(code, left, right, NOWHERE, number);
    }
}

/// Distance of a jump at `at` to `place`, counted from the instruction behind the jump.
fn jump_distance(at: usize, place: usize) -> Option<i16> {
    let (at, place) = (i16::try_from(at).ok()?, i16::try_from(place).ok()?);
    place.checked_sub(at)?.checked_sub(1)
}

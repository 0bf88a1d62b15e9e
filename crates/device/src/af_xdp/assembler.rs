//! An assembler for eBPF, as far as our program needs it: a line for each instruction, and labels.
//! What it cannot express, and a label that was never placed, the kernel's verifier refuses.

use std::os::fd::{AsRawFd, BorrowedFd};

use forebay_sys::bpf::Instruction;

/// A register of the machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum EbpfRegister {
    /// Register in which a function and the program return. Calls overwrite it.
    R0 = 0,
    /// The first argument. Calls overwrite the arguments.
    R1 = 1,
    /// The second argument.
    R2 = 2,
    /// The third argument.
    R3 = 3,
    /// Ours, and kept over calls.
    R6 = 6,
    /// Ours, and kept over calls.
    R7 = 7,
    /// Ours, and kept over calls.
    R8 = 8,
    /// Register of the stack's top, which cannot be written.
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

/// Condition of a jump: the register, without a sign, against the other value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum If {
    Equal = 0x10,
    Above = 0x20,
    NotEqual = 0x50,
    Below = 0xa0,
    NotAbove = 0xb0,
}

/// A place in the program that is jumped to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Label(usize);

/// A program that is being written.
#[derive(Default, Debug)]
pub(super) struct Assembler {
    instructions: Vec<Instruction>,
    /// By label: the index of the instruction behind it, once it is placed.
    places: Vec<Option<usize>>,
    /// Instructions that jump, and where to.
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
/// Ored with the condition.
const JUMP_IF: u8 = 0x0d;
const JUMP_IF_NUMBER: u8 = 0x05;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
/// In place of a source register: the number is a map's descriptor.
const PSEUDO_MAP_FD: u8 = 1;
/// In place of a source register: the number is the BTF id of a kernel function.
const PSEUDO_KFUNC_CALL: u8 = 2;

impl Assembler {
    /// A label that is still to be placed.
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

    /// From the network's byte order to the machine's: two bytes.
    pub(super) fn be16(&mut self, of: EbpfRegister) {
        self.push(TO_BIG_ENDIAN, of as u8, 0, 0, 16);
    }

    /// Goes on at `to`.
    pub(super) fn jump(&mut self, to: Label) {
        self.push_jump(JUMP, 0, 0, 0, to);
    }

    /// Goes on at `to` if `left` is so against a number.
    pub(super) fn jump_if(&mut self, left: EbpfRegister, so: If, number: i32, to: Label) {
        self.push_jump(JUMP_IF_NUMBER | so as u8, left as u8, 0, number, to);
    }

    /// Goes on at `to` if `left` is so against `right`.
    pub(super) fn jump_if_register(
        &mut self,
        left: EbpfRegister,
        so: If,
        right: EbpfRegister,
        to: Label,
    ) {
        self.push_jump(JUMP_IF | so as u8, left as u8, right as u8, 0, to);
    }

    /// `R0 = helper(R1, R2, …)`, by its number (`enum bpf_func_id`).
    pub(super) fn call(&mut self, helper: i32) {
        self.push(CALL, 0, 0, 0, helper);
    }

    /// `R0 = function(R1, R2, …)`: one of the kernel's own, by its BTF id.
    pub(super) fn call_kernel(&mut self, function: i32) {
        self.push(CALL, 0, PSEUDO_KFUNC_CALL, 0, function);
    }

    /// Returns R0.
    pub(super) fn exit(&mut self) {
        self.push(EXIT, 0, 0, 0, 0);
    }

    /// The program, every jump as far as it goes.
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
        /// To itself, for ever: refused unless [`Assembler::finish`] puts in where it goes.
        const NOWHERE: i16 = -1;
        self.push(code, left, right, NOWHERE, number);
    }
}

/// Distance of a jump at `at` to `place`: counted from the instruction behind it.
fn jump_distance(at: usize, place: usize) -> Option<i16> {
    let (at, place) = (i16::try_from(at).ok()?, i16::try_from(place).ok()?);
    place.checked_sub(at)?.checked_sub(1)
}

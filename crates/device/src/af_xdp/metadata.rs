//! The device's receive hash, which the XDP program puts in front of the packet.

use std::fs;
use std::os::fd::BorrowedFd;

use EbpfRegister::{R0, R1, R2, R3, R10};
use forebay_sys as sys;
use forebay_sys::interface::InterfaceIndex;
use forebay_sys::netdev;

use super::assembler::{Assembler, EbpfRegister, EbpfWidth, If, Label};
use super::btf;

/// Layout of the metadata that the program puts in front of each packet.
///
/// Three words directly before the packet's first byte: the hash, its kind (`enum
/// xdp_rss_hash_type`) and a cookie that marks freshly written metadata. If the program could not
/// write, older bytes are left there: therefore the reader clears the cookie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MetadataLayout {
    /// Random value unknown to senders, so that stale packet bytes cannot pass for metadata.
    cookie: u32,
}

impl MetadataLayout {
    /// Size of the metadata.
    pub const BYTES: usize = 12;

    /// Layout with a known cookie.
    #[cfg(test)]
    pub(super) fn of_cookie(cookie: u32) -> Self {
        Self { cookie }
    }

    /// Takes the hash of the packet behind these bytes, if the device has computed one over the
    /// ports. Clears the cookie: a second call returns `None`.
    pub fn take_hash(self, before: &mut [u8; Self::BYTES]) -> Option<u32> {
        let (words, _) = before.as_chunks_mut::<4>();
        let [hash, kind, cookie] = words else { return None };
        let is_written = u32::from_ne_bytes(*cookie) == self.cookie;
        *cookie = [0; 4];
        (is_written && u32::from_ne_bytes(*kind) & RSS_KIND_L4 != 0)
            .then(|| u32::from_ne_bytes(*hash))
    }
}

/// `XDP_RSS_L4`, net/xdp.h: the hash covers the ports too, so flows between two hosts differ.
pub(super) const RSS_KIND_L4: u32 = 1 << 3;

/// Kernel function that asks the driver for the hash (net/core/xdp.c).
const RX_HASH: &str = "bpf_xdp_metadata_rx_hash";

/// Call by which the program asks the driver for the hash, and the layout to store it in.
#[derive(Clone, Copy, Debug)]
pub struct HashCall {
    /// BTF id of [`RX_HASH`].
    function: i32,
    layout: MetadataLayout,
}

// struct xdp_md, linux/bpf.h
const MD_DATA: i16 = 0;
const MD_DATA_META: i16 = 8;
const MD_RX_QUEUE_INDEX: i16 = 16;
// enum bpf_func_id, linux/bpf.h
const MAP_LOOKUP_ELEM: i32 = 1;
const XDP_ADJUST_META: i32 = 54;

// Stack slots, and offsets in the metadata.
const STACK_QUEUE: i16 = -4;
const STACK_HASH: i16 = -8;
const STACK_KIND: i16 = -12;
const META_HASH: i16 = 0;
const META_KIND: i16 = 4;
const META_COOKIE: i16 = 8;

impl HashCall {
    /// Finds the call for an interface; the error says what the driver or the kernel lacks.
    pub(super) fn find(interface: InterfaceIndex) -> Result<Self, String> {
        match netdev::has_rx_hash(interface) {
            Ok(Some(true)) => {}
            Ok(Some(false)) => return Err("the driver has none".to_owned()),
            Ok(None) => return Err("this kernel has none (Linux has it since 6.3)".to_owned()),
            Err(error) => return Err(format!("the kernel does not tell: {error}")),
        }
        let kernel = fs::read(btf::KERNEL).map_err(|error| format!("{}: {error}", btf::KERNEL))?;
        let unfound = |why| format!("{}: {RX_HASH}: {why}", btf::KERNEL);
        let function = btf::function(&kernel, RX_HASH).map_err(unfound)?;
        let function = i32::try_from(function).map_err(|_| unfound("no such function"))?;
        let [a, b, c, d, ..] = sys::random_key();
        let layout = MetadataLayout { cookie: u32::from_ne_bytes([a, b, c, d]) };
        Ok(Self { function, layout })
    }

    /// Layout of the metadata.
    pub(super) fn layout(self) -> MetadataLayout {
        self.layout
    }

    /// Emits code that writes the hash in front of the packet if there is a hash and room for it;
    /// execution continues behind it in any case. A packet of a queue without a socket goes to
    /// `pass` unchanged: metadata would keep the kernel's GRO from merging it.
    pub(super) fn write(
        self,
        program: &mut Assembler,
        context: EbpfRegister,
        map: BorrowedFd<'_>,
        pass: Label,
    ) {
        let behind = program.label();
        program.load(EbpfWidth::Word, R1, context, MD_RX_QUEUE_INDEX);
        program.store(EbpfWidth::Word, R10, STACK_QUEUE, R1);
        program.set_map(R1, map);
        program.copy(R2, R10);
        program.add(R2, STACK_QUEUE.into());
        program.call(MAP_LOOKUP_ELEM);
        program.jump_if(R0, If::Equal, 0, pass);

        program.store_number(EbpfWidth::Word, R10, STACK_HASH, 0);
        program.store_number(EbpfWidth::Word, R10, STACK_KIND, 0);
        program.copy(R1, context);
        program.copy(R2, R10);
        program.add(R2, STACK_HASH.into());
        program.copy(R3, R10);
        program.add(R3, STACK_KIND.into());
        program.call_kernel(self.function);
        program.jump_if(R0, If::NotEqual, 0, behind);

        program.copy(R1, context);
        program.set(R2, -META_BYTES);
        program.call(XDP_ADJUST_META);
        program.jump_if(R0, If::NotEqual, 0, behind);
        program.load(EbpfWidth::Word, R1, context, MD_DATA_META);
        program.load(EbpfWidth::Word, R2, context, MD_DATA);
        program.copy(R3, R1);
        program.add(R3, META_BYTES);
        program.jump_if_register(R3, If::Above, R2, behind);
        program.load(EbpfWidth::Word, R3, R10, STACK_HASH);
        program.store(EbpfWidth::Word, R1, META_HASH, R3);
        program.load(EbpfWidth::Word, R3, R10, STACK_KIND);
        program.store(EbpfWidth::Word, R1, META_KIND, R3);
        program.store_number(EbpfWidth::Word, R1, META_COOKIE, self.layout.cookie.cast_signed());
        program.place(behind);
    }
}

/// [`MetadataLayout::BYTES`] as an immediate operand.
const META_BYTES: i32 = 12;

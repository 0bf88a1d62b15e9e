//! The XDP program: redirects packets of the filter to the AF_XDP socket of their queue, and passes
//! all others to the kernel.
//!
//! The program reads headers in the frame's first buffer only. A frame whose headers continue
//! behind that buffer is passed to the kernel. A VLAN tag that the device stripped is invisible to
//! XDP, here and in the socket: see `rxvlan` of `ethtool -k`, and `txvlan` of a veth's other end.

use std::os::fd::BorrowedFd;

use EbpfRegister::{R0, R1, R2, R3};
use forebay_sys::bpf::Instruction;

use super::assembler::{Assembler, EbpfRegister, EbpfWidth, If, Label};
use super::metadata::HashCall;
use crate::rx_filter::{FilterDestinations, FilterProtocol, MAX_EXTENSION_HEADERS, RxFilter, wire};

/// Register of the program's argument, `struct xdp_md`.
const CONTEXT: EbpfRegister = EbpfRegister::R6;
/// Register of the read position in the packet.
const AT: EbpfRegister = EbpfRegister::R7;
/// Register of the end of the packet's first buffer.
const END: EbpfRegister = EbpfRegister::R8;

// struct xdp_md, linux/bpf.h
const MD_DATA: i16 = 0;
const MD_DATA_END: i16 = 4;
const MD_RX_QUEUE_INDEX: i16 = 16;
/// `enum xdp_action`, linux/bpf.h
const XDP_PASS: i32 = 2;
/// `enum bpf_func_id`, linux/bpf.h
const REDIRECT_MAP: i32 = 51;

/// Builds the program that redirects packets of a filter to the sockets of a map.
#[must_use]
pub fn build(take: &RxFilter, map: BorrowedFd<'_>, hash: Option<HashCall>) -> Vec<Instruction> {
    let mut program = Assembler::default();
    let pass = program.label();
    program.copy(CONTEXT, R1);
    if let RxFilter::Only(destinations) = take {
        let ours = program.label();
        choose(&mut program, destinations, ours, pass);
        program.place(ours);
    }
    if let Some(hash) = hash {
        hash.write(&mut program, CONTEXT, map, pass);
    }
    program.set_map(R1, map);
    program.load(EbpfWidth::Word, R2, CONTEXT, MD_RX_QUEUE_INDEX);
    program.set(R3, XDP_PASS); // action for a queue without a socket
    program.call(REDIRECT_MAP);
    program.exit();
    if hash.is_some() || *take != RxFilter::All {
        // The verifier refuses unreachable instructions.
        program.place(pass);
        program.set(R0, XDP_PASS);
        program.exit();
    }
    program.finish()
}

/// Jumps to `ours` with packets to these destinations, to `pass` with all others.
fn choose(program: &mut Assembler, destinations: &FilterDestinations, ours: Label, pass: Label) {
    let [ipv4_packet, ipv6_packet, segment] = [(); 3].map(|()| program.label());
    program.load(EbpfWidth::Word, AT, CONTEXT, MD_DATA);
    program.load(EbpfWidth::Word, END, CONTEXT, MD_DATA_END);

    ethernet(program, ipv4_packet, ipv6_packet, pass);
    program.place(ipv4_packet);
    ipv4(program, segment, pass);
    program.place(ipv6_packet);
    ipv6(program, segment, pass);
    program.place(segment);
    ports(program, destinations, ours, pass);
}

/// Jumps to `pass` unless the packet has this many more bytes.
fn require(program: &mut Assembler, bytes: i32, pass: Label) {
    program.copy(R1, AT);
    program.add(R1, bytes);
    program.jump_if_register(R1, If::Above, END, pass);
}

/// Loads two bytes in network byte order.
fn load_field(program: &mut Assembler, to: EbpfRegister, offset: i16) {
    program.load(EbpfWidth::Half, to, AT, offset);
    program.be16(to);
}

fn ethernet(program: &mut Assembler, ipv4: Label, ipv6: Label, pass: Label) {
    const ETHERTYPE: EbpfRegister = R3;
    let network = program.label();
    require(program, 14, pass);
    load_field(program, ETHERTYPE, 12);
    program.add(AT, 14);
    for _ in 0..forebay_rx::parse::MAX_VLAN_TAGS {
        let tag = program.label();
        for kind in wire::VLAN_TAGS {
            program.jump_if(ETHERTYPE, If::Equal, kind.into(), tag);
        }
        program.jump(network);
        program.place(tag);
        require(program, 4, pass);
        load_field(program, ETHERTYPE, 2);
        program.add(AT, 4);
    }
    program.place(network);
    program.jump_if(ETHERTYPE, If::Equal, forebay_rx::parse::ETHERTYPE_IPV4.into(), ipv4);
    program.jump_if(ETHERTYPE, If::Equal, forebay_rx::parse::ETHERTYPE_IPV6.into(), ipv6);
    program.jump(pass);
}

/// Register of the transport protocol, read by `ports`.
const PROTOCOL: EbpfRegister = R3;

fn ipv4(program: &mut Assembler, segment: Label, pass: Label) {
    require(program, 20, pass);
    program.load(EbpfWidth::Byte, R1, AT, 0); // version and IHL
    program.copy(R2, R1);
    program.shift_right(R2, 4);
    program.jump_if(R2, If::NotEqual, 4, pass);
    program.and(R1, 0x0f);
    program.jump_if(R1, If::Below, 5, pass);
    program.shift_left(R1, 2);
    load_field(program, R2, 6);
    program.and(R2, wire::IPV4_FRAGMENT.into());
    // Later fragments have no ports, so no fragment is taken.
    program.jump_if(R2, If::NotEqual, 0, pass);
    program.load(EbpfWidth::Byte, PROTOCOL, AT, 9);
    program.add_register(AT, R1);
    program.jump(segment);
}

fn ipv6(program: &mut Assembler, segment: Label, pass: Label) {
    require(program, 40, pass);
    program.load(EbpfWidth::Byte, R1, AT, 0); // version and traffic class
    program.shift_right(R1, 4);
    program.jump_if(R1, If::NotEqual, 6, pass);
    program.load(EbpfWidth::Byte, PROTOCOL, AT, 6);
    program.add(AT, 40);
    for _ in 0..MAX_EXTENSION_HEADERS {
        let extension = program.label();
        for kind in wire::EXTENSION_HEADERS {
            program.jump_if(PROTOCOL, If::Equal, kind.into(), extension);
        }
        program.jump(segment);
        program.place(extension);
        require(program, 8, pass);
        program.load(EbpfWidth::Byte, PROTOCOL, AT, 0);
        program.load(EbpfWidth::Byte, R1, AT, 1); // Hdr Ext Len: units of 8 bytes beyond the first
        program.add(R1, 1);
        program.shift_left(R1, 3);
        program.add_register(AT, R1);
    }
}

/// Compares the destination port with each range, in rising order.
fn ports(program: &mut Assembler, destinations: &FilterDestinations, ours: Label, pass: Label) {
    const PORT: EbpfRegister = R2;
    require(program, 4, pass);
    load_field(program, PORT, 2);
    for protocol in FilterProtocol::ALL {
        let next = program.label();
        program.jump_if(PROTOCOL, If::NotEqual, protocol.number().into(), next);
        for range in destinations.ports(protocol) {
            program.jump_if(PORT, If::Below, (*range.start()).into(), pass);
            program.jump_if(PORT, If::NotAbove, (*range.end()).into(), ours);
        }
        program.jump(pass);
        program.place(next);
    }
    program.jump(pass);
}

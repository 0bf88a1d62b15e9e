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
    let [ipv4_packet, ipv6_packet, behind] = [(); 3].map(|()| program.label());
    program.load(EbpfWidth::Word, AT, CONTEXT, MD_DATA);
    program.load(EbpfWidth::Word, END, CONTEXT, MD_DATA_END);

    ethernet(program, ipv4_packet, ipv6_packet, pass);
    program.place(ipv4_packet);
    ipv4(program, behind, pass);
    program.place(ipv6_packet);
    ipv6(program, behind, pass);
    program.place(behind);
    transport(program, destinations, ours, pass);
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

/// Register of the transport protocol, read by `transport`.
const PROTOCOL: EbpfRegister = R3;
/// Register of the port that is compared.
const PORT: EbpfRegister = R2;

fn ipv4(program: &mut Assembler, behind: Label, pass: Label) {
    require(program, 20, pass);
    ipv4_header_len(program, 0, pass);
    load_field(program, R2, 6);
    program.and(R2, wire::IPV4_FRAGMENT.into());
    // Later fragments have no ports, so no fragment is taken.
    program.jump_if(R2, If::NotEqual, 0, pass);
    program.load(EbpfWidth::Byte, PROTOCOL, AT, 9);
    program.add_register(AT, R1);
    program.jump(behind);
}

/// Loads the length of the IPv4 header at an offset into [`R1`], and jumps to `pass` if it is none.
fn ipv4_header_len(program: &mut Assembler, offset: i16, pass: Label) {
    program.load(EbpfWidth::Byte, R1, AT, offset); // version and IHL
    program.copy(R2, R1);
    program.shift_right(R2, 4);
    program.jump_if(R2, If::NotEqual, 4, pass);
    program.and(R1, 0x0f);
    program.jump_if(R1, If::Below, 5, pass);
    program.shift_left(R1, 2);
}

fn ipv6(program: &mut Assembler, behind: Label, pass: Label) {
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
        program.jump(behind);
        program.place(extension);
        require(program, 8, pass);
        program.load(EbpfWidth::Byte, PROTOCOL, AT, 0);
        program.load(EbpfWidth::Byte, R1, AT, 1); // Hdr Ext Len: units of 8 bytes beyond the first
        program.add(R1, 1);
        program.shift_left(R1, 3);
        program.add_register(AT, R1);
    }
}

/// Compares the port with each range of its protocol, in rising order.
fn transport(program: &mut Assembler, destinations: &FilterDestinations, ours: Label, pass: Label) {
    let tcp_ranges = program.label();
    if !destinations.ports(FilterProtocol::Tcp).is_empty() {
        icmp(program, tcp_ranges, pass);
        icmpv6(program, tcp_ranges, pass);
    }
    require(program, 4, pass);
    load_field(program, PORT, 2);
    for protocol in FilterProtocol::ALL {
        let next = program.label();
        program.jump_if(PROTOCOL, If::NotEqual, protocol.number().into(), next);
        if protocol == FilterProtocol::Tcp {
            program.place(tcp_ranges);
        }
        for range in destinations.ports(protocol) {
            program.jump_if(PORT, If::Below, (*range.start()).into(), pass);
            program.jump_if(PORT, If::NotAbove, (*range.end()).into(), ours);
        }
        program.jump(pass);
        program.place(next);
    }
    program.jump(pass);
}

/// Loads the source port of the segment that an ICMP error is about, and jumps to `tcp_ranges`. Other protocols fall through.
fn icmp(program: &mut Assembler, tcp_ranges: Label, pass: Label) {
    let quoted = i16::from(wire::ICMP_ERROR_BYTES);
    let [error, next] = [(); 2].map(|()| program.label());
    program.jump_if(PROTOCOL, If::NotEqual, wire::ICMP.into(), next);
    require(program, (quoted + 20).into(), pass);
    program.load(EbpfWidth::Byte, R1, AT, 0);
    for kind in wire::ICMP_ERRORS {
        program.jump_if(R1, If::Equal, kind.into(), error);
    }
    program.jump(pass);
    program.place(error);
    load_field(program, R2, quoted + 6);
    program.and(R2, wire::IPV4_OFFSET.into());
    program.jump_if(R2, If::NotEqual, 0, pass);
    program.load(EbpfWidth::Byte, R2, AT, quoted + 9);
    program.jump_if(R2, If::NotEqual, FilterProtocol::Tcp.number().into(), pass);
    ipv4_header_len(program, quoted, pass);
    program.add_register(AT, R1);
    require(program, (quoted + 2).into(), pass);
    load_field(program, PORT, quoted);
    program.jump(tcp_ranges);
    program.place(next);
}

/// As [`icmp`], of ICMPv6.
fn icmpv6(program: &mut Assembler, tcp_ranges: Label, pass: Label) {
    let quoted = i16::from(wire::ICMP_ERROR_BYTES);
    let next = program.label();
    let (first, last) = wire::ICMPV6_ERRORS.into_inner();
    program.jump_if(PROTOCOL, If::NotEqual, wire::ICMPV6.into(), next);
    require(program, (quoted + 40 + 2).into(), pass);
    program.load(EbpfWidth::Byte, R1, AT, 0);
    program.jump_if(R1, If::Below, first.into(), pass);
    program.jump_if(R1, If::Above, last.into(), pass);
    program.load(EbpfWidth::Byte, R1, AT, quoted);
    program.shift_right(R1, 4);
    program.jump_if(R1, If::NotEqual, 6, pass);
    program.load(EbpfWidth::Byte, R1, AT, quoted + 6);
    program.jump_if(R1, If::NotEqual, FilterProtocol::Tcp.number().into(), pass);
    load_field(program, PORT, quoted + 40);
    program.jump(tcp_ranges);
    program.place(next);
}

//! The filter as classic BPF for a packet socket: the kernel runs it on each packet before the
//! socket receives the packet. A read beyond the packet ends the program, and the packet is not
//! taken.

use forebay_rx::parse::extension::FRAGMENT;
use forebay_rx::parse::{ETHERTYPE_IPV4, ETHERTYPE_IPV6, Link};
use forebay_sys::socket_filter::FilterInstruction;

use super::{
    FilterDestinations, FilterProtocol, MAX_EXTENSION_HEADERS, RxFilter, TakenFragments, wire,
};

/// Builds the filter for a socket whose packets begin with `link`.
///
/// A stripped outer VLAN tag, which the kernel keeps beside the packet, counts as one of the tags.
#[must_use]
pub fn filter(take: &RxFilter, link: Link) -> Vec<FilterInstruction> {
    let RxFilter::Only(destinations) = take else { return vec![WHOLE] };
    let mut filter = FilterAssembler::default();
    link_header(&mut filter, link);
    let has_fragments = destinations.fragments() != TakenFragments::None;
    filter.place(FilterLabel::Ipv4);
    ipv4(&mut filter, has_fragments);
    filter.place(FilterLabel::Ipv6);
    ipv6(&mut filter, has_fragments);
    filter.end_with(NONE, FilterLabel::OtherPacket, FilterLabel::OtherPort);
    filter.place(FilterLabel::Transport);
    transport(&mut filter, destinations);
    filter.end_with(NONE, FilterLabel::OtherPort, FilterLabel::End);
    // The last but one: `FlowShare::narrow` replaces it.
    filter.place(FilterLabel::Ours);
    filter.push(WHOLE);
    filter.place(FilterLabel::End);
    filter.push(NONE);
    filter.finish()
}

/// Builds the filter that takes nothing. Packets taken before can still be read from the socket.
#[must_use]
pub fn nothing() -> Vec<FilterInstruction> {
    vec![NONE]
}

/// Jump target in the filter, always forwards.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum FilterLabel {
    /// VLAN tag with this number, from 0.
    Tag(usize),
    /// Network header, behind the tags.
    Network,
    Ipv4,
    Ipv6,
    /// Extension header with this number, from 0.
    Extension(usize),
    /// Packet that has no port, left to the kernel.
    OtherPacket,
    /// Transport header.
    Transport,
    Icmp,
    IcmpError,
    Icmpv6,
    Ipv4Fragment,
    Ipv6Fragment,
    /// Fragment, with its protocol in A.
    FragmentOf,
    TakenFragment,
    /// Ports of one protocol.
    Ports(u8),
    /// Ranges of TCP's ports, with the port in A.
    TcpRanges,
    /// Packet about another port, left to the kernel.
    OtherPort,
    Ours,
    End,
}

/// Filter being written. Register A is the accumulator, X the read position in the packet, memory
/// word [`PROTOCOL`] the transport protocol, [`SOURCE`] and those behind it the source address.
#[derive(Default)]
struct FilterAssembler {
    instructions: Vec<FilterInstruction>,
    places: Vec<(FilterLabel, usize)>,
    jumps: Vec<(usize, FilterBranch, FilterLabel)>,
}

/// Branch of a jump instruction.
#[derive(Clone, Copy)]
enum FilterBranch {
    IfSo,
    IfNot,
    Always,
}

// linux/bpf_common.h
const LOAD_BYTE_AT_X: u16 = 0x50;
pub(super) const LOAD_HALF_AT_X: u16 = 0x48;
const LOAD_BYTE: u16 = 0x30;
const LOAD_HALF: u16 = 0x28;
const LOAD_WORD: u16 = 0x20;
pub(super) const LOAD_WORD_AT_X: u16 = 0x40;
pub(super) const LOAD_MEMORY: u16 = 0x60;
pub(super) const STORE_MEMORY: u16 = 0x02;
pub(super) const LOAD_IMMEDIATE: u16 = 0x00;
const SET_X: u16 = 0x01;
pub(super) const A_TO_X: u16 = 0x07;
const X_TO_A: u16 = 0x87;
const ADD: u16 = 0x04;
pub(super) const ADD_X: u16 = 0x0c;
pub(super) const AND: u16 = 0x54;
const SHIFT_LEFT: u16 = 0x64;
pub(super) const SHIFT_RIGHT: u16 = 0x74;
pub(super) const JUMP: u16 = 0x05;
pub(super) const IF_EQUAL: u16 = 0x15;
const IF_ABOVE: u16 = 0x25;
pub(super) const IF_NOT_BELOW: u16 = 0x35;
pub(super) const IF_ANY_BIT: u16 = 0x45;
const RETURN: u16 = 0x06;

/// `SKF_AD_OFF + SKF_AD_VLAN_TAG_PRESENT`, linux/filter.h: 1 if a tag was stripped from the packet.
const TAG_IS_BESIDE: u32 = 0xffff_f000 + 48;
/// Memory word that holds the transport protocol.
pub(super) const PROTOCOL: u32 = 0;
/// First of the memory words that hold the source address; that of IPv4 is in the last one.
pub(super) const SOURCE: u32 = 1;
/// Number of these words.
pub(super) const SOURCE_WORDS: u32 = 4;
pub(super) const WHOLE: FilterInstruction =
    FilterInstruction { code: RETURN, jt: 0, jf: 0, k: u32::MAX };
pub(super) const NONE: FilterInstruction = FilterInstruction { code: RETURN, jt: 0, jf: 0, k: 0 };

/// Sets X to the offset of the network header.
fn link_header(filter: &mut FilterAssembler, link: Link) {
    if link == Link::Ip {
        filter.run(SET_X, 0);
        filter.run(LOAD_BYTE, 0);
        filter.run(SHIFT_RIGHT, 4);
        filter.jump_if(IF_EQUAL, 4, FilterLabel::Ipv4);
        filter.jump_if(IF_EQUAL, 6, FilterLabel::Ipv6);
        return filter.jump(FilterLabel::OtherPacket);
    }
    filter.run(SET_X, 14);
    filter.run(LOAD_HALF, 12);
    for (number, (at, behind)) in [(16, 18), (20, 22)].into_iter().enumerate() {
        for kind in wire::VLAN_TAGS {
            filter.jump_if(IF_EQUAL, kind.into(), FilterLabel::Tag(number));
        }
        filter.jump(FilterLabel::Network);
        filter.place(FilterLabel::Tag(number));
        if number + 1 == forebay_rx::parse::MAX_VLAN_TAGS {
            filter.run(LOAD_WORD, TAG_IS_BESIDE);
            filter.jump_unless(IF_EQUAL, 0, FilterLabel::OtherPacket); // the stripped tag is one too many
        }
        filter.run(SET_X, behind);
        filter.run(LOAD_HALF, at);
    }
    filter.place(FilterLabel::Network);
    filter.jump_if(IF_EQUAL, ETHERTYPE_IPV4.into(), FilterLabel::Ipv4);
    filter.jump_if(IF_EQUAL, ETHERTYPE_IPV6.into(), FilterLabel::Ipv6);
    filter.jump(FilterLabel::OtherPacket);
}

fn ipv4(filter: &mut FilterAssembler, has_fragments: bool) {
    filter.run(LOAD_BYTE_AT_X, 0); // version and IHL
    filter.run(SHIFT_RIGHT, 4);
    filter.jump_unless(IF_EQUAL, 4, FilterLabel::OtherPacket);
    filter.run(LOAD_WORD_AT_X, 16); // the last word without options
    filter.run(LOAD_BYTE_AT_X, 0);
    filter.run(AND, 0x0f);
    filter.jump_unless(IF_NOT_BELOW, 5, FilterLabel::OtherPacket);
    filter.run(LOAD_HALF_AT_X, 6);
    // Later fragments have no ports.
    let fragment = if has_fragments { FilterLabel::Ipv4Fragment } else { FilterLabel::OtherPacket };
    filter.jump_if(IF_ANY_BIT, wire::IPV4_FRAGMENT.into(), fragment);
    filter.run(LOAD_WORD_AT_X, 12);
    filter.run(STORE_MEMORY, SOURCE + SOURCE_WORDS - 1);
    filter.run(LOAD_IMMEDIATE, 0);
    for word in 0..SOURCE_WORDS - 1 {
        filter.run(STORE_MEMORY, SOURCE + word);
    }
    filter.run(LOAD_BYTE_AT_X, 9);
    filter.run(STORE_MEMORY, PROTOCOL);
    filter.run(LOAD_BYTE_AT_X, 0);
    filter.run(AND, 0x0f);
    filter.run(SHIFT_LEFT, 2);
    filter.run(ADD_X, 0);
    filter.run(A_TO_X, 0);
    filter.jump(FilterLabel::Transport);
    filter.place(FilterLabel::Ipv4Fragment);
    filter.run(LOAD_BYTE_AT_X, 9);
    filter.jump(if has_fragments { FilterLabel::FragmentOf } else { FilterLabel::OtherPacket });
}

fn ipv6(filter: &mut FilterAssembler, has_fragments: bool) {
    let behind = |filter: &mut FilterAssembler| {
        if has_fragments {
            filter.jump_if(IF_EQUAL, FRAGMENT.into(), FilterLabel::Ipv6Fragment);
        }
        filter.jump(FilterLabel::Transport);
    };
    filter.run(LOAD_BYTE_AT_X, 0); // version and traffic class
    filter.run(SHIFT_RIGHT, 4);
    filter.jump_unless(IF_EQUAL, 6, FilterLabel::OtherPacket);
    for word in 0..SOURCE_WORDS {
        filter.run(LOAD_WORD_AT_X, 8 + 4 * word);
        filter.run(STORE_MEMORY, SOURCE + word);
    }
    filter.run(LOAD_BYTE_AT_X, 6);
    filter.run(STORE_MEMORY, PROTOCOL);
    filter.run(X_TO_A, 0);
    filter.run(ADD, 40);
    filter.run(A_TO_X, 0);
    for number in 0..MAX_EXTENSION_HEADERS {
        filter.run(LOAD_MEMORY, PROTOCOL);
        for kind in wire::EXTENSION_HEADERS {
            filter.jump_if(IF_EQUAL, kind.into(), FilterLabel::Extension(number));
        }
        behind(filter);
        filter.place(FilterLabel::Extension(number));
        filter.run(LOAD_BYTE_AT_X, 0);
        filter.run(STORE_MEMORY, PROTOCOL);
        filter.run(LOAD_BYTE_AT_X, 1); // Hdr Ext Len: units of 8 bytes beyond the first
        filter.run(ADD, 1);
        filter.run(SHIFT_LEFT, 3);
        filter.run(ADD_X, 0);
        filter.run(A_TO_X, 0);
    }
    filter.run(LOAD_MEMORY, PROTOCOL);
    behind(filter);
}

/// Compares the port with each range of its protocol, in rising order.
fn transport(filter: &mut FilterAssembler, destinations: &FilterDestinations) {
    if destinations.fragments() == TakenFragments::Alone {
        filter.jump(FilterLabel::OtherPort);
        return fragment(filter, destinations);
    }
    filter.run(LOAD_MEMORY, PROTOCOL);
    for protocol in FilterProtocol::ALL {
        filter.jump_if(IF_EQUAL, protocol.number().into(), FilterLabel::Ports(protocol.number()));
    }
    if !destinations.ports(FilterProtocol::Tcp).is_empty() {
        filter.jump_if(IF_EQUAL, wire::ICMP.into(), FilterLabel::Icmp);
        filter.jump_if(IF_EQUAL, wire::ICMPV6.into(), FilterLabel::Icmpv6);
    }
    filter.jump(FilterLabel::OtherPort);
    if destinations.fragments() == TakenFragments::All {
        fragment(filter, destinations);
    }
    filter.place(FilterLabel::Icmp);
    icmp(filter);
    filter.place(FilterLabel::Icmpv6);
    icmpv6(filter);
    for protocol in FilterProtocol::ALL {
        filter.place(FilterLabel::Ports(protocol.number()));
        filter.run(LOAD_HALF_AT_X, 2);
        if protocol == FilterProtocol::Tcp {
            filter.place(FilterLabel::TcpRanges);
        }
        for range in destinations.ports(protocol) {
            filter.jump_unless(IF_NOT_BELOW, (*range.start()).into(), FilterLabel::OtherPort);
            filter.jump_unless(IF_ABOVE, (*range.end()).into(), FilterLabel::Ours);
        }
        filter.jump(FilterLabel::OtherPort);
    }
}

/// Takes fragments of the protocols that have ports.
fn fragment(filter: &mut FilterAssembler, destinations: &FilterDestinations) {
    filter.place(FilterLabel::Ipv6Fragment);
    filter.run(LOAD_BYTE_AT_X, 0);
    filter.place(FilterLabel::FragmentOf);
    for protocol in FilterProtocol::ALL {
        if !destinations.ports(protocol).is_empty() {
            let number = protocol.number().into();
            filter.jump_if(IF_EQUAL, number, FilterLabel::TakenFragment);
        }
    }
    filter.jump(FilterLabel::OtherPort);
    filter.end_with(WHOLE, FilterLabel::TakenFragment, FilterLabel::OtherPort);
}

/// Loads the source port of the segment that an ICMP error is about.
fn icmp(filter: &mut FilterAssembler) {
    let quoted = u32::from(wire::ICMP_ERROR_BYTES);
    filter.run(LOAD_BYTE_AT_X, 0);
    for kind in wire::ICMP_ERRORS {
        filter.jump_if(IF_EQUAL, kind.into(), FilterLabel::IcmpError);
    }
    filter.jump(FilterLabel::OtherPort);
    filter.place(FilterLabel::IcmpError);
    filter.run(LOAD_BYTE_AT_X, quoted);
    filter.run(SHIFT_RIGHT, 4);
    filter.jump_unless(IF_EQUAL, 4, FilterLabel::OtherPort);
    filter.run(LOAD_HALF_AT_X, quoted + 6);
    filter.jump_if(IF_ANY_BIT, wire::IPV4_OFFSET.into(), FilterLabel::OtherPort);
    filter.run(LOAD_BYTE_AT_X, quoted + 9);
    filter.jump_unless(IF_EQUAL, FilterProtocol::Tcp.number().into(), FilterLabel::OtherPort);
    filter.run(LOAD_BYTE_AT_X, quoted);
    filter.run(AND, 0x0f);
    filter.jump_unless(IF_NOT_BELOW, 5, FilterLabel::OtherPort);
    filter.run(SHIFT_LEFT, 2);
    filter.run(ADD_X, 0);
    filter.run(A_TO_X, 0);
    filter.run(LOAD_HALF_AT_X, quoted);
    filter.jump(FilterLabel::TcpRanges);
}

/// As [`icmp`], of ICMPv6.
fn icmpv6(filter: &mut FilterAssembler) {
    let quoted = u32::from(wire::ICMP_ERROR_BYTES);
    let (first, last) = wire::ICMPV6_ERRORS.into_inner();
    filter.run(LOAD_BYTE_AT_X, 0);
    filter.jump_unless(IF_NOT_BELOW, first.into(), FilterLabel::OtherPort);
    filter.jump_if(IF_ABOVE, last.into(), FilterLabel::OtherPort);
    filter.run(LOAD_BYTE_AT_X, quoted);
    filter.run(SHIFT_RIGHT, 4);
    filter.jump_unless(IF_EQUAL, 6, FilterLabel::OtherPort);
    filter.run(LOAD_BYTE_AT_X, quoted + 6);
    filter.jump_unless(IF_EQUAL, FilterProtocol::Tcp.number().into(), FilterLabel::OtherPort);
    filter.run(LOAD_HALF_AT_X, quoted + 40);
    filter.jump(FilterLabel::TcpRanges);
}

impl FilterAssembler {
    fn run(&mut self, code: u16, k: u32) {
        self.push(FilterInstruction { code, jt: 0, jf: 0, k });
    }

    fn jump_if(&mut self, code: u16, k: u32, to: FilterLabel) {
        self.jumps.push((self.instructions.len(), FilterBranch::IfSo, to));
        self.run(code, k);
    }

    fn jump_unless(&mut self, code: u16, k: u32, to: FilterLabel) {
        self.jumps.push((self.instructions.len(), FilterBranch::IfNot, to));
        self.run(code, k);
    }

    fn jump(&mut self, to: FilterLabel) {
        self.jumps.push((self.instructions.len(), FilterBranch::Always, to));
        self.run(JUMP, 0);
    }

    fn place(&mut self, label: FilterLabel) {
        self.places.push((label, self.instructions.len()));
    }

    fn push(&mut self, instruction: FilterInstruction) {
        self.instructions.push(instruction);
    }

    /// Ends with a verdict on packets that jump to `label`. An instruction behind it jumps to `later`.
    fn end_with(&mut self, verdict: FilterInstruction, label: FilterLabel, later: FilterLabel) {
        self.place(label);
        self.push(verdict);
        // Never run: the kernel takes what is behind an instruction for what follows it (`check_load_and_stores`), and would
        // find memory words unset here.
        self.jump(later);
    }

    /// Returns the filter, with the distance of every jump filled in. If it has a condition, it is at most `u8::MAX`
    /// instructions, which [`super::MAX_RANGES`] ensures.
    fn finish(mut self) -> Vec<FilterInstruction> {
        for (at, branch, label) in self.jumps {
            let place = self.places.iter().find(|&&(placed, _)| placed == label);
            let distance = place.map_or(0, |&(_, place)| place - at - 1);
            let Some(jump) = self.instructions.get_mut(at) else { continue };
            let short = || {
                let short = u8::try_from(distance).unwrap_or(u8::MAX);
                debug_assert_eq!(usize::from(short), distance, "{label:?} is too far from {at}");
                short
            };
            match branch {
                FilterBranch::IfSo => jump.jt = short(),
                FilterBranch::IfNot => jump.jf = short(),
                FilterBranch::Always => jump.k = u32::try_from(distance).unwrap_or(u32::MAX),
            }
        }
        self.instructions
    }
}

//! The packet filter: the kernel's BPF programs against the reference filter, and the reference
//! filter against the parser.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod frames; // frames of every kind, intact and damaged

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixDatagram;

use forebay_device::af_xdp::program;
use forebay_device::rx_filter::{FilterProtocol, MAX_RANGES, RxFilter, filter, nothing};
use forebay_rx::parse::{Fragment, Link, Network, Transport, Verify, View, parse};
use forebay_sys::bpf::{XdpAction, XdpLoad, XdpProgram, XskMap};
use forebay_sys::socket_filter;
use libtest_mimic::{Failed, Trial};
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use rustix::net::{AddressFamily, SocketType, socket};

pub(crate) fn trials() -> Vec<libtest_mimic::Trial> {
    let missing = missing();
    let name = "xdp_program_matches_rules";
    if let Some(missing) = &missing {
        eprintln!("{name} is ignored: {missing}");
    }
    let trials = vec![
        Trial::test(name, xdp).with_ignored_flag(missing.is_some()),
        Trial::test("socket_filter_matches_rules", socket_filter),
        Trial::test("taken_packets_have_those_ports", parsed),
        Trial::test("every_list_can_be_jumped_over", longest),
    ];
    trials
}

/// Reason why no XDP program can be run here, if there is one.
fn missing() -> Option<String> {
    if let Err(refused) = XskMap::create(1) {
        return Some(format!("no XSKMAP can be made: {}", refused.errno));
    }
    let xdp = socket(AddressFamily::XDP, SocketType::RAW, None).err();
    xdp.map(|errno| format!("no AF_XDP socket can be made: {errno}"))
}

const LISTS: [&str; 7] =
    ["all", "udp", "tcp", "udp:53", "udp:53,tcp:443", "udp:1000-2000,tcp:0,tcp:65535", "udp,tcp"];

fn lists() -> Vec<RxFilter> {
    LISTS.iter().map(|list| list.parse().unwrap()).collect()
}

/// List with the longest programs.
fn longest_list() -> RxFilter {
    let entries = (0..MAX_RANGES).map(|n| format!("udp:{}-{}", 10 * n + 1, 10 * n + 5));
    entries.collect::<Vec<_>>().join(",").parse().unwrap()
}

/// Tests a property on many frames.
fn try_frames(
    cases: u32,
    law: impl Fn(Link, &[u8]) -> Result<(), TestCaseError>,
) -> Result<(), Failed> {
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let tried =
        TestRunner::new(config).run(&frames::any_frame(), |(link, frame)| law(link, &frame));
    tried.map_err(|error| error.to_string().into())
}

/// Counts of both answers, to check that a test has met each of them often.
#[derive(Default)]
struct Answers {
    taken: std::cell::Cell<u32>,
    left: std::cell::Cell<u32>,
}

impl Answers {
    fn note(&self, is_taken: bool) {
        let count = if is_taken { &self.taken } else { &self.left };
        count.set(count.get() + 1);
    }

    fn judge(&self) -> Result<(), Failed> {
        let (taken, left) = (self.taken.get(), self.left.get());
        if taken < 100 || left < 100 {
            return Err(format!("{taken} taken and {left} left tell too little").into());
        }
        Ok(())
    }
}

fn xdp() -> Result<(), Failed> {
    let map = XskMap::create(1).map_err(told)?;
    let programs = lists().into_iter().map(|take| {
        let instructions = program::build(&take, map.as_fd(), None);
        let program = XdpProgram::load(&instructions, XdpLoad::default()).map_err(told)?;
        Ok((take, program))
    });
    let programs = programs.collect::<Result<Vec<_>, Failed>>()?;

    let frame = [0; 64];
    for (take, program) in &programs {
        // No socket is in the map: packets go to the kernel with any list.
        assert_eq!(program.run(&frame).map_err(told)?, XdpAction::Pass, "{take}");
    }
    let waiting = socket(AddressFamily::XDP, SocketType::RAW, None)?;
    map.insert(0, waiting.as_fd()).map_err(told)?;
    map.insert(1, waiting.as_fd()).unwrap_err();

    let answers = Answers::default();
    try_frames(4096, |link, frame| {
        // The kernel runs XDP programs only on frames with an Ethernet header.
        if link != Link::Ethernet || frame.len() < 14 {
            return Ok(());
        }
        for (take, program) in &programs {
            let action = program.run(frame).map_err(|r| TestCaseError::fail(format!("{r:?}")))?;
            let is_taken = take.takes(frame, link);
            let expected = if is_taken { XdpAction::Redirect } else { XdpAction::Pass };
            proptest::prop_assert_eq!(action, expected, "--take {}", take);
            answers.note(is_taken);
        }
        Ok(())
    })?;
    scattered(&map)?;
    map.remove(0).map_err(told)?;
    map.remove(0).map_err(told)?;
    assert_eq!(programs[0].1.run(&frame).map_err(told)?, XdpAction::Pass);
    answers.judge()
}

/// Of a frame in several buffers the program reads the first one, which has the headers.
fn scattered(map: &XskMap) -> Result<(), Failed> {
    let mut frame = [0; 9000];
    (frame[12], frame[14], frame[23], frame[37]) = (8, 0x45, 17, 53);
    let instructions = program::build(&"udp:53".parse()?, map.as_fd(), None);
    let how = XdpLoad { is_multi_buffer: true, ..XdpLoad::default() };
    let program = XdpProgram::load(&instructions, how).map_err(told)?;
    assert_eq!(program.run(&frame).map_err(told)?, XdpAction::Redirect);
    frame[37] = 54;
    assert_eq!(program.run(&frame).map_err(told)?, XdpAction::Pass);
    Ok(())
}

fn socket_filter() -> Result<(), Failed> {
    let answers = Answers::default();
    let in_all_ways = |take: RxFilter| {
        let whole = take.clone().with_fragments();
        [Some(take), whole.fragments_alone(), Some(whole)].into_iter().flatten()
    };
    for take in lists().into_iter().flat_map(in_all_ways) {
        for link in [Link::Ethernet, Link::Ip] {
            let (near, far) = UnixDatagram::pair()?;
            far.set_nonblocking(true)?;
            socket_filter::attach(far.as_fd(), &filter(&take, link))?;
            let law = |of, frame: &[u8]| {
                if of != link || frame.is_empty() {
                    return Ok(());
                }
                let is_taken = take.takes(frame, link);
                let arrived = passed(&near, &far, frame)?;
                proptest::prop_assert_eq!(arrived, is_taken, "--take {}, {:?}", take, link);
                answers.note(is_taken);
                Ok(())
            };
            try_frames(1024, law)?;
            // The number of IPv6's fragment header in IPv4, before a byte that is a protocol's.
            for protocol in FilterProtocol::ALL {
                let mut packet = [0; 40];
                (packet[0], packet[9], packet[20]) = (0x45, 44, protocol.number());
                law(Link::Ip, &packet).map_err(|error| error.to_string())?;
            }
            socket_filter::attach(far.as_fd(), &nothing())?;
            assert!(!passed(&near, &far, &[0; 64])?);
        }
    }
    answers.judge()
}

/// True if a frame arrives at the far socket unchanged.
fn passed(near: &UnixDatagram, far: &UnixDatagram, frame: &[u8]) -> io::Result<bool> {
    near.send(frame)?;
    let mut buffer = [0; 2048];
    match far.recv(&mut buffer) {
        Ok(len) => Ok(&buffer[..len] == frame),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
        Err(error) => Err(error),
    }
}

/// The parser is an independent implementation. If it finds ports and no flaw, the filter takes the
/// frame by those ports only; and every such frame if it is IPv4, where the authentication header
/// alone is skipped by the parser but not by the filter.
fn parsed() -> Result<(), Failed> {
    let answers = Answers::default();
    let takes = lists();
    try_frames(8192, |link, frame| {
        let headers = parse(frame, 0, link, Verify::Nothing);
        let protocol = match headers.transport {
            Transport::Tcp => FilterProtocol::Tcp,
            Transport::Udp => FilterProtocol::Udp,
            _ => return Ok(()),
        };
        let Some((_, port)) = View::new(frame, &headers).ports() else { return Ok(()) };
        if headers.flaw.is_some() {
            return Ok(());
        }
        let is_ipv4 = headers.network == Network::Ipv4;
        let is_plain = is_ipv4 && frame[usize::from(headers.network_offset) + 9] != 51;
        for take in &takes {
            let RxFilter::Only(destinations) = take else { continue };
            let is_listed = destinations.ports(protocol).iter().any(|range| range.contains(&port));
            let is_wanted = is_listed && headers.fragment == Fragment::Whole;
            let is_taken = take.takes(frame, link);
            proptest::prop_assert!(
                is_wanted || !is_taken,
                "{} takes {:?} {}",
                take,
                protocol,
                port
            );
            proptest::prop_assert!(is_taken || !(is_wanted && is_plain), "{} leaves it", take);
            answers.note(is_taken);
        }
        Ok(())
    })?;
    answers.judge()
}

fn longest() -> Result<(), Failed> {
    let take = longest_list();
    let (near, far) = UnixDatagram::pair()?;
    far.set_nonblocking(true)?;
    socket_filter::attach(far.as_fd(), &filter(&take, Link::Ethernet))?;
    let mut frame = [0; 64];
    (frame[12], frame[14], frame[23]) = (8, 0x45, 17);
    for port in 0..=u16::try_from(10 * MAX_RANGES + 10).unwrap() {
        frame[36..38].copy_from_slice(&port.to_be_bytes());
        let is_taken = (1..=5).contains(&(port % 10)) && usize::from(port) < 10 * MAX_RANGES;
        assert_eq!(take.takes(&frame, Link::Ethernet), is_taken, "{port}");
        assert_eq!(passed(&near, &far, &frame)?, is_taken, "{port}");
    }
    Ok(())
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn told(refused: forebay_sys::bpf::VerifierRefusal) -> Failed {
    format!("{refused:?}").into()
}

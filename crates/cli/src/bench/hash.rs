//! `bench hash`: from a parsed packet to its flow hash.

use std::hint::black_box;

use forebay_rx::hash::toeplitz::{STANDARD_KEY, TUPLE_BYTES};
use forebay_rx::hash::{Keyed, Toeplitz};
use forebay_rx::parse::{self, Verify, View};
use forebay_sys::random::Random;

use super::figures::Figures;
use super::{BenchArgs, BenchHash, input, solo};
use crate::failure::Failure;

/// Number of random tuples, as in the peer's benchmark.
const TUPLES: usize = 4096;

/// Addresses and ports of one packet, as in its bytes. As in a receive ring, headers are not adjacent,
/// and each has cache lines of its own.
#[repr(align(128))]
struct BenchTuple {
    bytes: [u8; TUPLE_BYTES],
    address_bytes: u8,
}

impl BenchTuple {
    fn addresses(&self) -> &[u8] {
        &self.bytes[..usize::from(self.address_bytes)]
    }

    fn ports(&self) -> Option<&[u8; 4]> {
        self.bytes[usize::from(self.address_bytes)..].first_chunk()
    }
}

pub(super) fn run(args: &BenchArgs) -> Result<Figures, Failure> {
    let tuples = match &args.file {
        Some(_) => captured(args)?,
        None => made_up(args.v6),
    };
    let toeplitz = Toeplitz::new(&STANDARD_KEY, TUPLE_BYTES)
        .map_err(|error| Failure::usage(error.to_string(), "this is a bug: please report it"))?;
    let keyed = Keyed::new(&[7; 16], false);
    let hash = |tuple: &BenchTuple| match args.hash {
        BenchHash::Keyed => keyed.hash(tuple.addresses(), tuple.ports()),
        BenchHash::Toeplitz | BenchHash::Given => {
            toeplitz.hash_tuple(tuple.addresses(), tuple.ports())
        }
    };
    let figures = solo::measure(args, "hash", "ns/hash", tuples.len(), || {
        let all = tuples.iter().fold(0, |all, tuple| all ^ hash(tuple));
        black_box(all);
    });
    let kind = if args.hash == BenchHash::Keyed { "keyed" } else { "toeplitz" };
    let ipv6 = tuples.iter().filter(|tuple| tuple.address_bytes == 32).count();
    Ok(figures
        .with("input", input::name(args.file.as_deref()))
        .with("hash", kind)
        .with("tuples", tuples.len())
        .with("ipv6_tuples", ipv6))
}

fn captured(args: &BenchArgs) -> Result<Vec<BenchTuple>, Failure> {
    let packets = input::packets(args.file.as_deref())?;
    let tuples: Vec<_> = packets
        .iter()
        .filter_map(|packet| {
            let headers =
                parse::parse(&packet.bytes, packet.wire_len, packet.link, Verify::Nothing);
            let view = View::new(&packet.bytes, &headers);
            Some(tuple(view.address_bytes()?, view.port_bytes()?))
        })
        .collect();
    if tuples.is_empty() {
        return Err(Failure::usage("the capture holds no TCP or UDP packet", "give another"));
    }
    Ok(tuples)
}

fn made_up(ipv6: bool) -> Vec<BenchTuple> {
    let mut random = Random::new(1);
    let mut tuples = Vec::with_capacity(TUPLES);
    for _ in 0..TUPLES {
        let bytes: Vec<u8> = (0..5).flat_map(|_| random.bits().to_le_bytes()).collect();
        let addresses = if ipv6 { &bytes[..32] } else { &bytes[..8] };
        tuples.push(tuple(addresses, &[bytes[36], bytes[37], bytes[38], bytes[39]]));
    }
    tuples
}

fn tuple(addresses: &[u8], ports: &[u8; 4]) -> BenchTuple {
    let mut bytes = [0; TUPLE_BYTES];
    let (first, second) = bytes.split_at_mut(addresses.len());
    first.copy_from_slice(addresses);
    second[..4].copy_from_slice(ports);
    BenchTuple { bytes, address_bytes: if addresses.len() == 32 { 32 } else { 8 } }
}

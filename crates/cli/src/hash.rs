//! `forebay hash`: Toeplitz hashes of test vectors.

use std::collections::HashMap;
use std::net::IpAddr;

use forebay_rx::hash::Toeplitz;
use forebay_rx::hash::toeplitz::TUPLE_BYTES;
use forebay_sys::text_file::read_text;
use serde::Deserialize;

use crate::args::HashArgs;
use crate::failure::Failure;
use crate::output;

/// Maximum length of a file of vectors, in bytes.
const VECTORS_BYTES_MAX: usize = 16 << 20;

/// A file of vectors.
#[derive(Debug, Deserialize)]
struct Vectors {
    /// Keys by name, in hexadecimal.
    keys: HashMap<String, String>,
    #[serde(default)]
    tuples: Vec<HashTuple>,
    #[serde(default)]
    raw: Vec<Raw>,
}

/// A packet's addresses and ports: hashed with the ports and without.
#[derive(Debug, Deserialize)]
struct HashTuple {
    id: String,
    src: IpAddr,
    dst: IpAddr,
    sport: u16,
    dport: u16,
    key: String,
}

/// Any input, in hexadecimal.
#[derive(Debug, Deserialize)]
struct Raw {
    id: String,
    data: String,
    key: String,
}

/// Prints `id,hash` for each vector: a tuple gives `id/l3` and `id/l3l4`.
pub(crate) fn run(args: &HashArgs) -> Result<(), Failure> {
    let file = args.vectors.display();
    let text = read_text(&args.vectors, VECTORS_BYTES_MAX).map_err(|error| {
        Failure::usage(format!("cannot read {file}: {error}"), "give a file of vectors")
    })?;
    let vectors: Vectors = serde_json::from_str(&text).map_err(|error| {
        let help = "a file of vectors has `keys`, `tuples` and `raw`: see vectors/toeplitz.json";
        Failure::usage(format!("{file}: {error}"), help)
    })?;
    let mut lines = String::new();
    for tuple in &vectors.tuples {
        let [l3, l3l4] = hash_tuple(tuple, &vectors)?;
        lines += &format!("{id}/l3,{l3:08x}\n{id}/l3l4,{l3l4:08x}\n", id = tuple.id);
    }
    for raw in &vectors.raw {
        lines += &format!("{},{:08x}\n", raw.id, hash_raw(raw, &vectors)?);
    }
    output::print(&lines)
}

fn hash_tuple(tuple: &HashTuple, vectors: &Vectors) -> Result<[u32; 2], Failure> {
    let key = vectors.key(&tuple.key, &tuple.id)?;
    let addresses = match (tuple.src, tuple.dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => [src.octets(), dst.octets()].concat(),
        (IpAddr::V6(src), IpAddr::V6(dst)) => [src.octets(), dst.octets()].concat(),
        _ => return Err(bad(&tuple.id, "src and dst are of different kinds")),
    };
    let ports = [tuple.sport.to_be_bytes(), tuple.dport.to_be_bytes()];
    let toeplitz = prepared(&key, addresses.len() + 4, &tuple.id)?;
    let with_ports = [&addresses, ports.as_flattened()].concat();
    let hash = |input: &[u8]| toeplitz.hash(input).map_err(|error| bad(&tuple.id, error));
    Ok([hash(&addresses)?, hash(&with_ports)?])
}

fn hash_raw(raw: &Raw, vectors: &Vectors) -> Result<u32, Failure> {
    let key = vectors.key(&raw.key, &raw.id)?;
    let data = hex::decode(&raw.data).map_err(|error| bad(&raw.id, format!("data: {error}")))?;
    let toeplitz = prepared(&key, data.len(), &raw.id)?;
    toeplitz.hash(&data).map_err(|error| bad(&raw.id, error))
}

/// Prepares tables for a tuple if the key is long enough, so that the code under test is the code
/// that hashes packets.
fn prepared(key: &[u8], input_bytes: usize, id: &str) -> Result<Toeplitz, Failure> {
    Toeplitz::new(key, TUPLE_BYTES.max(input_bytes))
        .or_else(|_| Toeplitz::new(key, input_bytes))
        .map_err(|error| bad(id, error))
}

impl Vectors {
    fn key(&self, name: &str, id: &str) -> Result<Vec<u8>, Failure> {
        let key = self.keys.get(name);
        let key = key.ok_or_else(|| bad(id, format!("there is no key {name:?}")))?;
        hex::decode(key).map_err(|error| bad(id, format!("key {name:?}: {error}")))
    }
}

fn bad(id: &str, problem: impl std::fmt::Display) -> Failure {
    Failure::usage(format!("vector {id}: {problem}"), "correct the vector, then try again")
}

//! Published vectors: Microsoft's RSS verification suite, symmetric pairs, and the CPU that the
//! kernel, and the queue that a network card, selects for the same hashes.

#![allow(clippy::unwrap_used, reason = "the vectors stand beside the test")]

use std::net::IpAddr;

use forebay_rx::CpuId;
use forebay_rx::cpu::RxQueue;
use forebay_rx::hash::toeplitz::TUPLE_BYTES;
use forebay_rx::hash::{FlowHash, Indirection, RETA_ENTRIES, Toeplitz};
use forebay_rx::steer::RpsMap;
use serde_json::Value;

fn vectors() -> Value {
    serde_json::from_str(include_str!("vectors/toeplitz.json")).unwrap()
}

fn rows<'v>(vectors: &'v Value, of: &[&str]) -> &'v [Value] {
    of.iter().fold(vectors, |value, name| &value[name]).as_array().unwrap()
}

fn hexadecimal(value: &Value) -> u32 {
    u32::from_str_radix(value.as_str().unwrap(), 16).unwrap()
}

fn number(value: &Value) -> u16 {
    value.as_u64().and_then(|number| u16::try_from(number).ok()).unwrap()
}

fn address_bytes(value: &Value) -> Vec<u8> {
    match value.as_str().unwrap().parse().unwrap() {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

#[test]
fn rps_5_published_toeplitz_hashes_of_tuples() {
    let vectors = vectors();
    let mut judged = 0;
    for row in rows(&vectors, &["tuples"]) {
        let key = vectors["keys"][row["key"].as_str().unwrap()].as_str().unwrap();
        let toeplitz = Toeplitz::new(&hex::decode(key).unwrap(), TUPLE_BYTES).unwrap();
        let addresses = [address_bytes(&row["src"]), address_bytes(&row["dst"])].concat();
        let ports = [number(&row["sport"]), number(&row["dport"])].map(u16::to_be_bytes);
        let ports = ports.as_flattened().try_into().unwrap();
        for (name, ports) in [("hash_l3", None), ("hash_l3l4", Some(ports))] {
            if let Some(hash) = row.get(name) {
                let computed = toeplitz.hash_tuple(&addresses, ports);
                assert_eq!(computed, hexadecimal(hash), "{} {name}", row["id"]);
                judged += 1;
            }
        }
    }
    assert_eq!(judged, 80);
}

#[test]
fn rps_4_published_choices_of_a_cpu() {
    for row in rows(&vectors(), &["rps_select", "vectors"]) {
        let map = RpsMap::new((0..number(&row["len"])).map(CpuId));
        let chosen = map.select(FlowHash(hexadecimal(&row["hash"])));
        assert_eq!(chosen, Some(CpuId(number(&row["index"]))), "{row}");
    }
}

#[test]
fn published_entries_of_an_indirection_table() {
    let table = Indirection::new(RETA_ENTRIES);
    let vectors = vectors();
    let rows = rows(&vectors, &["rss_reta", "vectors"]);
    for row in rows.iter().filter(|row| row["size"] == RETA_ENTRIES) {
        let queue = table.queue(FlowHash(hexadecimal(&row["hash"])));
        assert_eq!(queue, RxQueue(number(&row["index"])), "{row}");
    }
}

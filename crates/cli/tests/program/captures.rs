//! Captures that `forebay replay` is given: what is read, what is refused, and what is said.

use super::*;

/// A block of a little-endian pcapng capture.
fn block(kind: u32, body: &[u8]) -> Vec<u8> {
    let mut body = body.to_vec();
    body.resize(body.len().next_multiple_of(4), 0);
    let total = (u32::try_from(body.len()).unwrap() + 12).to_le_bytes();
    [&kind.to_le_bytes(), &total, &body[..], &total].concat()
}

fn interface(link_type: u16) -> Vec<u8> {
    block(1, &[&link_type.to_le_bytes()[..], &[0; 6]].concat())
}

fn packet(interface: u32, bytes: &[u8]) -> Vec<u8> {
    let len = u32::try_from(bytes.len()).unwrap();
    let fields = [interface, 0, 0, len, len].map(u32::to_le_bytes);
    block(6, &[fields.as_flattened(), bytes].concat())
}

/// Writes a pcapng capture of these blocks.
fn write_pcapng(desk: &Desk, name: &str, blocks: &[Vec<u8>]) {
    let section = [&0x1a2b_3c4d_u32.to_le_bytes()[..], &[1, 0, 0, 0], &[0xff; 8]].concat();
    let file = [block(0x0a0d_0d0a, &section), blocks.concat()].concat();
    fs::write(desk.path(name), file).unwrap();
}

#[test]
fn promise_2_records_not_read_are_told_by_link_type() {
    let desk = Desk::new();
    let beacon = packet(1, b"a beacon");
    let interfaces = [interface(1), interface(105)].concat();
    write_pcapng(&desk, "m.pcapng", &[interfaces, packet(0, &[0; 60]), beacon.clone(), beacon]);
    let report = desk.report("m.pcapng --loops 2 --cpus 1");
    assert_eq!([&report["delivered"], &report["dropped"]["link_type"]], [2, 4]);
    assert_eq!(report["unread_link_types"]["105 (IEEE802_11)"], 4);
    let told = desk.run("replay m.pcapng --cpus 1").told;
    assert!(told.contains("2 records dropped as link_type: of link type 105"), "{told}");
}

#[test]
fn a_capture_of_which_nothing_is_read_is_refused() {
    let desk = Desk::new();
    desk.write_one_flow("good.pcap", 3);
    let beacons = [interface(105), packet(0, b"a beacon"), packet(0, b"another")];
    write_pcapng(&desk, "w.pcapng", &beacons);
    for files in ["w.pcapng", "good.pcap w.pcapng"] {
        let run = desk.run(&format!("replay {files} --cpus 1 --write-pcap out"));
        assert_eq!(run.code, Some(2), "{files}: {}", run.told);
        for part in [
            "w.pcapng: none of its records can be read (2 of link type 105 (IEEE802_11))",
            "LINUX_SLL (113)",
        ] {
            assert!(run.told.contains(part), "{files}: {part:?} is not in {:?}", run.told);
        }
        assert!(!desk.path("out").exists(), "no packet was replayed");
    }
}

#[test]
fn all_captures_are_judged_before_the_first_is_replayed() {
    let desk = Desk::new();
    desk.write_one_flow("good.pcap", 3);
    fs::write(desk.path("text.pcap"), "this is no capture, as anybody sees").unwrap();
    for (second, problem) in [
        ("none.pcap", "cannot open none.pcap"),
        ("text.pcap", "text.pcap: not a capture file"),
        (".", "cannot read ."),
    ] {
        let run = desk.run(&format!("replay good.pcap {second} --cpus 1 --write-pcap out"));
        assert_eq!((run.code, run.stdout.as_str()), (Some(2), ""), "{second}: {}", run.told);
        assert!(run.told.contains(problem), "{second}: {}", run.told);
        assert!(!desk.path("out").exists(), "no packet was replayed");
    }
}

//! Queries, built octet by octet.

/// Record types of zones, and some meta types.
pub(crate) const TYPES: [u16; 22] =
    [0, 1, 2, 5, 6, 12, 15, 16, 28, 33, 41, 43, 46, 47, 249, 251, 252, 253, 254, 255, 257, 65280];

pub(crate) const A: u16 = 1;
pub(crate) const TXT: u16 = 16;
pub(crate) const ANY: u16 = 255;

/// Flags of a standard query with RD.
pub(crate) const STANDARD: u16 = 0x0100;

/// Converts a name to wire format.
pub(crate) fn name(text: &str) -> Vec<u8> {
    let labels = text.split('.').filter(|label| !label.is_empty());
    let octets = |label: &str| [&[u8::try_from(label.len()).unwrap()], label.as_bytes()].concat();
    labels.map(octets).chain([vec![0]]).flatten().collect()
}

pub(crate) fn header(flags: u16, counts: [u16; 4]) -> Vec<u8> {
    let words = [0x1234, flags].into_iter().chain(counts);
    words.flat_map(u16::to_be_bytes).collect()
}

pub(crate) fn question(text: &str, rtype: u16, class: u16) -> Vec<u8> {
    [&name(text)[..], &rtype.to_be_bytes(), &class.to_be_bytes()].concat()
}

/// An OPT record.
pub(crate) fn opt(payload_max_bytes: u16, ttl: u32, options: &[u8]) -> Vec<u8> {
    let len = u16::try_from(options.len()).unwrap().to_be_bytes();
    let size = payload_max_bytes.to_be_bytes();
    [&[0, 0, 41][..], &size, &ttl.to_be_bytes(), &len, options].concat()
}

/// One question, with EDNS or without.
pub(crate) fn query(text: &str, rtype: u16, opt: Option<&[u8]>) -> Vec<u8> {
    let additional = u16::from(opt.is_some());
    let header = header(STANDARD, [1, 0, 0, additional]);
    [&header[..], &question(text, rtype, 1), opt.unwrap_or_default()].concat()
}

/// EDNS options of clients.
pub(crate) fn clients() -> Vec<Option<Vec<u8>>> {
    let sizes = [0, 512, 600, 1232, 4096].map(|size| Some(opt(size, 0, &[])));
    sizes.into_iter().chain([None, Some(opt(1232, 0x8000, &[]))]).collect()
}

/// Names of the zone `ZONE`, and names that it lacks.
pub(crate) fn names() -> Vec<String> {
    let owners = crate::ZONE.lines().filter_map(|line| line.split_whitespace().next());
    let owners = owners.filter(|owner| !owner.starts_with(['$', ';', '@']));
    let mut owners: Vec<&str> = owners.collect();
    owners.dedup();
    let mut names: Vec<String> =
        ["example.test", "test", "com", "", "notexample.test", "x.com"].map(String::from).into();
    for owner in owners.into_iter().chain(["", "a.b", "b", "_udp", "nothing"]) {
        let name = format!("{owner}.example.test");
        let name = name.trim_start_matches('.');
        names
            .extend(["", "none.", "*.", "Deep.er.", "host."].map(|front| format!("{front}{name}")));
        names.push(name.to_uppercase());
    }
    names
}

/// Queries with one error each, or unusual ones.
pub(crate) fn unusual() -> Vec<(String, Vec<u8>)> {
    let mut all = headers();
    all.extend(counts());
    all.extend(options());
    all.extend(names_of_octets());
    let whole = query("h0.example.test", A, None);
    all.extend((0..=whole.len()).map(|len| (format!("cut to {len}"), whole[..len].to_vec())));
    let whole = query("h0.example.test", A, Some(&opt(1232, 0, &[0, 3, 0, 0])));
    all.extend((33..whole.len()).map(|len| (format!("EDNS cut to {len}"), whole[..len].to_vec())));
    all
}

/// All flags and opcodes, except NOTIFY and UPDATE, which Knot DNS supports and the example does
/// not.
fn headers() -> Vec<(String, Vec<u8>)> {
    let bits = (0..16).map(|bit| 1_u16 << bit);
    let operations = (0..16).filter(|code| ![4, 5].contains(code)).map(|code: u16| code << 11);
    let mut all = Vec::new();
    for flags in bits.filter(|flags| ![1 << 13, 1 << 11].contains(flags)).chain(operations) {
        for opt in [None, Some(opt(1232, 0, &[])), Some(opt(1232, 1 << 16, &[]))] {
            let header = header(flags, [1, 0, 0, u16::from(opt.is_some())]);
            let question = question("h0.example.test", A, 1);
            let query = [header, question, opt.clone().unwrap_or_default()].concat();
            all.push((format!("flags {flags:04x}, {opt:?}"), query));
        }
    }
    for class in [0, 2, 3, 4, 254, 255, 256] {
        for (name, opt) in [("h0.example.test", None), ("x.com", None), ("", Some(opt(9, 0, &[])))]
        {
            let header = header(STANDARD, [1, 0, 0, u16::from(opt.is_some())]);
            let query = [header, question(name, A, class), opt.unwrap_or_default()].concat();
            all.push((format!("{name} of class {class}"), query));
        }
    }
    all
}

fn counts() -> Vec<(String, Vec<u8>)> {
    let asked = question("h0.example.test", A, 1);
    let address =
        [&name("h0.example.test")[..], &[0, 1, 0, 1, 0, 0, 0, 9, 0, 4, 1, 2, 3, 4]].concat();
    let edns = opt(1232, 0, &[]);
    let tails: [(&str, Vec<u8>); 9] = [
        ("nothing", vec![]),
        ("a question", asked.clone()),
        ("an address", address.clone()),
        ("EDNS", edns.clone()),
        ("EDNS twice", [&edns[..], &edns].concat()),
        ("an address and EDNS", [&address[..], &edns].concat()),
        ("EDNS and an address", [&edns[..], &address].concat()),
        ("an octet", vec![7]),
        ("EDNS and an octet", [&edns[..], &[7]].concat()),
    ];
    // Of queries without a question, Knot DNS answers some that have other errors; the example does
    // not.
    let lone = [header(STANDARD, [0, 0, 0, 1]), edns.clone()].concat();
    let mut all = vec![("EDNS only".to_owned(), lone)];
    for number in 0_u16..81 {
        let counts = [number % 3, number / 3 % 3, number / 9 % 3, number / 27];
        for (what, tail) in &tails {
            let query = [&header(STANDARD, counts)[..], &asked, tail].concat();
            all.push((format!("{counts:?} and {what}"), query));
        }
        all.push((format!("{counts:?} and no question"), header(STANDARD, counts)));
    }
    all
}

/// EDNS options that are unknown or malformed.
fn options() -> Vec<(String, Vec<u8>)> {
    let options: [&[u8]; 12] = [
        &[0, 10, 0, 8, 1, 2, 3, 4, 5, 6, 7, 8],
        &[0, 10, 0, 3, 1, 2, 3],
        &[0, 8, 0, 5, 0, 1, 8, 0, 10],
        &[0, 8, 0, 2, 1, 2],
        &[0, 11, 0, 0],
        &[0, 12, 0, 4, 0, 0, 0, 0],
        &[255, 1, 0, 0, 255, 2, 0, 1, 9],
        &[0, 12, 0, 5, 0, 0, 0, 0],
        &[0, 12, 0],
        &[0, 12],
        &[0],
        &[255, 1, 0, 0, 255],
    ];
    let mut all = Vec::new();
    for options in options {
        let query = query("h0.example.test", A, Some(&opt(1232, 0, options)));
        all.push((format!("options {options:?}"), query));
    }
    for ttl in (0..32).map(|bit| 1 << bit) {
        for asked in ["h0.example.test", "x.com", "none.example.test"] {
            all.push((
                format!("{asked}, EDNS {ttl:08x}"),
                query(asked, A, Some(&opt(1232, ttl, &[]))),
            ));
        }
    }
    all
}

fn names_of_octets() -> Vec<(String, Vec<u8>)> {
    let ask = |name: &[u8]| {
        let tail = [0, 1, 0, 1].repeat(12);
        [&header(STANDARD, [1, 0, 0, 0]), name, &tail[..4]].concat()
    };
    let apex = name("example.test");
    let long = [[63; 64].as_slice(), &[63; 64], &[63; 64]].concat();
    let mut all = vec![
        ("a pointer to itself", ask(&[0xc0, 12])),
        ("a pointer behind", ask(&[0xc0, 16])),
        ("a pointer into the header", ask(&[2, b'h', b'0', 0xc0, 0])),
        ("a label of kind 01", ask(&[&[0x41][..], &[1; 65], &[0]].concat())),
        ("a label of kind 10", ask(&[&[0x81][..], &[1; 129], &[0]].concat())),
        ("octets that are no letters", ask(&[&[4, 0, 255, b'.', b'\\'][..], &apex].concat())),
        ("127 labels", ask(&[&[1, b'a'].repeat(120)[..], &apex].concat())),
        ("128 labels", ask(&[&[1, b'a'].repeat(121)[..], &apex].concat())),
    ];
    let front = |len: u8| [&long[..], &[len], &vec![b'b'; len.into()], &apex].concat();
    all.extend([("254 octets", ask(&front(47))), ("255 octets", ask(&front(48)))]);
    all.extend([("256 octets", ask(&front(49))), ("257 octets", ask(&front(50)))]);
    all.into_iter().map(|(what, query)| (what.to_owned(), query)).collect()
}

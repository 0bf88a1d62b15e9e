use super::*;

fn entries(text: &str) -> Result<Vec<(String, String, usize)>, String> {
    let file = ConfigFile::parse(Path::new("f.toml"), text).map_err(|error| error.to_string())?;
    let entries = file.entries.into_iter();
    Ok(entries.map(|entry| (entry.name, entry.value, entry.line)).collect())
}

fn entry(name: &str, value: &str, line: usize) -> (String, String, usize) {
    (name.to_owned(), value.to_owned(), line)
}

#[test]
fn strings_numbers_and_queue_order() {
    let text = "[knobs.rx-1]\nrps_cpus = \"2\"\n[knobs]\nmtu = 9_000\nrps_flow_cnt = 0x401\n\
                \"proc/sys/net/core/dev_weight\" = 5\nrps_cpus = \"0-1\"\n\
                [knobs.eth0.rx-1]\nrps_cpus = \"3\"\n[knobs.\"eth1.7\"]\nmtu = 70\n";
    let expected = [
        entry("mtu", "9000", 4),
        entry("rps_flow_cnt", "0x401", 5),
        entry("rps_cpus", "0-1", 7),
        entry("rx-1/rps_cpus", "2", 2),
        entry("eth1.7/mtu", "70", 11),
        entry("eth0/rx-1/rps_cpus", "3", 9),
        entry("proc/sys/net/core/dev_weight", "5", 6),
    ];
    assert_eq!(entries(text).unwrap(), expected);
    assert_eq!(entries("").unwrap(), []);
}

#[test]
fn svc_1_run_options_have_lines() {
    let text = "[run]\ndevices = [\"eth1\", \"tun:t0\"]\nqueues = 2\nduration = 1.5\n\
                check = true\nyes = false\n";
    let file = ConfigFile::parse(Path::new("f.toml"), text).unwrap();
    let texts = |texts: &[&str]| {
        run_options::OptionValue::Texts(texts.iter().map(|text| (*text).to_owned()).collect())
    };
    let options: Vec<_> =
        file.run_options().iter().map(|it| (it.name.as_str(), &it.value, it.line)).collect();
    let expected = [
        ("check", &run_options::OptionValue::Flag(true), 5),
        ("devices", &texts(&["eth1", "tun:t0"]), 2),
        ("duration", &texts(&["1.5"]), 4),
        ("queues", &texts(&["2"]), 3),
        ("yes", &run_options::OptionValue::Flag(false), 6),
    ];
    assert_eq!(options, expected);
    assert_eq!(file.entries, []);
}

#[test]
fn svc_1_saving_keeps_run_table() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f.toml");
    fs::write(&path, "[run]\ndevices = [\"eth1\"]\n[knobs]\nmtu = 70\n").unwrap();
    save(&path, &[]).unwrap();
    let file = ConfigFile::read(&path).unwrap();
    assert_eq!((file.entries.len(), file.run_options().len()), (0, 1));
    fs::write(&path, "not a config file").unwrap();
    assert!(save(&path, &[]).unwrap_err().to_string().contains("would be lost"));
    assert_eq!(fs::read_to_string(&path).unwrap(), "not a config file");
}

#[test]
fn svc_1_saving_spares_other_files() {
    use std::os::unix::net::UnixListener;

    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f.toml");
    for text in [
        &b"[package]\nname = \"a\"\n"[..],
        b"\x7fELF\xff\xfe",
        b"[run]\nto = [1, true]\n",
        b"[knobs]\nmtu = true\n",
    ] {
        fs::write(&path, text).unwrap();
        assert!(save(&path, &[]).is_err(), "{text:?}");
        assert_eq!(fs::read(&path).unwrap(), text);
    }
    let socket = dir.path().join("s.sock");
    let _bound = UnixListener::bind(&socket).unwrap();
    let refused = save(&socket, &[]).unwrap_err().to_string();
    assert!(refused.contains("it is not a regular file"), "{refused}");
    fs::remove_file(&socket).unwrap();
    for empty in ["", " \n\n"] {
        fs::write(&path, empty).unwrap();
        save(&path, &[]).unwrap();
        assert_eq!(ConfigFile::read(&path).unwrap().entries, []);
    }
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 1, "nothing is left behind");
}

#[test]
fn svc_1_saved_file_keeps_owner_and_link() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};

    let dir = tempfile::tempdir().unwrap();
    let [path, link] = ["f.toml", "link"].map(|name| dir.path().join(name));
    fs::write(&path, "[knobs]\nmtu = 70\n").unwrap();
    symlink("f.toml", &link).unwrap();
    // Only root may give it away.
    let _ = chown(&path, Some(4711), Some(4712));
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    let facts = || {
        let found = fs::metadata(&path).unwrap();
        (found.uid(), found.gid(), found.mode() & 0o7777)
    };
    let before = facts();
    save(&link, &[]).unwrap();
    assert_eq!(fs::read_link(&link).unwrap(), Path::new("f.toml"));
    assert_eq!(ConfigFile::read(&path).unwrap().entries, []);
    assert_eq!(facts(), before);
    // A link to nothing is no place to save to.
    fs::remove_file(&path).unwrap();
    assert!(save(&link, &[]).is_err());
    assert_eq!(fs::read_link(&link).unwrap(), Path::new("f.toml"));
}

#[test]
fn flow_limit_length_is_set_first() {
    let text = "[knobs]\nflow_limit_cpu_bitmap = \"1\"\n\
                \"proc/sys/net/core/flow_limit_table_len\" = 64\n";
    let names: Vec<_> = entries(text).unwrap().into_iter().map(|(name, ..)| name).collect();
    assert_eq!(names, ["proc/sys/net/core/flow_limit_table_len", "flow_limit_cpu_bitmap"]);
}

#[test]
fn non_config_error_has_line() {
    for (text, problem) in [
        ("[knobs]\nmtu = \n", "f.toml:2: "),
        ("\n[knob]\nmtu = 1\n", "f.toml:2: there are only the tables [run] and [knobs], not knob"),
        ("mtu = 1\n", "f.toml:1: there are only the tables [run] and [knobs], not mtu"),
        ("[knobs]\nmtu = 1\nmtu = 2\n", "f.toml:3: duplicate key"),
        ("[knobs]\n\nmtu = true\n", "f.toml:3: mtu is a string or a number, not boolean"),
        ("[run]\n[run.take]\n", "f.toml:2: take is a string, a number, true or false, or a list"),
        ("[run]\nto = [1, true]\n", "f.toml:2: to is a string, a number, true or false"),
        ("[knobs]\nmtu = [1]\n", "f.toml:2: mtu is a string or a number, not array"),
        ("[knobs.a.b.c]\nd = 1\n", "f.toml:1: a/b/c is a string or a number, not table"),
    ] {
        let refused = entries(text).unwrap_err();
        assert!(refused.starts_with(problem), "{text}: {refused}");
    }
}

#[test]
fn what_is_saved_is_read_back() {
    let listed = |path: &str, value: &str, default: &str| ListedKnob {
        path: path.to_owned(),
        value: value.to_owned(),
        requested: value.to_owned(),
        default: default.to_owned(),
        meaning: String::new(),
    };
    let knobs = [
        listed("sys/class/net/replay/queues/rx-0/rps_cpus", "10", "3"),
        listed("sys/class/net/replay/queues/rx-1/rps_cpus", "3", "3"),
        listed("sys/class/net/replay/queues/rx-0/rps_flow_cnt", "512", "4096"),
        listed("sys/class/net/replay/queues/rx-1/rps_flow_cnt", "512", "4096"),
        listed("proc/sys/net/core/netdev_max_backlog", "300", "1000"),
        listed("forebay/coalesce", "gro", "off"),
        listed("forebay/hash_key", "00ff", ""),
        listed("sys/devices/system/cpu/cpu1/online", "0", "1"),
    ];
    let text = render(&knobs, None);
    assert!(text.contains("netdev_max_backlog = 300\n"), "{text}");
    let saved: Vec<_> =
        entries(&text).unwrap().into_iter().map(|(name, value, _)| (name, value)).collect();
    let expected = [
        ("coalesce", "gro"),
        ("netdev_max_backlog", "300"),
        ("rps_flow_cnt", "512"),
        ("rx-0/rps_cpus", "10"),
    ];
    assert_eq!(saved, expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
}

/// Opening a pipe waits for a writer, and would hold up every later reload.
#[test]
fn only_regular_files_are_read_again() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("f.toml");
    let read_again = || ConfigFile::read_again(&path).map_err(|error| error.to_string());
    rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RWXU).unwrap();
    let why = read_again().unwrap_err();
    assert!(why.contains("not a regular file"), "{why}");
    fs::remove_file(&path).unwrap();
    fs::write(&path, "[knobs]\nrps_cpus = 3\n").unwrap();
    assert_eq!(read_again().unwrap().entries.len(), 1);
}

//! Tree of an engine's knobs: texts of its files, and their answers to writes.

#![allow(clippy::unwrap_used, reason = "tests and what they are built from")]

use std::sync::Arc;

use forebay_control::list::list;
use forebay_control::request::Request;
use forebay_control::{Control, EntryKind};
use forebay_device::RxBuffers;
use forebay_device::synthetic::{SyntheticPlan, SyntheticSource};
use forebay_engine::knobs::{
    BalanceChange, Change, ChangeText, CoalesceChange, KERNEL_RPS_FLOW_CNT_MAX, Knob, SpreadChange,
};
use forebay_engine::{Config, DeviceQueues, Engine, Settings, VirtualCosts};
use forebay_rx::delivery::Batch;
use forebay_rx::flow_key::FlowKeyRules;
use forebay_rx::hash::Hasher;
use forebay_rx::steer::{RPS_FLOW_CNT_MAX, SpreadPolicy};
use forebay_rx::{CpuId, Handler, Source};
use forebay_sys::clock::Clock;
use forebay_sys::cpu_list::CpuList;
use forebay_sys::errno::Errno;
use forebay_sys::refused::Refused;
use proptest::prelude::*;

/// Handler that ignores packets.
struct Idler;

impl Handler for Idler {
    fn handle(&mut self, _: &mut Batch<'_>) {}
}

fn config() -> Config {
    let hasher = Arc::new(Hasher::keyed(b"the same, always", false));
    let mut config = Config::new(CpuList::new([0, 1].map(CpuId)), hasher);
    config.spread = SpreadPolicy::Always;
    config
}

fn engine(config: &Config) -> (Engine<Idler>, Control) {
    let sources = (0..2).map(|seed| -> Box<dyn Source> {
        let plan = SyntheticPlan { frames: 2000, seed, ..SyntheticPlan::default() };
        Box::new(SyntheticSource::new(plan, None))
    });
    let clock = Clock::virtual_at_zero();
    let engine = Engine::build(config, sources.collect(), clock, |_| Idler).unwrap();
    let control = Control::of(&engine);
    (engine, control)
}

/// Value that a knob reads back after a write, or the reason for refusing the write.
fn set(control: &Control, name: &str, text: &str) -> Result<String, Errno> {
    let paths = control.named(name)?;
    for path in &paths {
        control.write(path, text).map_err(|refused| refused.errno)?;
    }
    Ok(control.read(&paths[0])?.trim_end().to_owned())
}

#[test]
fn promise_8_buffer_size_is_live_and_readonly() {
    let buffers = [Arc::<RxBuffers>::default(), Arc::default()];
    let virtio = DeviceQueues { rx_buffers: buffers.to_vec(), ..DeviceQueues::new("switch", 2) };
    let (_engine, control) = engine(&Config { devices: vec![virtio], ..config() });
    let name = "mergeable_rx_buffer_size";
    assert_eq!(control.knob(&format!("rx-1/{name}")).unwrap(), "0");
    buffers[1].set_size_bytes(1536);
    assert_eq!(control.knob(&format!("rx-0/{name}")).unwrap(), "0");
    assert_eq!(control.knob(&format!("rx-1/{name}")).unwrap(), "1536");
    for text in ["1536", "", "junk"] {
        assert_eq!(control.set(&format!("rx-1/{name}"), text).unwrap_err().errno, Errno::Access);
    }
    let listed = list(&control).into_iter().filter(|knob| knob.path.ends_with(name));
    let listed: Vec<_> = listed.map(|knob| (knob.path, knob.value, knob.default)).collect();
    let path = |queue| format!("sys/class/net/switch/queues/rx-{queue}/{name}");
    let of = |queue, value: &str| (path(queue), value.to_owned(), String::new());
    assert_eq!(listed, [of(0, "0"), of(1, "1536")]);
}

#[test]
fn files_accept_their_own_text() {
    let (_engine, control) = engine(&config());
    let mut directories = vec![String::new()];
    let mut files = 0;
    while let Some(directory) = directories.pop() {
        for entry in control.entries(&directory).unwrap() {
            let path = format!("{directory}/{}", entry.name);
            let EntryKind::File { mode } = entry.kind else {
                directories.push(path);
                continue;
            };
            files += 1;
            let text = control.read(&path);
            match mode {
                0o200 => assert_eq!(text, Err(Errno::Access), "{path}"),
                0o444 => {
                    assert!(text.unwrap().ends_with('\n'), "{path}");
                    assert_eq!(control.write(&path, "1").unwrap_err().errno, Errno::Access);
                }
                _ => {
                    let text = text.unwrap();
                    let written = control.write(&path, &text).unwrap();
                    assert_eq!(written.len_bytes, text.len(), "{path}");
                    assert_eq!(control.read(&path).unwrap(), text, "{path}");
                }
            }
        }
    }
    assert!(files > 40, "{files}");
}

#[test]
fn every_listed_knob_has_a_meaning() {
    let buffers = [Arc::<RxBuffers>::default(), Arc::default()];
    let virtio = DeviceQueues { rx_buffers: buffers.to_vec(), ..DeviceQueues::new("switch", 2) };
    let (_engine, control) = engine(&Config { devices: vec![virtio], ..config() });
    let listed = list(&control);
    assert!(listed.len() > 25, "{}", listed.len());
    listed.iter().for_each(|knob| assert!(!knob.meaning.is_empty(), "{}", knob.path));
}

/// All but the key, which is random.
#[test]
fn svc_4_every_knob_has_a_default() {
    let config = Config { rps_cpus: None, ..config() };
    let hasher = Hasher::keyed(b"the same, always", false).with_rules(FlowKeyRules::default());
    let spread = SpreadPolicy::default();
    let (_engine, control) = engine(&Config { hasher: Arc::new(hasher), spread, ..config });
    for knob in list(&control).iter().filter(|knob| !knob.path.ends_with("/hash_key")) {
        assert_eq!(knob.value, knob.default, "{}", knob.path);
        control.echo(&knob.path, &knob.default).unwrap();
    }
}

/// The kernel's blanks are those of Latin-1.
#[test]
fn rps_8_bytes_beyond_utf8_are_taken() {
    let (_engine, control) = engine(&config());
    let backlog = "proc/sys/net/core/netdev_max_backlog";
    let written = control.write(backlog, b"\xa0300\n").unwrap();
    assert_eq!((written.len_bytes, control.read(backlog).unwrap()), (5, "300\n".to_owned()));
    for (path, bytes) in [(backlog, &b"30\xff"[..]), ("forebay/coalesce", b"gro\xff")] {
        assert_eq!(control.write(path, bytes).unwrap_err().errno, Errno::Inval, "{path}");
    }
}

#[test]
fn rps_8_and_rfs_10_knobs_read_what_is_in_force() {
    let (_engine, control) = engine(&config());
    let set = |name, text| set(&control, name, text);
    let mask = control.read("sys/class/net/replay/queues/rx-0/rps_cpus").unwrap();
    assert_eq!(set("rps_cpus", "0-1"), Ok(mask.trim_end().to_owned()));
    assert_eq!(set("rx-1/rps_cpus", "3g"), Err(Errno::Inval));
    assert_eq!(set("rps_flow_cnt", "0x401\n"), Ok("2048".to_owned()));
    assert_eq!(set("rx-1/rps_flow_cnt", "0"), Ok("0".to_owned()));
    for (slots, errno) in [
        (u64::from(RPS_FLOW_CNT_MAX) + 1, Errno::NoMem),
        (KERNEL_RPS_FLOW_CNT_MAX, Errno::NoMem),
        (KERNEL_RPS_FLOW_CNT_MAX + 1, Errno::Inval),
    ] {
        let path = "sys/class/net/replay/queues/rx-0/rps_flow_cnt";
        let refused = control.write(path, &slots.to_string()).unwrap_err();
        assert_eq!(refused.errno, errno, "{slots}");
        assert!(refused.why.contains(&format!("up to {RPS_FLOW_CNT_MAX},")), "{}", refused.why);
    }
    assert_eq!(set("rps_sock_flow_entries", "40000"), Ok("65536".to_owned()));
    assert_eq!(set("netdev_max_backlog", "-1"), Err(Errno::Inval));
    assert_eq!(set("netdev_budget", "17"), Ok("17".to_owned()));
    assert_eq!(set("gro_flush_timeout", "18446744073709551615"), Ok(u64::MAX.to_string()));
    assert_eq!(set("coalesce", "lro\n"), Ok("lro".to_owned()));
    assert_eq!(set("coalesce", "on"), Err(Errno::Inval));
    assert_eq!(set("cpu1/online", "0\n"), Ok("0".to_owned()));
    assert_eq!(set("cpu0/online", "off"), Err(Errno::Busy), "the last one stays");
    for text in [" 0\n", "\n0", "\t1", " on", "2", "\n"] {
        assert_eq!(set("cpu1/online", text), Err(Errno::Inval), "{text:?}");
    }
    assert_eq!(set("cpu1/online", "nonsense, from the second character on"), Ok("0".to_owned()));
    assert_eq!(control.read("sys/devices/system/cpu/online"), Ok("0\n".to_owned()));
    assert_eq!(set("forebay/cpus", "0-1\n"), Ok("0-1".to_owned()));
    assert_eq!(set("softnet_stat", "1"), Err(Errno::Access));
    assert_eq!(set("no_such_knob", "1"), Err(Errno::NoEnt));
}

#[test]
fn writes_report_ignored_and_effective() {
    let (_engine, control) = engine(&config());
    let core = |name: &str| format!("proc/sys/net/core/{name}");
    let in_effect = |name, text| control.write(&core(name), text).unwrap().in_effect;
    assert_eq!(in_effect("dev_weight", "100"), "");
    assert!(in_effect("dev_weight", "100000").starts_with("1024: "));
    assert!(in_effect("dev_weight_rx_bias", "2").starts_with("1024 packets of backlogs: "));
    assert!(in_effect("netdev_max_backlog", "2000000000").starts_with("1048575: "));
    assert_eq!(control.read(&core("netdev_max_backlog")), Ok("2000000000\n".to_owned()));
    control.write("sys/devices/system/cpu/cpu1/online", "0").unwrap();
    let path = "sys/class/net/replay/queues/rx-0/rps_cpus";
    let written = control.write(path, "0-1").unwrap();
    assert_eq!((written.ignored.to_string(), written.in_effect.as_str()), ("1".to_owned(), ""));
    let written = control.write(path, "2").unwrap();
    assert_eq!(
        (written.ignored.to_string(), written.in_effect.is_empty()),
        ("1".to_owned(), false)
    );
    assert!(control.read(path).unwrap().trim_end().chars().all(|digit| "0,".contains(digit)));
}

#[test]
fn softnet_stat_counts_time_squeeze() {
    let mut config = config();
    config.limits.netdev_budget = 20;
    let (engine, control) = engine(&config);
    let outcome = engine.run_stepped(3, VirtualCosts::default());
    let text = control.read("proc/net/softnet_stat").unwrap();
    let rows: Vec<Vec<u64>> = text
        .lines()
        .map(|line| line.split(' ').map(|field| u64::from_str_radix(field, 16).unwrap()).collect())
        .collect();
    assert!(rows.len() == 2 && rows.iter().all(|row| row.len() == 15), "{text}");
    assert_eq!(rows.iter().map(|row| row[0]).sum::<u64>(), 4000);
    assert_eq!(rows.iter().map(|row| row[12]).collect::<Vec<_>>(), [0, 1]);
    assert!(rows.iter().all(|row| row[1] == 0 && row[11] == 0), "{text}");
    assert!(rows[0][2] > 0, "a burst of 64 does not fit: {text}");
    for (cpu, row) in outcome.cpus.iter().zip(&rows) {
        let counter = |name: &str| {
            let text = control.read(&format!("forebay/cpu{}/{name}", cpu.cpu)).unwrap();
            text.trim_end().parse::<u64>().unwrap()
        };
        assert_eq!([counter("processed"), counter("time_squeeze")], [row[0], row[2]]);
        assert_eq!(counter("busy_ns"), cpu.busy_ns);
    }
    let (engine, control) = self::engine(&self::config());
    drop(engine.run_stepped(3, VirtualCosts::default()));
    assert_eq!(control.read("forebay/cpu0/time_squeeze"), Ok("0\n".to_owned()));
}

/// Texts that are often values, and sometimes anything that fits into a line.
fn texts() -> impl Strategy<Value = String> {
    let own = [
        "gro",
        " deliver ",
        "auto",
        "inner,quic:443:8",
        "1-2",
        "0",
        "00112233445566778899aabbccddeeff",
    ];
    prop_oneof![
        (12u32..32, any::<u32>()).prop_map(|(bits, number)| (number >> bits).to_string()),
        any::<u64>().prop_map(|number| number.to_string()),
        (0u32..1 << 14).prop_map(|number| format!("0x{number:x}")),
        (0u32..1 << 14).prop_map(|number| format!("0{number:o}")),
        (0u64..1 << 34).prop_map(|bits| format!("{:x},{:08x}", bits >> 32, bits << 32 >> 32)),
        (0u32..8).prop_map(|bits| format!("{bits:x}")),
        "[0-9a-gx+, \t\r-]{0,12}",
        "[^\n\0]{0,12}",
        proptest::sample::select(own.map(str::to_owned).to_vec()),
    ]
}

/// Settings without the seed that each engine draws for its coalescing.
fn settings_but_seed(control: &Control) -> Settings {
    let mut settings = control.settings();
    settings.coalesce.config.seed = 0;
    settings
}

/// Knobs whose large values take memory that a test should not.
fn takes_memory(change: &Change) -> bool {
    let is_large = |number: u32| number > 1 << 16;
    match change {
        Change::RpsFlowCnt(_, number)
        | Change::RpsSockFlowEntries(number)
        | Change::FlowLimitTableLen(number) => is_large(*number),
        _ => false,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// `--set KNOB=TEXT` and `forebay set KNOB=TEXT` give the same value, or the same error.
    #[test]
    fn promise_8_command_line_agrees_with_set(text in texts()) {
        let (_engine, by_set) = engine(&config());
        let (_engine, by_option) = engine(&config());
        let knobs = Knob::ALL.map(Knob::name).into_iter();
        let knobs = knobs.chain(CoalesceChange::KNOBS).chain(BalanceChange::KNOBS);
        for knob in knobs.chain(SpreadChange::KNOBS).chain(["flow_key", "hash_key", "cpus"]) {
            let option: ChangeText = format!("{knob}={text}").parse().unwrap();
            let read = option.on(by_option.machine());
            if read.as_ref().is_ok_and(takes_memory) {
                continue;
            }
            let request = Request::parse(&format!("set {knob}={text}")).unwrap();
            let Request::Set { value, .. } = request else { panic!("{request:?}") };
            let set = by_set.set(knob, &value);
            match (read, set) {
                (Ok(change), set) => {
                    let changed = by_option.change(change).map(drop);
                    prop_assert_eq!(changed, set, "{}={:?}", knob, text);
                    let [now_option, now_set] = [&by_option, &by_set].map(settings_but_seed);
                    prop_assert_eq!(now_option, now_set, "{}={:?}", knob, text);
                }
                (Err(error), Err(Refused { why, .. })) => {
                    prop_assert!(error.to_string().contains(&why), "{error}; {why}");
                }
                (Err(error), Ok(())) => panic!("{knob}={text:?} is set, yet {error}"),
            }
        }
    }
}

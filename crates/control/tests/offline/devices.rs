//! Several devices in one engine: each has a directory in the tree of knobs, which counts and names
//! its own queues.

#![allow(clippy::unwrap_used, reason = "tests and what they are built from")]

use std::path::Path;
use std::sync::{Arc, mpsc};

use forebay_control::list::{ListedKnob, list};
use forebay_control::{
    ConfigFile, Control, ControlClient, ControlSocket, FlowName, config_file, explain,
};
use forebay_device::synthetic::{SyntheticPlan, SyntheticSource};
use forebay_engine::knobs::Change;
use forebay_engine::{
    BURST_REQUESTS_MAX, CHANGES_MAX, Config, DeviceQueues, Engine, QUESTIONS_MAX, Question,
    Settings, VirtualCosts,
};
use forebay_rx::delivery::Batch;
use forebay_rx::flow_key::FlowKeyRules;
use forebay_rx::hash::{FlowHash, Hasher};
use forebay_rx::{CpuId, Handler, Source};
use forebay_sys::Result;
use forebay_sys::clock::Clock;
use forebay_sys::cpu_list::CpuList;
use forebay_sys::errno::Errno;

/// Handler that ignores packets.
struct Idler;

impl Handler for Idler {
    fn handle(&mut self, _: &mut Batch<'_>) {}
}

const FLOW: FlowHash = FlowHash(0x0bad_cafe);

fn engine(devices: &[(&str, u16)], sources: u64) -> Result<Engine<Idler>> {
    let hasher = Arc::new(Hasher::keyed(b"the same, always", false));
    let mut config = Config::new(CpuList::new([0, 1].map(CpuId)), hasher);
    config.explain = vec![FLOW];
    config.devices =
        devices.iter().map(|(name, queues)| DeviceQueues::new(*name, *queues)).collect();
    let sources = (0..sources).map(|seed| -> Box<dyn Source> {
        let plan = SyntheticPlan { frames: 100, seed, ..SyntheticPlan::default() };
        Box::new(SyntheticSource::new(plan, None))
    });
    Engine::build(&config, sources.collect(), Clock::virtual_at_zero(), |_| Idler)
}

/// Control of an engine with two devices, one of which has two queues.
fn control() -> Control {
    Control::of(&engine(&[("eth0", 2), ("v.1", 1)], 3).unwrap())
}

fn masks(settings: &Settings) -> Vec<String> {
    settings.queues.iter().map(|queue| queue.rps_cpus.to_mask(2)).collect()
}

#[test]
fn rps_7_devices_have_own_directories() {
    let control = control();
    let names = |path| {
        let entries = control.entries(path).unwrap();
        entries.into_iter().map(|entry| entry.name).collect::<Vec<_>>()
    };
    assert_eq!(names("sys/class/net"), ["eth0", "v.1"]);
    assert_eq!(names("sys/class/net/eth0/queues"), ["rx-0", "rx-1"]);
    assert_eq!(names("sys/class/net/v.1/queues"), ["rx-0"]);
    let after = |knob, value| {
        control.set(knob, value).unwrap();
        masks(&control.settings())
    };
    assert_eq!(after("sys/class/net/v.1/queues/rx-0/rps_cpus", "1"), ["3", "3", "1"]);
    assert_eq!(control.knob("v.1/rx-0/rps_cpus").unwrap().trim_start_matches(['0', ',']), "1");
    assert_eq!(after("eth0/rx-1/rps_cpus", "2"), ["3", "2", "1"]);
    assert_eq!(after("eth0/rps_cpus", "1"), ["1", "1", "1"]);
    assert_eq!(after("rx-0/rps_cpus", "2"), ["2", "1", "2"]);
    assert_eq!(after("rps_cpus", "3"), ["3", "3", "3"]);
    assert!(control.set("v.1/rx-1/rps_cpus", "1").is_err());
}

#[test]
fn shared_knob_says_so() {
    let control = control();
    control.set("coalesce", "gro").unwrap();
    let written = control.write("sys/class/net/v.1/mtu", "9000").unwrap();
    assert_eq!(written.in_effect, "for all devices of the run, which share it");
    assert_eq!(control.knob("eth0/mtu").unwrap(), "9000");
    control.set("mtu", "1400").unwrap();
    assert_eq!(control.knob("v.1/mtu").unwrap(), "1400");
}

#[test]
fn explanation_names_device_of_queue() {
    let engine = engine(&[("eth0", 2), ("v.1", 1)], 3).unwrap();
    let outcome = engine.run_stepped(1, VirtualCosts::default());
    let names: Vec<_> = outcome.explained[0].iter().map(|told| told.name.as_str()).collect();
    assert_eq!(names, ["eth0/rx-0", "eth0/rx-1", "v.1/rx-0"]);
    let [flow] = outcome.explained.try_into().unwrap();
    let name = FlowName::Hash(FLOW);
    let told = forebay_control::Explanation {
        name,
        hash: FLOW,
        flow_key: FlowKeyRules::OUTER,
        queues: flow,
        connections: Vec::new(),
    };
    assert!(told.to_string().contains("\nv.1/rx-0, polled by CPU 0, at "), "{told}");
    assert_eq!(told.document()["queues"][1]["queue"], "eth0/rx-1");
}

/// A device that hashes by its own key: a hash made of the addresses would be another flow's.
#[test]
fn rfs_6_device_hashes_are_named_by_hash() {
    let hasher = Arc::new(Hasher::keyed(b"the same, always", false));
    let mut config = Config::new(CpuList::new([CpuId(0)]), hasher);
    config.devices = vec![
        DeviceQueues::new("v.1", 1),
        DeviceQueues { device_hash: true, ..DeviceQueues::new("eth0", 1) },
    ];
    let source = || -> Box<dyn Source> {
        Box::new(SyntheticSource::new(SyntheticPlan { frames: 1, ..Default::default() }, None))
    };
    let clock = Clock::virtual_at_zero();
    let engine = Engine::build(&config, vec![source(), source()], clock, |_| Idler).unwrap();
    let control = Control::of(&engine);
    let endpoints: FlowName = "10.9.0.2:39796,10.9.0.1:53".parse().unwrap();
    let refused = explain::explain(&control, &endpoints).unwrap_err();
    assert_eq!(refused.errno, Errno::Inval);
    assert!(refused.to_string().contains("eth0 hashes packets"), "{refused}");
    drop(engine);
    assert_eq!(explain::explain(&control, &FlowName::Hash(FLOW)).unwrap().hash, FLOW);
}

#[test]
fn the_control_socket_tells_devices_apart() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s.sock");
    let _socket = ControlSocket::open(control(), &path, None).unwrap();
    let mut client = ControlClient::connect(&path).unwrap();
    let set = client.ask("set eth0/rx-1/rps_flow_cnt 64").unwrap();
    assert_eq!(set, ["now eth0/rx-1/rps_flow_cnt 64"]);
    let read = client.ask("get rps_flow_cnt").unwrap();
    let expected =
        ["eth0/rx-0/rps_flow_cnt 4096", "eth0/rx-1/rps_flow_cnt 64", "v.1/rx-0/rps_flow_cnt 4096"];
    assert_eq!(read, expected);
    let refused = client.ask("set online 1").unwrap_err().to_string();
    assert!(refused.contains("say which of them"), "{refused}");
}

#[test]
fn top_4_queue_answers_last_requests_once() {
    let engine = engine(&[("eth0", 2), ("v.1", 1)], 3).unwrap();
    let ask = |_| {
        let (answers, answered) = mpsc::channel();
        engine.state().ask(Question::Burst { answers }).unwrap();
        answered
    };
    let asked: Vec<_> = (0..BURST_REQUESTS_MAX + 3).map(ask).collect();
    engine.run_stepped(1, VirtualCosts::default());
    for (number, answered) in asked.iter().enumerate() {
        let mut bursts: Vec<_> = answered.try_iter().collect();
        bursts.sort_by(|one, other| one.name.cmp(&other.name));
        let names: Vec<_> = bursts.iter().map(|burst| burst.name.as_str()).collect();
        let is_kept = number >= 3;
        let expected: &[_] = if is_kept { &["eth0/rx-0", "eth0/rx-1", "v.1/rx-0"] } else { &[] };
        assert_eq!(names, expected, "request {number}");
        for packet in bursts.iter().flat_map(|burst| &burst.packets) {
            assert!(packet.cpu.is_some() && packet.endpoints.is_some(), "{packet:?}");
        }
    }
}

#[test]
fn top_1_socket_gives_metrics_if_any() {
    let directory = tempfile::tempdir().unwrap();
    let ask = |name: &str, text: Option<&'static str>| {
        let path = directory.path().join(name);
        let bound = ControlSocket::bind(&path).unwrap();
        let bound = match text {
            Some(text) => bound.with_metrics(move || text.to_owned()),
            None => bound,
        };
        let _socket = bound.serve(control(), None).unwrap();
        ControlClient::connect(&path).unwrap().ask("metrics")
    };
    assert_eq!(ask("a.sock", Some("a 1\n# EOF\n")).unwrap(), ["a 1", "# EOF"]);
    let refused = ask("b.sock", None).unwrap_err().to_string();
    assert!(refused.contains("no metrics to this socket"), "{refused}");
}

#[test]
fn question_beyond_limit_is_refused() {
    let engine = engine(&[("eth0", 2), ("v.1", 1)], 3).unwrap(); // it does not run, so all wait
    let control = Control::of(&engine);
    for budget in 1..QUESTIONS_MAX {
        control.change(Change::NetdevBudget(u32::try_from(budget).unwrap())).unwrap();
    }
    assert_eq!(control.explain(FLOW), Ok(Vec::new()), "the last place");
    assert_eq!(control.explain(FLOW).unwrap_err().errno, Errno::Busy);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s.sock");
    let _socket = ControlSocket::open(control, &path, None).unwrap();
    let mut client = ControlClient::connect(&path).unwrap();
    for request in ["explain 0badcafe", "explain --json 0badcafe"] {
        let refused = client.ask(request).unwrap_err().to_string();
        assert!(refused.contains("questions are waiting (256)"), "{request}: {refused}");
    }
}

/// A queue for which there is no place among the waiting changes.
#[test]
fn promise_8_refusal_names_what_was_set() {
    let engine = engine(&[("eth0", 2), ("v.1", 1)], 3).unwrap();
    let control = Control::of(&engine);
    for budget in 1..CHANGES_MAX {
        control.change(Change::NetdevBudget(u32::try_from(budget).unwrap())).unwrap();
    }
    let refused = control.set_and_report("rps_flow_cnt", "64").unwrap_err();
    assert_eq!(refused.errno, Errno::Busy);
    assert!(refused.why.starts_with("eth0/rx-1/rps_flow_cnt cannot be \"64\": "), "{refused}");
    assert!(refused.why.ends_with("; set before that: eth0/rx-0/rps_flow_cnt"), "{refused}");
    let refused = control.set("rps_flow_cnt", "64").unwrap_err();
    assert!(!refused.why.contains("set before that"), "{refused}");
}

#[test]
fn saved_devices_start_next_run() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("knobs.toml");
    let saved = control();
    for (knob, value) in [
        ("eth0/rx-1/rps_cpus", "2"),
        ("rps_flow_cnt", "64"),
        ("v.1/rx-0/rps_flow_cnt", "0"),
        ("mtu", "1400"),
        ("netdev_budget", "17"),
    ] {
        saved.set(knob, value).unwrap();
    }
    let knobs: Vec<ListedKnob> = list(&saved);
    config_file::save(&path, &knobs).unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text.contains("[knobs.eth0.rx-1]") && text.contains("[knobs.\"v.1\".rx-0]"), "{text}");
    let next = control();
    ConfigFile::read(&path).unwrap().apply(&next, &[]).unwrap();
    // The coalescing seed is a secret that each engine draws, and no knob.
    let knobs_of = |control: &Control| {
        let mut settings = Settings::clone(&control.settings());
        settings.coalesce.config.seed = 0;
        settings
    };
    assert_eq!(knobs_of(&next), knobs_of(&saved));
    assert_ne!(knobs_of(&next), knobs_of(&control()));
}

/// Config file of a directory, with these knobs.
fn knobs_file(directory: &Path, knobs: &str) -> ConfigFile {
    let path = directory.join("f.toml");
    std::fs::write(&path, format!("[knobs]\n{knobs}")).unwrap();
    ConfigFile::read(&path).unwrap()
}

/// A file that is read again, with a refused value between two others.
#[test]
fn svc_4_refused_value_leaves_former_in_force() {
    let directory = tempfile::tempdir().unwrap();
    let read = |knobs: &str| knobs_file(directory.path(), knobs);
    let control = control();
    let value = |knob: &str| control.knob(knob).unwrap().trim_end().to_owned();
    let first = read("netdev_budget = 400\nnetdev_max_backlog = 500\nrx-1.rps_cpus = \"1\"\n");
    first.apply(&control, &[]).unwrap();
    let second = "netdev_budget = \"x\"\nnetdev_max_backlog = \"y\"\nrps_cpus = \"z\"\n";
    let reloaded = read(second).apply_changes(&first, &control, &[]);
    assert_eq!(reloaded.errors.len(), 3, "{:?}", reloaded.errors);
    assert_eq!((value("netdev_budget"), value("netdev_max_backlog")), ("400".into(), "500".into()));
    assert_eq!(masks(&control.settings()), ["3", "1", "3"]);
    // One is mended as it was, the others are taken out.
    let third = read("netdev_max_backlog = 500\n");
    let reloaded = third.apply_changes(&reloaded.in_force, &control, &[]);
    assert!(reloaded.errors.is_empty(), "{:?}", reloaded.errors);
    assert_eq!((value("netdev_budget"), value("netdev_max_backlog")), ("300".into(), "500".into()));
    let knobs = list(&control);
    let mask = knobs.iter().find(|knob| knob.path.ends_with("eth0/queues/rx-1/rps_cpus")).unwrap();
    assert_eq!(mask.value, mask.default, "of this machine");
    assert_eq!(reloaded.in_force, third);
}

/// The third queue is the first one of the second device.
#[test]
fn svc_1_typed_queue_stays_at_hangup() {
    let directory = tempfile::tempdir().unwrap();
    let read = |knobs: &str| knobs_file(directory.path(), knobs);
    let control = control();
    let typed = ["rx-2/rps_cpus=2", "online=1:0", "netdev_budget=200", "rx-9/rps_cpus=1"];
    let given = typed.map(|text| control.name_of(&text.parse().unwrap()));
    let mask = "sys/class/net/v.1/queues/rx-0/rps_cpus";
    let online = "sys/devices/system/cpu/cpu1/online";
    assert_eq!(given[..3], [mask, online, "netdev_budget"]);
    for typed in &typed[..3] {
        control.change(typed.parse().unwrap()).unwrap();
    }
    let first = read("rps_cpus = \"3\"\n");
    first.apply(&control, &given).unwrap();
    assert_eq!(masks(&control.settings()), ["3", "3", "2"]);
    let second = read("rps_cpus = \"1\"\ncpu1.online = 1\nnetdev_budget = 300\n");
    let reloaded = second.apply_changes(&first, &control, &given);
    assert!(reloaded.errors.is_empty() && reloaded.notes.is_empty(), "{reloaded:?}");
    assert_eq!(masks(&control.settings()), ["1", "1", "2"]);
    assert_eq!(control.settings().cpus.to_string(), "0");
    assert_eq!(control.knob("netdev_budget").unwrap(), "200");
    read("").apply_changes(&reloaded.in_force, &control, &given);
    assert_eq!(masks(&control.settings())[2], "2", "no default either");
}

/// A mask whose second CPU does not run, and then runs again.
#[test]
fn svc_4_narrowed_mask_stays_as_requested() {
    let directory = tempfile::tempdir().unwrap();
    let read = |knobs: &str| knobs_file(directory.path(), knobs);
    let control = control();
    let mask = "sys/class/net/v.1/queues/rx-0/rps_cpus".to_owned();
    control.set_online(CpuId(1), false).unwrap();
    control.set("rps_cpus", "3").unwrap();
    assert_eq!(control.read(&mask).unwrap(), "1\n");
    let listed = list(&control).into_iter().find(|knob| knob.path == mask).unwrap();
    assert_eq!((listed.value.as_str(), listed.requested.as_str()), ("1", "3"));
    assert_eq!(ListedKnob::from_line(&listed.to_string()), Some(listed));
    let file = read("cpu1.online = 1\n");
    let reloaded = file.apply_changes(&read(""), &control, std::slice::from_ref(&mask));
    assert!(reloaded.errors.is_empty() && reloaded.notes.is_empty(), "{reloaded:?}");
    assert_eq!(control.read(&mask).unwrap(), "3\n");
    let reloaded = read("cpu1.online = 0\n").apply_changes(&file, &control, &[mask]);
    assert!(reloaded.errors.is_empty() && reloaded.notes.is_empty(), "{reloaded:?}");
}

#[test]
fn svc_1_narrowed_mask_is_saved_as_requested() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("knobs.toml");
    let control = control();
    control.set_online(CpuId(1), false).unwrap();
    for (queue, cpus) in [("eth0/rx-0", "3"), ("eth0/rx-1", "3"), ("v.1/rx-0", "2")] {
        control.set(&format!("{queue}/rps_cpus"), cpus).unwrap();
    }
    config_file::save(&path, &list(&control)).unwrap();
    let next = self::control();
    ConfigFile::read(&path).unwrap().apply(&next, &[]).unwrap();
    assert_eq!(masks(&next.settings()), ["3", "3", "2"]);
}

/// The second CPU is the last that runs, and refuses.
#[test]
fn svc_4_value_refused_once_is_undone() {
    let directory = tempfile::tempdir().unwrap();
    let read = |knobs: &str| knobs_file(directory.path(), knobs);
    let control = control();
    let reloaded = read("online = 0\n").apply_changes(&read(""), &control, &[]);
    assert_eq!(reloaded.errors.len(), 1, "{:?}", reloaded.errors);
    assert_eq!(control.settings().cpus.to_string(), "0-1");
    assert_eq!((reloaded.in_force, reloaded.changed), (read(""), Vec::<String>::new()));
}

#[test]
fn queues_equal_sources() {
    let refused = |devices, sources| engine(devices, sources).err().unwrap().to_string();
    let said = refused(&[("eth0", 2), ("v.1", 1)], 2);
    assert!(said.contains("they have 3 queues, and there are 2 sources"), "{said}");
    assert!(refused(&[("../eth0", 1)], 1).contains("no interface can have that name"));
}

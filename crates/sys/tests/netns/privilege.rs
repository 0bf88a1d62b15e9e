//! Missing privileges, and what remains after dropping them. Each test runs in a process of its
//! own: this program again, with the name of the part to run in its environment.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::process::{Command, Output};
use std::sync::mpsc;
use std::{env, fs, thread};

use forebay_sys::interface::Interface;
use forebay_sys::privilege::{drop_to, for_af_packet, for_af_xdp, for_locked_memory, for_tun};
use forebay_sys::{Error, User, directory_of, may_remove};
use forebay_testkit::namespaces;
use libtest_mimic::{Failed, Trial};
use nix::unistd::{Gid, Uid, getgroups, setgroups, setuid};
use rustix::thread::{CapabilitySet, CapabilitySets};

/// Environment variable of a child: the part that it runs.
const PART: &str = "FOREBAY_TEST_PART";

const PARTS: [(&str, fn()); 9] = [
    ("who_may_do_all_misses_nothing", may_do_all),
    ("missing_parts_named_with_remedy", missing_is_named),
    ("file_capabilities_are_regranted", granted_again),
    ("tap_opens_for_its_owner", own_tap),
    ("dropped_privileges_hold_for_all_threads", drop_all),
    ("other_threads_capabilities_are_seen", kept_elsewhere),
    ("numeric_user_needs_group", drop_to_numbers),
    ("denied_user_change_is_reported", drop_refused),
    ("directory_is_given_to_its_user", given_away),
];

/// Runs the part of this process, if it is a child. Returns true if it was.
pub(crate) fn played() -> bool {
    let Ok(part) = env::var(PART) else { return false };
    let (_, play) = PARTS.into_iter().find(|(name, _)| *name == part).unwrap();
    play();
    true
}

pub(crate) fn trials() -> Vec<libtest_mimic::Trial> {
    let missing = missing();
    let trials = PARTS.map(|(name, _)| {
        if let Some(missing) = &missing {
            eprintln!("{name} is ignored: {missing}");
        }
        Trial::test(name, move || run(name)).with_ignored_flag(missing.is_some())
    });
    trials.into()
}

fn run(part: &str) -> Result<(), Failed> {
    let Output { status, stderr, .. } =
        Command::new(env::current_exe()?).env(PART, part).output()?;
    let told = String::from_utf8_lossy(&stderr);
    if status.success() { Ok(()) } else { Err(format!("{status}: {told}").into()) }
}

/// Reason why these tests cannot run here.
fn missing() -> Option<String> {
    if !Uid::effective().is_root() {
        return Some("only root can become another user".to_owned());
    }
    namespaces::missing(&["ip"])
}

/// Attempt, missing capabilities and advice of a refusal.
fn refused(checked: forebay_sys::Result<()>) -> (String, String, String) {
    match checked.unwrap_err() {
        error @ Error::Privilege { .. } => {
            assert!(error.is_refusal());
            let (said, help) = (error.to_string(), error.help());
            let Error::Privilege { missing, .. } = error else { unreachable!() };
            (said, missing, help)
        }
        other => panic!("{other:?}"),
    }
}

fn may_do_all() {
    for_af_xdp("veth0", true).unwrap();
    for_af_packet("veth0", true).unwrap();
    for_tun("tun0").unwrap();
    for_locked_memory("veth0", u64::MAX).unwrap();
}

fn missing_is_named() {
    setuid(Uid::from_raw(65534)).unwrap();
    let program = env::current_exe().unwrap();
    let (said, missing, help) = refused(for_af_xdp("veth0", true));
    assert_eq!(missing, "CAP_NET_RAW, CAP_NET_ADMIN, CAP_BPF, CAP_PERFMON");
    let unfiltered = refused(for_af_xdp("veth0", false)).1;
    assert_eq!(unfiltered, "CAP_NET_RAW, CAP_NET_ADMIN, CAP_BPF");
    assert_eq!(said, format!("AF_XDP on veth0 needs {missing}, which this process does not have"));
    let capabilities = "cap_net_raw,cap_net_admin,cap_bpf,cap_perfmon";
    let grant = format!("sudo setcap {capabilities}+ep {}", program.display());
    assert!(help.starts_with(&format!("grant it with `{grant}`, or run as root; ")), "{help}");

    assert_eq!(refused(for_af_packet("veth0", false)).1, "CAP_NET_RAW");
    assert_eq!(refused(for_af_packet("veth0", true)).1, "CAP_NET_RAW, CAP_NET_ADMIN");
    assert_eq!(refused(for_tun("tun0")).1, "CAP_NET_ADMIN");
    for_locked_memory("veth0", 1).unwrap();
    let (_, missing, help) = refused(for_locked_memory("veth0", 1 << 60));
    assert_eq!(missing, "CAP_IPC_LOCK");
    assert!(help.starts_with(&format!("raise the limit with `ulimit -l {}`, ", 1_u64 << 50)));
}

fn granted_again() {
    rustix::thread::set_keep_capabilities(true).unwrap();
    setuid(Uid::from_raw(65534)).unwrap();
    let has = CapabilitySet::NET_RAW | CapabilitySet::SYS_ADMIN;
    let sets =
        CapabilitySets { effective: has, permitted: has, inheritable: CapabilitySet::empty() };
    rustix::thread::set_capabilities(None, sets).unwrap();
    let (_, missing, help) = refused(for_af_packet("veth0", true));
    assert_eq!(missing, "CAP_NET_ADMIN");
    assert!(help.contains(" setcap cap_net_raw,cap_net_admin,cap_sys_admin+ep "), "{help}");
    let (_, missing, _) = refused(for_af_xdp("veth0", true));
    assert_eq!(missing, "CAP_NET_ADMIN", "CAP_SYS_ADMIN stands for CAP_BPF and CAP_PERFMON");
    let (.., help) = refused(for_locked_memory("veth0", 1 << 60));
    assert!(help.contains(" setcap cap_net_raw,cap_sys_admin,cap_ipc_lock+ep "), "{help}");
}

fn own_tap() {
    namespaces::enter_new();
    for made in
        ["hoa mode tap user 65534", "hob mode tap user 1", "hoc mode tun group 7", "hod mode tun"]
    {
        let args = ["tuntap", "add"].into_iter().chain(made.split(' '));
        assert!(Command::new("ip").args(args).status().unwrap().success());
    }
    setgroups(&[Gid::from_raw(8)]).unwrap();
    setuid(Uid::from_raw(65534)).unwrap();
    for_tun("hoa").unwrap();
    assert_eq!(refused(for_tun("hob")).1, "CAP_NET_ADMIN");
    assert_eq!(refused(for_tun("hoc")).1, "CAP_NET_ADMIN");
    for_tun("hod").unwrap();
    // Reading one's own namespace needs no capability.
    assert!(Interface::named("hoa").unwrap().set_up().unwrap_err().is_refusal());
}

/// Identity of the calling thread: its ids, groups and capabilities.
fn identity() -> Vec<String> {
    let status = fs::read_to_string("/proc/thread-self/status").unwrap();
    let of_interest = ["Uid:", "Gid:", "Groups:", "CapInh:", "CapPrm:", "CapEff:", "CapAmb:"];
    let lines = status.lines().filter(|line| of_interest.iter().any(|name| line.starts_with(name)));
    lines.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
}

fn nothing_more_than(uid: u32, gid: u32, groups: &[u32]) -> Vec<String> {
    let groups: String = groups.iter().map(|group| format!(" {group}")).collect();
    let mut expected = vec![format!("Uid:{}", format!(" {uid}").repeat(4))];
    expected.push(format!("Gid:{}", format!(" {gid}").repeat(4)));
    expected.push(format!("Groups:{groups}"));
    let none = "0".repeat(16);
    expected.extend(["Inh", "Prm", "Eff", "Amb"].map(|set| format!("Cap{set}: {none}")));
    expected
}

fn drop_all() {
    let (go, wait) = mpsc::channel();
    let other = thread::spawn(move || {
        wait.recv().unwrap();
        identity()
    });
    setgroups(&[Gid::from_raw(0), Gid::from_raw(12)]).unwrap();
    let nobody = nix::unistd::User::from_name("nobody").unwrap().unwrap();
    let (uid, gid) = (nobody.uid.as_raw(), nobody.gid.as_raw());
    for (nonsense, why) in [
        ("no-such-user", "there is no such user"),
        ("nobody:no-such-group", "there is no group"),
        ("root", "root keeps all privileges"),
        ("0:7", "root keeps all privileges"),
        ("", "there is no such user"),
        ("4294967295:7", "there is no such user"),
    ] {
        let refused = drop_to(nonsense).unwrap_err();
        assert!(!refused.is_refusal(), "{refused}");
        assert!(refused.to_string().contains(why), "{refused}");
    }
    assert!(Uid::effective().is_root());

    let now = drop_to("nobody").unwrap();
    assert_eq!((now.uid, now.gid), (uid, gid));
    go.send(()).unwrap();
    assert_eq!(identity(), nothing_more_than(uid, gid, &[gid]));
    assert_eq!(other.join().unwrap(), identity());
    assert_eq!(getgroups().unwrap(), [nobody.gid]);
    assert!(fs::read("/etc/shadow").is_err());
    assert!(setuid(Uid::from_raw(0)).is_err());
    assert!(
        refused(for_af_xdp("veth0", true)).2.starts_with("run as root"),
        "no_new_privs is not set"
    );
    // Dropping again has no effect.
    drop_to("nobody").unwrap();
}

fn kept_elsewhere() {
    let (kept, wait) = mpsc::channel();
    thread::spawn(move || {
        rustix::thread::set_keep_capabilities(true).unwrap();
        kept.send(()).unwrap();
        loop {
            thread::park();
        }
    });
    wait.recv().unwrap();
    let refused = drop_to("nobody").unwrap_err();
    assert!(refused.to_string().contains("from all threads"), "{refused}");
}

fn drop_to_numbers() {
    let refused = drop_to("54321").unwrap_err();
    assert!(refused.to_string().contains("as UID:GID"), "{refused}");
    drop_to("54321:4321").unwrap();
    assert_eq!(identity(), nothing_more_than(54321, 4321, &[]));
}

fn drop_refused() {
    setuid(Uid::from_raw(65534)).unwrap();
    assert_eq!(refused(drop_to("1:1").map(|_| ())).1, "CAP_SETUID, CAP_SETGID");
}

fn given_away() {
    let above = tempfile::tempdir().unwrap();
    fs::set_permissions(&above, fs::Permissions::from_mode(0o1777)).unwrap();
    let nobody = User { uid: 65534, gid: 65534 };
    let path = directory_of(nobody, above.path()).unwrap();
    let made = fs::symlink_metadata(&path).unwrap();
    assert_eq!((made.uid(), made.gid(), made.mode() & 0o7777), (65534, 65534, 0o755));
    assert_eq!(directory_of(nobody, above.path()).unwrap(), path);
    // Neither a link nor another user's directory is taken for it.
    symlink(&path, above.path().join("7")).unwrap();
    directory_of(User { uid: 7, gid: 7 }, above.path()).unwrap_err();
    fs::create_dir(above.path().join("8")).unwrap();
    std::os::unix::fs::chown(above.path().join("8"), Some(9), Some(9)).unwrap();
    let other = directory_of(User { uid: 8, gid: 8 }, above.path()).unwrap_err().to_string();
    assert!(other.contains("user 9 has made it"), "{other}");
    // The unit has no CAP_DAC_OVERRIDE.
    let none = CapabilitySet::empty();
    let has = CapabilitySet::CHOWN;
    let sets = |of| CapabilitySets { effective: of, permitted: has, inheritable: none };
    rustix::thread::set_capabilities(None, sets(has)).unwrap();
    directory_of(User { uid: 10, gid: 10 }, above.path()).unwrap();
    rustix::thread::set_capabilities(None, sets(none)).unwrap();
    let given = directory_of(User { uid: 11, gid: 11 }, above.path()).map(drop);
    assert_eq!(refused(given).1, "CAP_CHOWN");

    let roots = above.path().join("roots");
    fs::write(&roots, "").unwrap();
    may_remove(&roots).unwrap();
    assert!(may_remove(&path.join("socket")).is_err(), "without CAP_DAC_OVERRIDE");
}

//! Privileges that a device needs, and dropping them afterwards.

use std::ffi::CString;
use std::path::Path;
use std::{fmt, fs};

use nix::unistd::{self, Gid, Uid};
use rustix::process::{self, Resource};
use rustix::thread::{self, CapabilitySet, CapabilitySets};

use super::interface::Interface;
use super::{User, user};
use crate::error::{Error, Result};

/// `CAP_BPF` of include/uapi/linux/capability.h, since Linux 5.8, as is `CAP_PERFMON`.
const CAP_BPF: u32 = 39;

/// Capability that a device may need.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Capability {
    NetRaw,
    NetAdmin,
    Bpf,
    PerfMon,
    SysAdmin,
    IpcLock,
    SetUid,
    SetGid,
    Chown,
}

impl Capability {
    const ALL: [Self; 9] = [
        Self::NetRaw,
        Self::NetAdmin,
        Self::Bpf,
        Self::PerfMon,
        Self::SysAdmin,
        Self::IpcLock,
        Self::SetUid,
        Self::SetGid,
        Self::Chown,
    ];

    /// Name as in capabilities(7) and setcap(8), in lower case.
    fn name(self) -> &'static str {
        match self {
            Self::NetRaw => "cap_net_raw",
            Self::NetAdmin => "cap_net_admin",
            Self::Bpf => "cap_bpf",
            Self::PerfMon => "cap_perfmon",
            Self::SysAdmin => "cap_sys_admin",
            Self::IpcLock => "cap_ipc_lock",
            Self::SetUid => "cap_setuid",
            Self::SetGid => "cap_setgid",
            Self::Chown => "cap_chown",
        }
    }

    /// True if a thread with the set `has` has this capability.
    fn is_in(self, has: CapabilitySet) -> bool {
        // The kernel accepts CAP_SYS_ADMIN in place of these (`bpf_capable`, `perfmon_capable`).
        let is_older =
            matches!(self, Self::Bpf | Self::PerfMon) && has.contains(CapabilitySet::SYS_ADMIN);
        is_older || has.contains(self.bit())
    }

    fn bit(self) -> CapabilitySet {
        match self {
            Self::NetRaw => CapabilitySet::NET_RAW,
            Self::NetAdmin => CapabilitySet::NET_ADMIN,
            Self::Bpf => CapabilitySet::BPF,
            Self::PerfMon => CapabilitySet::PERFMON,
            Self::SysAdmin => CapabilitySet::SYS_ADMIN,
            Self::IpcLock => CapabilitySet::IPC_LOCK,
            Self::SetUid => CapabilitySet::SETUID,
            Self::SetGid => CapabilitySet::SETGID,
            Self::Chown => CapabilitySet::CHOWN,
        }
    }
}

/// Checks that the calling thread may receive and send by AF_XDP. A program that looks for ports
/// computes pointers, which the kernel allows with `CAP_PERFMON` only.
///
/// # Errors
/// [`Error::Privilege`] with the missing capabilities.
pub fn for_af_xdp(device: &str, is_filtering: bool) -> Result<()> {
    let program: &[_] = match (knows_cap_bpf(), is_filtering) {
        (true, true) => &[Capability::Bpf, Capability::PerfMon],
        (true, false) => &[Capability::Bpf],
        (false, _) => &[Capability::SysAdmin],
    };
    let needed = [&[Capability::NetRaw, Capability::NetAdmin], program].concat();
    require(&format!("AF_XDP on {device}"), &needed).map_err(|error| match error {
        Error::Privilege { what, missing, help } => {
            let help = format!(
                "{help}; without cap_ipc_lock, packet memory is locked up to the limit `ulimit -l`"
            );
            Error::Privilege { what, missing, help }
        }
        other => other,
    })
}

/// Checks that `bytes` of packet memory may be locked, as AF_XDP does. Only this request is
/// compared with the limit; the kernel also counts memory locked by other processes of the user.
///
/// # Errors
/// [`Error::Privilege`] with the limit to set.
pub fn for_locked_memory(device: &str, bytes: u64) -> Result<()> {
    let limit_bytes = process::getrlimit(Resource::Memlock).current.unwrap_or(u64::MAX);
    if bytes <= limit_bytes {
        return Ok(());
    }
    let what = format!("locking {bytes} bytes of packet memory for {device}");
    require(&what, &[Capability::IpcLock]).map_err(|error| match error {
        Error::Privilege { what, missing, help } => {
            let limit_kib = bytes.div_ceil(1024);
            let help = format!("raise the limit with `ulimit -l {limit_kib}`, or {help}");
            Error::Privilege { what, missing, help }
        }
        other => other,
    })
}

/// Checks that the calling thread may open packet sockets, promiscuous or not.
///
/// # Errors
/// [`Error::Privilege`] with the missing capabilities.
pub fn for_af_packet(device: &str, is_promiscuous: bool) -> Result<()> {
    let needed: &[_] = if is_promiscuous {
        &[Capability::NetRaw, Capability::NetAdmin]
    } else {
        &[Capability::NetRaw]
    };
    require(&format!("AF_PACKET on {device}"), needed)
}

/// Checks that the calling thread may open a TAP or TUN, or create it. The owner of a persistent
/// device needs no capability (`tun_not_capable` in drivers/net/tun.c).
///
/// # Errors
/// [`Error::Privilege`] with the missing capabilities.
pub fn for_tun(device: &str) -> Result<()> {
    if let Ok(Interface { tun: Some(tun), .. }) = Interface::named(device) {
        let User { uid, gid } = user();
        let is_in = |group| {
            group == gid || unistd::getgroups().is_ok_and(|of| of.contains(&Gid::from_raw(group)))
        };
        if tun.owner.is_none_or(|owner| owner == uid) && tun.group.is_none_or(is_in) {
            return Ok(());
        }
    }
    require(&format!("the TAP or TUN {device}"), &[Capability::NetAdmin])
}

/// Checks that the calling thread may give the file at `path` to another user.
///
/// # Errors
/// [`Error::Privilege`] with the missing capability.
pub fn for_giving_away(path: &Path) -> Result<()> {
    require(&format!("giving {} to another user", path.display()), &[Capability::Chown])
}

/// Checks that the calling thread has all of these capabilities.
fn require(what: &str, needed: &[Capability]) -> Result<()> {
    // Reading a thread's own capabilities does not fail.
    let has = thread::capabilities(None).map_or(CapabilitySet::empty(), |sets| sets.effective);
    let missing = needed.iter().filter(|capability| !capability.is_in(has));
    let missing: Vec<_> = missing.map(|capability| capability.name()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    // setcap replaces all capabilities of a file, so the advice includes those that it granted.
    let is_kept = |capability: &Capability| !user().is_root() && has.contains(capability.bit());
    let granted = Capability::ALL.into_iter();
    let granted = granted.filter(|capability| needed.contains(capability) || is_kept(capability));
    let granted: Vec<_> = granted.map(Capability::name).collect();
    let (what, missing) = (what.to_owned(), missing.join(", ").to_uppercase());
    Err(Error::Privilege { what, missing, help: how_to_have(&granted.join(",")) })
}

/// Advice on how to give this program the capabilities.
fn how_to_have(granted: &str) -> String {
    let program = std::env::current_exe().unwrap_or_else(|_| "forebay".into());
    let grant = format!("sudo setcap {granted}+ep {}", quoted(&program));
    if thread::no_new_privs().unwrap_or(false) {
        // With no_new_privs the kernel ignores file capabilities.
        "run as root: this process may gain no privileges (no_new_privs), so setcap does not help"
            .to_owned()
    } else {
        format!("grant it with `{grant}`, or run as root")
    }
}

/// Path quoted for a shell.
fn quoted(path: &Path) -> String {
    let path = path.display().to_string();
    let is_plain = |letter: char| letter.is_alphanumeric() || "/._-+:@%".contains(letter);
    if path.chars().all(is_plain) { path } else { format!("'{}'", path.replace('\'', r"'\''")) }
}

/// True if the kernel has `CAP_BPF`: older ones require `CAP_SYS_ADMIN` in its place.
fn knows_cap_bpf() -> bool {
    let last = fs::read_to_string("/proc/sys/kernel/cap_last_cap");
    last.ok().and_then(|last| last.trim().parse::<u32>().ok()).is_none_or(|last| last >= CAP_BPF)
}

/// User that `text` names as for [`drop_to`].
///
/// # Errors
/// [`Error::Setting`] if there is no such user.
pub fn user_named(text: &str) -> Result<User> {
    wanted(text).map(|wanted| wanted.to)
}

/// Makes `user` the user of the whole process for good: `NAME`, `UID`, or either with `:GROUP`. The
/// process gets that user's groups, loses its capabilities, and programs that it starts gain none.
/// To be called after opening what needs privileges, preferably before other threads start: those
/// change their user too, but can keep capabilities of the program's file, which is an error.
///
/// # Errors
/// [`Error::Setting`] if there is no such user; [`Error::Privilege`] if the process may not become
/// it; [`Error::Device`] if any of the old identity or privileges remains.
pub fn drop_to(user: &str) -> Result<User> {
    let Wanted { to, groups } = wanted(user)?;
    let is_it = || {
        let (uids, gids) = (unistd::getresuid(), unistd::getresgid());
        uids.is_ok_and(|of| [of.real, of.effective, of.saved] == [Uid::from_raw(to.uid); 3])
            && gids.is_ok_and(|of| [of.real, of.effective, of.saved] == [Gid::from_raw(to.gid); 3])
    };
    if !is_it() {
        require(&format!("becoming the user {user}"), &[Capability::SetUid, Capability::SetGid])?;
        let (uid, gid) = (Uid::from_raw(to.uid), Gid::from_raw(to.gid));
        let failed = |what: &'static str| move |errno| left(user, what, errno);
        unistd::setgroups(&groups).map_err(failed("set its groups"))?;
        unistd::setresgid(gid, gid, gid).map_err(failed("set its group"))?;
        unistd::setresuid(uid, uid, uid).map_err(failed("set its number"))?;
    }
    let failed = |what: &'static str| move |errno: rustix::io::Errno| left(user, what, errno);
    thread::set_no_new_privs(true).map_err(failed("rule out new privileges"))?;
    thread::clear_ambient_capability_set().map_err(failed("drop capabilities"))?;
    let none = CapabilitySet::empty();
    let none = CapabilitySets { effective: none, permitted: none, inheritable: none };
    thread::set_capabilities(None, none).map_err(failed("drop capabilities"))?;
    if !is_it() {
        return Err(left(user, "leave the old user", std::io::ErrorKind::PermissionDenied));
    }
    see_that_all_threads_are_without_capabilities(user)?;
    Ok(to)
}

/// User and groups to change to.
struct Wanted {
    to: User,
    groups: Vec<Gid>,
}

/// Resolves the user that `text` names.
fn wanted(text: &str) -> Result<Wanted> {
    let refused = |why: String| Error::Setting { what: "user", value: text.to_owned(), why };
    let (name, group) = match text.split_once(':') {
        Some((name, group)) => (name, Some(group)),
        None => (text, None),
    };
    let found = match name.parse() {
        Ok(uid) => unistd::User::from_uid(Uid::from_raw(uid)),
        Err(_) => unistd::User::from_name(name),
    };
    let found = found.map_err(|errno| refused(format!("it cannot be looked up: {errno}")))?;
    let uid = match (&found, name.parse()) {
        (Some(user), _) => user.uid.as_raw(),
        (None, Ok(uid)) => uid,
        (None, Err(_)) => return Err(refused("there is no such user".to_owned())),
    };
    let of_group = |group: &str| match group.parse() {
        Ok(gid) => Ok(gid),
        Err(_) => match unistd::Group::from_name(group) {
            Ok(Some(group)) => Ok(group.gid.as_raw()),
            _ => Err(refused(format!("there is no group {group:?}"))),
        },
    };
    let (gid, groups) = match (group, &found) {
        (Some(group), _) => (of_group(group)?, Vec::new()),
        (None, Some(user)) => {
            let name = CString::new(user.name.as_str()).unwrap_or_default();
            let groups = unistd::getgrouplist(&name, user.gid);
            let groups =
                groups.map_err(|errno| refused(format!("its groups cannot be read: {errno}")))?;
            (user.gid.as_raw(), groups)
        }
        (None, None) => {
            return Err(refused("this user has no name: say its group too, as UID:GID".to_owned()));
        }
    };
    // -1 means "unchanged" to setresuid(2).
    if [uid, gid].contains(&u32::MAX) {
        return Err(refused("there is no such user".to_owned()));
    }
    if uid == 0 {
        // A process of root would keep all privileges.
        return Err(refused("root keeps all privileges".to_owned()));
    }
    Ok(Wanted { to: User { uid, gid }, groups })
}

/// Checks /proc for capabilities of each thread: the kernel keeps them per thread.
fn see_that_all_threads_are_without_capabilities(user: &str) -> Result<()> {
    let unread = |source| left(user, "check that its threads have no capabilities", source);
    for task in fs::read_dir("/proc/self/task").map_err(unread)? {
        let status = match fs::read_to_string(task.map_err(unread)?.path().join("status")) {
            Ok(status) => status,
            Err(_) => continue, // the thread has ended
        };
        let has_some = status.lines().any(|line| {
            let of_thread = ["CapPrm:", "CapEff:", "CapAmb:"];
            let set = of_thread.iter().find_map(|name| line.strip_prefix(name));
            set.is_some_and(|set| set.trim().bytes().any(|digit| digit != b'0'))
        });
        if has_some {
            let kept = std::io::ErrorKind::PermissionDenied;
            return Err(left(user, "take the capabilities from all threads", kept));
        }
    }
    Ok(())
}

/// Error about a remainder of the old identity or privileges.
fn left(user: &str, what: &str, source: impl Into<std::io::Error>) -> Error {
    Error::Device {
        name: format!("user {user}"),
        what: what.to_owned(),
        source: source.into(),
        help: "start the program as that user, with the capabilities that it needs, or as root"
            .to_owned(),
    }
}

impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.uid, self.gid)
    }
}

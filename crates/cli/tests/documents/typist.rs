//! Bash, in a directory and namespace with everything that a block names.

use std::fmt::Write;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::block::{Block, Step};

/// Outcome of a command.
pub(crate) struct Said {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Devices that blocks name, with their addresses.
const DEVICES: [(&str, &str); 4] = [
    ("eth1", "10.0.0.2/24"),
    ("veth0", "10.0.1.2/24"),
    ("veth1", "10.0.2.2/24"),
    ("b0", "10.0.3.2/24"),
];

/// Tools that may be missing from a system.
const TOOLS: [&str; 6] = ["ip ", "tcpdump ", "tcpreplay ", "iperf3 ", "ethtool ", "dig "];

/// Commands typed before a block, and between its commands.
const PRELUDE: &str = r#"
set -m
# Waits until a process catches SIGINT, or is gone.
catches() {
    local caught
    while kill -0 "$1" 2>/dev/null; do
        caught=$(awk '/^SigCgt/ { print $2 }' "/proc/$1/status" 2>/dev/null)
        (( 16#${caught:-0} & 2 )) && return
        sleep 0.02
    done
}
# Waits until a run can be asked, or is gone.
listens() {
    while kill -0 "$1" 2>/dev/null; do
        forebay list >/dev/null 2>&1 && return
        sleep 0.02
    done
}
"#;

/// Reason why a block cannot be run here, if any.
pub(crate) fn missing(block: &Block) -> Option<String> {
    let has =
        |tool: &str| Command::new("which").arg(tool).output().is_ok_and(|out| out.status.success());
    if !has("bash") {
        return Some("bash is not installed".to_owned());
    }
    if let Some(tool) = TOOLS.iter().find(|tool| block.names(tool) && !has(tool.trim())) {
        return Some(format!("{tool}is not installed"));
    }
    if std::thread::available_parallelism().map_or(1, usize::from) < 2 {
        return Some("there is one CPU only".to_owned());
    }
    if !needs_devices(block) && !needs_mount(block) {
        return None;
    }
    if needs_mount(block) && !Path::new("/dev/fuse").exists() {
        return Some("there is no /dev/fuse".to_owned());
    }
    let namespace = Command::new("unshare").args(["-nm", "ip", "link"]).output();
    let is_allowed = namespace.is_ok_and(|output| output.status.success());
    (!is_allowed).then(|| "network namespaces need root, unshare and ip".to_owned())
}

fn needs_devices(block: &Block) -> bool {
    ["forebay run", "forebay doctor", "--example", "ip nexthop"].iter().any(|it| block.names(it))
}

fn needs_mount(block: &Block) -> bool {
    block.names("--mount")
}

/// Types all commands of a block. Blocks run one at a time, so that each has two CPUs to itself.
pub(crate) fn run(block: &Block, steps: &[Step]) -> Result<Vec<Said>, String> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    for name in ["here", "said", "bin", "run"] {
        fs::create_dir(path(name)).unwrap();
    }
    symlink(repository().join("crates"), path("here/crates")).unwrap();
    symlink(env!("CARGO_BIN_EXE_forebay"), path("bin/forebay")).unwrap();
    if block.names("cargo run") {
        write_cargo(&path("bin/cargo"), block)?;
    }
    let is_apart = needs_devices(block) || needs_mount(block);
    fs::write(path("script"), script(steps, is_apart, &path("said"))).unwrap();
    // Bash cannot undo that its parent ignores SIGINT, as in the background of a script.
    let mut command = Command::new("env");
    command.arg("--default-signal=INT");
    if is_apart {
        command.args(["unshare", "-nm"]);
    }
    command.arg("bash");
    let search = format!("{}:{}", path("bin").display(), std::env::var("PATH").unwrap_or_default());
    command.arg(path("script")).current_dir(path("here")).stdin(Stdio::null());
    command.env("PATH", search).env("XDG_RUNTIME_DIR", path("run"));
    command.env_remove("RUNTIME_DIRECTORY").env_remove("FOREBAY_CONTROL");
    let output = command.output().map_err(|error| error.to_string())?;
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    let read = |number: usize, what: &str| {
        fs::read_to_string(path("said").join(format!("{number}.{what}"))).unwrap_or_default()
    };
    let said = |number| Said {
        code: read(number, "code").trim().parse().ok(),
        stdout: read(number, "out"),
        stderr: read(number, "err") + &told,
    };
    Ok((0..steps.len()).map(said).collect())
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn script(steps: &[Step], is_apart: bool, said: &Path) -> String {
    let mut script = PRELUDE.to_owned();
    if is_apart {
        script += "mount -t tmpfs tmpfs /run\nip link set lo up\n";
        for (device, address) in DEVICES {
            let _ = writeln!(script, "ip link add {device} type veth peer name {device}-peer");
            let _ = writeln!(script, "ip address add {address} dev {device}");
            let _ = writeln!(script, "ip link set {device} up; ip link set {device}-peer up");
        }
    }
    // The first two CPUs that this process may use.
    script += "taskset -cp \"$(taskset -cp $$ | sed 's/.*: //' | tr , '\\n' | \
               while IFS=- read -r a b; do seq $a ${b:-$a}; done | head -n 2 | paste -sd,)\" $$ >&2\n";
    for (number, Step { command, is_ended, .. }) in steps.iter().enumerate() {
        let file = |what| said.join(format!("{number}.{what}")).display().to_string();
        let (out, err, code) = (file("out"), file("err"), file("code"));
        let command = command.split("  #").next().unwrap_or(command);
        let background = if *is_ended { " &" } else { "" };
        let _ = writeln!(script, "{{ {command}{background}\n}} >{out} 2>{err}; code=$?");
        if *is_ended {
            script += "catches $!; kill -INT $!; wait $!; code=$?\n";
        } else if command.starts_with("forebay ") && command.trim_end().ends_with('&') {
            script += "listens $!\n";
        }
        let _ = writeln!(script, "echo $code >{code}");
    }
    script + "for job in $(jobs -p); do kill -INT -- -$job 2>/dev/null; done; wait\n"
}

/// Writes a `cargo` script that runs the binaries already built: the program, or an example.
fn write_cargo(path: &Path, block: &Block) -> Result<(), String> {
    let target = Path::new(env!("CARGO_BIN_EXE_forebay")).parent().unwrap();
    if block.names("--example") {
        static BUILT: OnceLock<Result<(), String>> = OnceLock::new();
        BUILT.get_or_init(build_examples).clone()?;
    }
    let target = target.display();
    let script = format!(
        "#!/bin/bash\nprogram={target}/forebay\nwhile [[ $# -gt 0 && $1 != -- ]]; do\n\
         [[ $1 == --example ]] && program={target}/examples/$2\nshift\ndone\nshift\n\
         exec $program \"$@\"\n"
    );
    forebay_testkit::programs::write_script(path, &script).unwrap();
    Ok(())
}

/// Examples that blocks name.
const EXAMPLES: [&str; 4] = ["dns", "http", "rpc", "sink"];

/// Builds the examples in the profile of the tests, and with the features that the whole workspace selects: with
/// those of one crate alone, cargo would compile all below it once more.
fn build_examples() -> Result<(), String> {
    let mut command = Command::new(env!("CARGO"));
    command.args(["build", "--quiet", "--locked", "--profile", "test", "--workspace"]);
    command.args(EXAMPLES.iter().flat_map(|name| ["--example", name]));
    let output = command.current_dir(repository()).output().map_err(|error| error.to_string())?;
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() { Ok(()) } else { Err(told) }
}

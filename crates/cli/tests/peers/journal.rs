//! Messages in a journal: a socket in the place of journald's, in a mount namespace.

use std::os::unix::net::UnixDatagram;
use std::process::Command;
use std::time::Duration;

use crate::Judgement;
use crate::program::told;

/// Time after which an entry counts as missing: only to end a hang.
const PATIENCE: Duration = Duration::from_secs(60);

/// Reason for which the judge cannot run, if any.
pub(crate) fn missing() -> Option<String> {
    let tried = Command::new("unshare").args(["-m", "mount", "--bind", "/tmp", "/run"]).output();
    match tried {
        Ok(output) if output.status.success() => None,
        Ok(output) => Some(format!("it takes a mount namespace: {}", told(&output))),
        Err(error) => Some(format!("there is no unshare: {error}")),
    }
}

/// Each message is an entry, with its fields by names of ours.
pub(crate) fn judge() -> Judgement {
    let directory = tempfile::tempdir()?;
    let place = directory.path().join("systemd/journal");
    std::fs::create_dir_all(&place)?;
    let journal = UnixDatagram::bind(place.join("socket"))?;
    journal.set_read_timeout(Some(PATIENCE))?;
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", "mount --bind \"$0\" /run && exec \"$@\""]);
    command.arg(directory.path()).arg(env!("CARGO_BIN_EXE_forebay"));
    command.args(["replay", "--cpus", "1", "--metrics", "0", "--log", "journald"]);
    let output = command.output()?;
    if !output.status.success() || !output.stderr.is_empty() {
        return Err(format!("{}: {}", output.status, told(&output)).into());
    }
    let mut entry = [0; 4096];
    loop {
        let len = journal.recv(&mut entry)?;
        let text = String::from_utf8_lossy(&entry[..len]);
        // The program tries the socket with an empty entry first.
        if len == 0 {
            continue;
        }
        let parts = ["metrics at http://", "FOREBAY_ADDRESS", "PRIORITY", "SYSLOG_IDENTIFIER"];
        return match parts.into_iter().find(|part| !text.contains(part)) {
            None => Ok(()),
            Some(part) => Err(format!("{part} is missing: {text}").into()),
        };
    }
}

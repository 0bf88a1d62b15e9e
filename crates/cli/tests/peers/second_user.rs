//! Another user at a run's control socket: the kernel's permission check on the file, and the run's
//! own check of the peer.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use forebay_testkit::programs;

use crate::Judgement;
use crate::program::told;

/// User id of `nobody`.
const OTHER: &str = "65534";

/// Tool or file that the judge needs and that is missing, if any.
pub(crate) fn missing() -> Option<String> {
    let is_other = as_other(Path::new("id")).arg("-u").output();
    match is_other {
        Ok(output) if output.stdout == format!("{OTHER}\n").as_bytes() => None,
        Ok(output) => Some(format!("setpriv does not change the user: {}", told(&output))),
        Err(error) => Some(format!("there is no setpriv: {error}")),
    }
}

pub(crate) fn judge() -> Judgement {
    let dir = WorkDir::new()?;
    let mut run = dir.start(Command::new(&dir.program))?;
    let judged = dir.judge_as_owner();
    run.kill()?;
    run.wait()?;
    judged?;
    // Root may control the runs of other users.
    fs::remove_file(dir.socket())?;
    let mut run = dir.start(as_other(&dir.program))?;
    let output = dir.ask(Command::new(&dir.program), "set mtu=1400")?;
    let judged = expect(&output, Some(0), "now mtu 1400");
    run.kill()?;
    run.wait()?;
    judged
}

/// A directory that every user may enter, with the program in it.
struct WorkDir {
    directory: tempfile::TempDir,
    program: PathBuf,
}

impl WorkDir {
    fn new() -> Result<Self, std::io::Error> {
        let directory = tempfile::tempdir()?;
        let program = directory.path().join("forebay");
        programs::copy(env!("CARGO_BIN_EXE_forebay"), &program)?;
        fs::set_permissions(directory.path(), Permissions::from_mode(0o777))?;
        Ok(Self { directory, program })
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("s.sock")
    }

    /// Starts a replay that runs until stopped, and waits until it listens.
    fn start(&self, mut command: Command) -> Result<Child, std::io::Error> {
        let args = "replay --cpus 1 --rate 1k --loops 1000000 --control s.sock";
        let command = command.current_dir(&self.directory).args(args.split(' '));
        let mut run = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        while !self.socket().exists() && run.try_wait()?.is_none() {
            std::thread::yield_now();
        }
        Ok(run)
    }

    fn ask(&self, mut command: Command, args: &str) -> Result<Output, std::io::Error> {
        let command = command.current_dir(&self.directory).args(args.split(' '));
        command.args(["--control", "s.sock"]).output()
    }

    fn judge_as_owner(&self) -> Judgement {
        for mode in [0o600, 0o666] {
            fs::set_permissions(self.socket(), Permissions::from_mode(mode))?;
            // The kernel rejects users without write permission on the file; the run rejects users
            // other than its owner.
            let why = if mode == 0o600 { "Permission denied" } else { "may not control a run of" };
            for args in ["set mtu=9000", "get mtu", "list", "watch", "explain 0badcafe"] {
                expect(&self.ask(as_other(&self.program), args)?, Some(3), why)?;
            }
            let output = self.ask(Command::new(&self.program), "get mtu")?;
            if output.stdout != b"1500\n" {
                return Err(format!("it has changed something: {output:?}").into());
            }
        }
        Ok(())
    }
}

fn as_other(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--reuid", OTHER, "--clear-groups"]).arg(program);
    command
}

fn expect(output: &Output, code: Option<i32>, words: &str) -> Judgement {
    let told = told(output);
    if output.status.code() == code && told.contains(words) {
        return Ok(());
    }
    Err(format!("{code:?} and {words:?} were expected: {:?}, {told}", output.status.code()).into())
}

//! Removal of a control socket by a process that may: a run that has become another user may not.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::{env, fs, mem};

use clap::Args;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::failure::Failure;

/// Hidden command of the process that removes.
const COMMAND: &str = "remove-socket";

/// Word to that process: the run removes the socket itself.
const NOT_NEEDED: &[u8] = b"n";

#[derive(Debug, Args)]
pub(crate) struct RemoveSocketArgs {
    path: PathBuf,
    /// Device and inode of the socket: another file may have replaced it
    device: u64,
    inode: u64,
}

/// Process that removes a socket when this one has ended, however it ends. It only waits for that.
pub(crate) struct SocketRemover(Child);

impl SocketRemover {
    /// Begins the process, with the privileges that this one has now.
    pub(crate) fn begin(path: &Path) -> io::Result<Self> {
        let socket = fs::symlink_metadata(path)?;
        let mut remover = Command::new(env::current_exe()?);
        remover.arg(COMMAND).arg(path);
        remover.args([socket.dev().to_string(), socket.ino().to_string()]);
        remover.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        // A terminal's signals end the run, and thereby this one.
        Ok(Self(remover.process_group(0).spawn()?))
    }

    /// Lets it remove the socket.
    pub(crate) fn keep(self) {
        // Its input ends when this process does.
        mem::forget(self.0);
    }

    /// Ends it: it is not needed.
    pub(crate) fn end(mut self) {
        if let Some(mut to) = self.0.stdin.take() {
            // Ignored: it has ended already.
            let _ = to.write_all(NOT_NEEDED);
        }
        let _ = self.0.wait();
    }
}

/// Waits until the run has ended, and removes its socket.
pub(crate) fn run(args: &RemoveSocketArgs) -> Result<(), Failure> {
    // A service manager sends them to all processes of a run, which has yet to end.
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        // If a handler cannot be installed, the signal ends the program as by default.
        let _ = signal_hook::flag::register(signal, Arc::default());
    }
    let mut word = [0; NOT_NEEDED.len()];
    let told = loop {
        match io::stdin().lock().read(&mut word) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            told => break told,
        }
    };
    let is_it = |of: fs::Metadata| (of.dev(), of.ino()) == (args.device, args.inode);
    if matches!(told, Ok(0)) && fs::symlink_metadata(&args.path).is_ok_and(is_it) {
        // Ignored: nobody would hear of it.
        let _ = fs::remove_file(&args.path);
    }
    Ok(())
}

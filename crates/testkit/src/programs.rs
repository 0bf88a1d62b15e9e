//! Executables that a test creates, to be run by the test or by another user.
//!
//! A file that is open for writing cannot be executed (`ETXTBSY`). If this process wrote it, a
//! child that another thread forks meanwhile would inherit the open file until its own exec. Other
//! processes write the files instead.

use std::ffi::OsStr;
use std::io::{self, Write};
use std::path::Path;
use std::process::{Command, Stdio};

/// Copies an executable.
///
/// # Errors
/// If `cp` fails.
pub fn copy(program: impl AsRef<OsStr>, to: &Path) -> io::Result<()> {
    succeed(Command::new("cp").arg(program).arg(to), b"")
}

/// Writes a script that every user may run.
///
/// # Errors
/// If `install` fails.
pub fn write_script(path: &Path, text: &str) -> io::Result<()> {
    succeed(Command::new("install").args(["-m", "755", "/dev/stdin"]).arg(path), text.as_bytes())
}

fn succeed(command: &mut Command, input: &[u8]) -> io::Result<()> {
    let mut child = command.stdin(Stdio::piped()).spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(input)?;
    }
    let status = child.wait()?;
    if status.success() { Ok(()) } else { Err(io::Error::other(format!("{command:?}: {status}"))) }
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::{env, fs, process, thread};

    use super::{copy, write_script};

    #[test]
    fn programs_run_while_others_are_forked() {
        let directory = env::temp_dir().join(format!("forebay-programs-{}", process::id()));
        fs::create_dir_all(&directory).unwrap();
        thread::scope(|scope| {
            for number in 0..4 {
                let (script, program) =
                    (directory.join(format!("s{number}")), directory.join(format!("p{number}")));
                scope.spawn(move || {
                    for _ in 0..20 {
                        write_script(&script, "#!/bin/sh\nexit 7\n").unwrap();
                        assert_eq!(Command::new(&script).status().unwrap().code(), Some(7));
                        copy("/bin/false", &program).unwrap();
                        assert_eq!(Command::new(&program).status().unwrap().code(), Some(1));
                        fs::remove_file(&program).unwrap();
                    }
                });
            }
        });
        fs::remove_dir_all(&directory).unwrap();
    }
}

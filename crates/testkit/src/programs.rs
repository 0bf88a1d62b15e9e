//! Programs that a test makes, to be run by it or by another user.
//!
//! A file that is open for writing cannot be run (`ETXTBSY`). Were it written here, whatever another
//! thread of the test forks meanwhile would have it open too, until it runs a program of its own. So
//! other processes write it.

use std::ffi::OsStr;
use std::io::{self, Write};
use std::path::Path;
use std::process::{Command, Stdio};

/// Copies a program.
///
/// # Errors
/// When `cp` fails.
pub fn copy(program: impl AsRef<OsStr>, to: &Path) -> io::Result<()> {
    succeed(Command::new("cp").arg(program).arg(to), b"")
}

/// Writes a script that everybody may run.
///
/// # Errors
/// When `install` fails.
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

//! Standard output.

use std::io::{self, ErrorKind, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::failure::Failure;

/// True if anything was printed.
static HAS_PRINTED: AtomicBool = AtomicBool::new(false);

/// Prints a whole text. A reader that has enough closes the pipe, and there is nobody to tell.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    match write(text) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(Failure::Output { error }),
        _ => Ok(()),
    }
}

/// Writes a text, for who goes on until its reader has enough.
pub(crate) fn write(text: &str) -> io::Result<()> {
    HAS_PRINTED.store(true, Ordering::Relaxed);
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush())
}

/// True if anything was printed, or tried to be.
pub(crate) fn has_printed() -> bool {
    HAS_PRINTED.load(Ordering::Relaxed)
}

//! Standard output.

use std::io::{self, ErrorKind, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::failure::Failure;

/// True once anything was printed.
static HAS_PRINTED: AtomicBool = AtomicBool::new(false);

/// Prints a whole text. A closed pipe is not an error: the reader has read enough.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    match write(text) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(Failure::Output { error }),
        _ => Ok(()),
    }
}

/// Writes a text, for a caller that continues until its reader closes the pipe.
pub(crate) fn write(text: &str) -> io::Result<()> {
    HAS_PRINTED.store(true, Ordering::Relaxed);
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush())
}

/// True once anything was printed, or an attempt was made.
pub(crate) fn has_printed() -> bool {
    HAS_PRINTED.load(Ordering::Relaxed)
}

//! What goes to standard output.

use std::io::{self, ErrorKind, Write};

use crate::failure::Failure;

/// Prints a whole text. A reader that has enough closes the pipe, and there is nobody to tell.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(Failure::Output { error }),
        _ => Ok(()),
    }
}

//! Text files that somebody else wrote, up to a size.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::path::Path;

/// Reads a whole text, also from a pipe or a device, which may never end.
///
/// # Errors
/// If it cannot be read, has more than `bytes_max` bytes, or is not UTF-8.
pub fn read_text(path: &Path, bytes_max: usize) -> io::Result<String> {
    let mut bytes = Vec::new();
    // One byte more tells that there are too many.
    let limit = (bytes_max as u64).saturating_add(1);
    File::open(path)?.take(limit).read_to_end(&mut bytes)?;
    if bytes.len() > bytes_max {
        let why = format!("it has more than {} KiB", bytes_max >> 10);
        return Err(io::Error::new(ErrorKind::FileTooLarge, why));
    }
    let not_text = |_| io::Error::new(ErrorKind::InvalidData, "it is not text in UTF-8");
    String::from_utf8(bytes).map_err(not_text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promise_3_read_texts_have_a_limit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("text");
        let read = |text: &[u8]| {
            std::fs::write(&path, text).unwrap();
            read_text(&path, 4).map_err(|error| error.kind())
        };
        assert_eq!(read(b""), Ok(String::new()));
        assert_eq!(read(b"four"), Ok("four".to_owned()));
        assert_eq!(read(b"fiver"), Err(ErrorKind::FileTooLarge));
        assert_eq!(read(b"a\xff"), Err(ErrorKind::InvalidData));
        let endless = read_text(Path::new("/dev/zero"), 4096).unwrap_err();
        assert_eq!(endless.to_string(), "it has more than 4 KiB");
    }
}

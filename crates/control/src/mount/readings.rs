//! Texts of open files that are being read.

use std::collections::BTreeMap;

use fuser::FileHandle;

/// Maximum number of open files whose text is kept. When there are more, the file that was opened
/// first continues with the current text.
const READINGS_MAX: usize = 1024;

/// Texts of open files, so that a file which is read in pieces is one snapshot. As in the kernel
/// (`seq_read_iter` in fs/seq_file.c), a text is made when a file is read from its start, or from
/// anywhere but the end of the last piece.
pub(super) struct Readings {
    open: BTreeMap<u64, Reading>,
}

struct Reading {
    text: String,
    /// End of the last piece.
    offset: u64,
}

impl Readings {
    pub(super) fn new() -> Self {
        Self { open: BTreeMap::new() }
    }

    /// Reads the next piece of a file, at most `size_bytes` from `offset` on. `text` makes the
    /// current text.
    pub(super) fn read<E>(
        &mut self,
        file: FileHandle,
        offset: u64,
        size_bytes: u32,
        text: impl FnOnce() -> Result<String, E>,
    ) -> Result<Vec<u8>, E> {
        let mut reading = match self.open.remove(&file.0) {
            Some(reading) if offset > 0 && reading.offset == offset => reading,
            _ => Reading { text: text()?, offset },
        };
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let size_bytes = usize::try_from(size_bytes).unwrap_or(usize::MAX);
        let rest = reading.text.as_bytes().get(start..).unwrap_or_default();
        let piece = rest[..rest.len().min(size_bytes)].to_vec();
        reading.offset += piece.len() as u64;
        if self.open.len() == READINGS_MAX {
            self.open.pop_first();
        }
        self.open.insert(file.0, reading);
        Ok(piece)
    }

    /// Drops the text of a file that was closed.
    pub(super) fn close(&mut self, file: FileHandle) {
        self.open.remove(&file.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(readings: &mut Readings, file: u64, offset: u64, text: &str) -> String {
        let text = || Ok::<_, ()>(text.to_owned());
        let piece = readings.read(FileHandle(file), offset, 2, text).unwrap();
        String::from_utf8(piece).unwrap()
    }

    #[test]
    fn file_read_is_one_snapshot() {
        let mut readings = Readings::new();
        assert_eq!(read(&mut readings, 1, 0, "abc\n"), "ab");
        assert_eq!(read(&mut readings, 2, 0, "ABC\n"), "AB");
        assert_eq!(read(&mut readings, 1, 2, "xyz\n"), "c\n");
        assert_eq!(read(&mut readings, 1, 4, "longer\n"), "");
        assert_eq!(read(&mut readings, 1, 0, "xyz\n"), "xy");
        assert_eq!(read(&mut readings, 1, 1, "123\n"), "23");
        assert_eq!(read(&mut readings, 1, u64::MAX, "123\n"), "");
        assert_eq!(read(&mut readings, 2, 2, "xyz\n"), "C\n");
    }

    #[test]
    fn promise_3_kept_texts_are_bounded() {
        let mut readings = Readings::new();
        let most = READINGS_MAX as u64;
        for file in 0..=most {
            assert_eq!(read(&mut readings, file, 0, "abc\n"), "ab");
        }
        assert_eq!(readings.open.len(), READINGS_MAX);
        assert_eq!(read(&mut readings, 0, 2, "xyz\n"), "z\n");
        assert_eq!(read(&mut readings, most, 2, "xyz\n"), "c\n");
        (0..=most).for_each(|file| readings.close(FileHandle(file)));
        assert!(readings.open.is_empty());
    }
}

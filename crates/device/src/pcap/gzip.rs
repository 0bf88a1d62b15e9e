//! Unpacking of gzip files: one member after another, and zeros behind the last, as gzip(1) ignores them.

use std::io::{self, BufRead, BufReader, ErrorKind, Read};

use flate2::bufread::GzDecoder;

/// First byte of a member (RFC 1952, section 2.3.1).
const MEMBER_BEGINS: u8 = 0x1f;

/// Reader of the unpacked bytes of a gzip file.
pub(super) struct Gunzip<R: Read> {
    state: GunzipState<R>,
}

enum GunzipState<R: Read> {
    /// Within a member.
    Member(GzDecoder<BufReader<R>>),
    /// Behind a member, and behind zeros if true.
    Behind(BufReader<R>, bool),
    /// Behind everything.
    Ended,
}

impl<R: Read> Gunzip<R> {
    pub(super) fn new(packed: R) -> Self {
        Self { state: GunzipState::Member(GzDecoder::new(BufReader::new(packed))) }
    }

    fn leave_member(&mut self) {
        if let GunzipState::Member(member) = std::mem::replace(&mut self.state, GunzipState::Ended)
        {
            self.state = GunzipState::Behind(member.into_inner(), false);
        }
    }

    /// Skips zeros behind a member. Only further members may follow one, and only the end may follow zeros.
    fn pass_zeros(&mut self) -> io::Result<()> {
        let GunzipState::Behind(packed, has_zeros) = &mut self.state else { return Ok(()) };
        let next = loop {
            let bytes = packed.fill_buf()?;
            let zeros = bytes.iter().take_while(|byte| **byte == 0).count();
            let next = bytes.get(zeros).copied();
            if bytes.is_empty() {
                self.state = GunzipState::Ended;
                return Ok(());
            }
            packed.consume(zeros);
            *has_zeros |= zeros > 0;
            if let Some(next) = next {
                break next;
            }
        };
        // However few they are: a member that is cut short would be told as damage of the capture.
        if *has_zeros || next != MEMBER_BEGINS {
            return Err(io::Error::new(ErrorKind::InvalidData, "other bytes follow its data"));
        }
        if let GunzipState::Behind(packed, _) =
            std::mem::replace(&mut self.state, GunzipState::Ended)
        {
            self.state = GunzipState::Member(GzDecoder::new(packed));
        }
        Ok(())
    }
}

impl<R: Read> Read for Gunzip<R> {
    fn read(&mut self, unpacked: &mut [u8]) -> io::Result<usize> {
        if unpacked.is_empty() {
            return Ok(0);
        }
        loop {
            match &mut self.state {
                GunzipState::Ended => return Ok(0),
                GunzipState::Behind(..) => self.pass_zeros()?,
                GunzipState::Member(member) => match member.read(unpacked)? {
                    0 => self.leave_member(),
                    count => return Ok(count),
                },
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    pub(in crate::pcap) fn packed(text: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    }

    fn unpacked(parts: &[&[u8]]) -> Result<Vec<u8>, ErrorKind> {
        let mut bytes = Vec::new();
        let read = Gunzip::new(parts.concat().as_slice()).read_to_end(&mut bytes);
        read.map(|_| bytes).map_err(|error| error.kind())
    }

    #[test]
    fn zeros_behind_gzip_are_ignored() {
        let (one, two, empty) = (packed(b"one"), packed(b"two"), packed(b""));
        assert_eq!(unpacked(&[&one]), Ok(b"one".to_vec()));
        assert_eq!(unpacked(&[&one, &empty, &two]), Ok(b"onetwo".to_vec()));
        assert_eq!(unpacked(&[&one, &two, &[0; 512]]), Ok(b"onetwo".to_vec()));
        assert_eq!(unpacked(&[&one, &vec![0; 100_000]]), Ok(b"one".to_vec()));
        for behind in [&b"junk behind the data"[..], b"junk", b"j", b"\0junk", b"\0\x1f\x8b"] {
            assert_eq!(unpacked(&[&one, behind]), Err(ErrorKind::InvalidData));
        }
        for end in [one.len() - 1, 5] {
            assert_eq!(unpacked(&[&one[..end]]), Err(ErrorKind::UnexpectedEof), "{end}");
            assert_eq!(unpacked(&[&two, &one[..end]]), Err(ErrorKind::UnexpectedEof), "{end}");
        }
    }
}

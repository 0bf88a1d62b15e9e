//! Token: the secret of those who may change knobs on the page.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::str::FromStr;

use forebay_sys::error::{Error, Result};

/// Least number of characters of a token: nobody guesses that many random ones.
pub const TOKEN_CHARS_MIN: usize = 16;

/// Most characters.
const TOKEN_CHARS_MAX: usize = 256;

/// Bits of a file's mode that let others read it.
const OTHERS: u32 = 0o077;

/// Secret that a request must have to change a knob.
#[derive(Clone, PartialEq, Eq)]
pub struct PageToken(String);

impl PageToken {
    /// Reads the token from the first line of a file that only its owner may read.
    ///
    /// # Errors
    /// If the file cannot be read, others may read it, or its first line is not a token.
    pub fn read(path: &Path) -> Result<Self> {
        let refused = |why: String| Error::Setting {
            what: "page-token",
            value: path.display().to_string(),
            why,
        };
        let mut file = File::open(path).map_err(Error::file("read", path))?;
        let mode = file.metadata().map_err(Error::file("read", path))?.permissions().mode();
        if mode & OTHERS != 0 {
            let why = format!("others may read it; chmod 600 {}", path.display());
            return Err(refused(why));
        }
        let mut text = String::new();
        let length_max = 4 * TOKEN_CHARS_MAX as u64;
        file.by_ref()
            .take(length_max)
            .read_to_string(&mut text)
            .map_err(Error::file("read", path))?;
        text.lines().next().unwrap_or_default().trim().parse().map_err(refused)
    }

    /// True if this is the token. The time taken does not tell how much of it is right.
    pub(super) fn is(&self, given: &str) -> bool {
        let pairs = self.0.bytes().zip(given.bytes().chain(std::iter::repeat(0)));
        let differences = pairs.fold(0, |differences, (a, b)| differences | (a ^ b));
        differences == 0 && given.len() == self.0.len()
    }
}

impl FromStr for PageToken {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let is_visible = text.bytes().all(|byte| byte.is_ascii_graphic());
        if is_visible && (TOKEN_CHARS_MIN..=TOKEN_CHARS_MAX).contains(&text.len()) {
            return Ok(Self(text.to_owned()));
        }
        Err(format!(
            "its first line is not {TOKEN_CHARS_MIN} to {TOKEN_CHARS_MAX} letters, digits or signs; \
             `head -c 18 /dev/urandom | base64` makes some"
        ))
    }
}

impl fmt::Debug for PageToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PageToken")
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn pag_4_token_is_long_and_visible() {
        assert!("0123456789abcdef".parse::<PageToken>().is_ok());
        for text in ["", "0123456789abcde", "0123456789 abcdef", "0123456789abcdéf"] {
            assert!(text.parse::<PageToken>().is_err(), "{text}");
        }
        assert!("x".repeat(TOKEN_CHARS_MAX + 1).parse::<PageToken>().is_err());
        let token: PageToken = "0123456789abcdef".parse().unwrap();
        assert_eq!(format!("{token:?}"), "PageToken", "it is not printed");
    }

    #[test]
    fn pag_4_token_file_is_private() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        let read = |text: &str, mode| {
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            PageToken::read(&path).map_err(|error| error.to_string())
        };
        let token = "0123456789abcdef".parse().unwrap();
        assert_eq!(read("0123456789abcdef\n", 0o600), Ok(token));
        for mode in [0o640, 0o604, 0o644] {
            let refused = read("0123456789abcdef\n", mode).unwrap_err();
            assert!(refused.contains("others may read it; chmod 600 "), "{refused}");
        }
        assert!(read("short\n", 0o600).unwrap_err().contains("its first line is not 16 to 256"));
        fs::remove_file(&path).unwrap();
        assert!(PageToken::read(&path).unwrap_err().to_string().starts_with("cannot read "));
    }
}

//! Descriptors that a message passes to another process (`SCM_RIGHTS`).

use std::os::fd::RawFd;

/// Bytes of the head of a control message (`struct cmsghdr`), and their alignment.
const HEAD_BYTES: usize = 16;
const ALIGN: usize = 8;

/// Numbers of the descriptors in control messages, up to the first message that is not whole.
pub(crate) fn passed_numbers(control: &[u8]) -> impl Iterator<Item = RawFd> {
    let mut rest = control;
    let messages = std::iter::from_fn(move || {
        let (head, _) = rest.split_first_chunk::<HEAD_BYTES>()?;
        let (len, about) = head.split_first_chunk()?;
        let len = usize::from_ne_bytes(*len);
        let message = rest.get(HEAD_BYTES..len)?;
        let level = i32::from_ne_bytes(*about.first_chunk()?);
        let kind = i32::from_ne_bytes(*about.last_chunk()?);
        rest = rest.get(len.next_multiple_of(ALIGN)..).unwrap_or_default();
        let passes = (level, kind) == (libc::SOL_SOCKET, libc::SCM_RIGHTS);
        Some(if passes { message } else { &[] })
    });
    messages.flat_map(|message| message.as_chunks().0.iter().map(|it| RawFd::from_ne_bytes(*it)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: i32, numbers: &[RawFd]) -> Vec<u8> {
        let mut bytes = (HEAD_BYTES + 4 * numbers.len()).to_ne_bytes().to_vec();
        bytes.extend_from_slice(&libc::SOL_SOCKET.to_ne_bytes());
        bytes.extend_from_slice(&kind.to_ne_bytes());
        numbers.iter().for_each(|number| bytes.extend_from_slice(&number.to_ne_bytes()));
        bytes.resize(bytes.len().next_multiple_of(ALIGN), 0);
        bytes
    }

    #[test]
    fn exe_5_passed_numbers_are_found() {
        let credentials = message(libc::SCM_CREDENTIALS, &[1, 2, 3]);
        let rights = message(libc::SCM_RIGHTS, &[7, 9, 11]);
        let control = [rights.clone(), credentials, message(libc::SCM_RIGHTS, &[5])].concat();
        assert_eq!(passed_numbers(&control).collect::<Vec<_>>(), [7, 9, 11, 5]);
        for cut in 0..rights.len() - 4 {
            assert_eq!(passed_numbers(&rights[..cut]).count(), 0, "{cut}");
        }
        for len in [0usize, 1, 15, usize::MAX] {
            let mut wrong = rights.clone();
            wrong[..8].copy_from_slice(&len.to_ne_bytes());
            assert_eq!(passed_numbers(&wrong).count(), 0, "{len}");
        }
    }
}

//! Keys that nobody can guess.

/// Random key from the kernel, unpredictable to peers.
#[must_use]
pub fn random_key() -> [u8; 16] {
    let mut key = [0; 16];
    let filled = rustix::rand::getrandom(&mut key, rustix::rand::GetRandomFlags::empty());
    // The kernel returns up to 256 bytes whole once its pool is initialised, as it is by now.
    debug_assert_eq!(filled.ok(), Some(key.len()));
    key
}

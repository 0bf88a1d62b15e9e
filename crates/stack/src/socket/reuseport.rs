//! Choice among sockets that share an address and port (`SO_REUSEPORT`).

/// Chooses a member (`reuseport_select_sock_by_hash`): the first one that prefers this CPU, searching
/// from the member that the hash selects; else the member that the hash selects.
pub(crate) fn choose<T>(members: &[T], hash: u32, is_here: impl Fn(&T) -> bool) -> Option<&T> {
    let (before, from) = members.split_at(reciprocal_scale(hash, members.len()));
    from.iter().chain(before).find(|member| is_here(member)).or_else(|| from.first())
}

/// Scales `hash` to `0 <= index < count`: the kernel's `reciprocal_scale`.
pub(super) fn reciprocal_scale(hash: u32, count: usize) -> usize {
    let scaled = (u64::from(hash) * count as u64) >> 32;
    usize::try_from(scaled).unwrap_or(0)
}

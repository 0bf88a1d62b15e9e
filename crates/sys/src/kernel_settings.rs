//! Settings of the kernel that ours follow.

/// The kernel's `tcp_fastopen`. `None` if the file cannot be read.
#[must_use]
pub fn tcp_fast_open() -> Option<u32> {
    std::fs::read_to_string("/proc/sys/net/ipv4/tcp_fastopen").ok()?.trim().parse().ok()
}

/// First value of the kernel's `udp_mem`: pages of UDP memory below which it does not regulate.
/// `None` if the file cannot be read.
#[must_use]
pub fn udp_mem_low_pages() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/sys/net/ipv4/udp_mem").ok()?;
    text.split_whitespace().next()?.parse().ok()
}

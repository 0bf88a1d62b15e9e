//! The device's receive hash, which the XDP program puts in front of the packet.

/// What the program puts in front of each packet, and how to read it.
///
/// Three words, right before the packet's first byte: the hash, its kind (`enum xdp_rss_hash_type`)
/// and a cookie that says that the program has just written them. Where the program could not, these
/// bytes are what was left there before: so the reader wipes the cookie out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MetadataLayout {
    /// Known to nobody who sends packets: what is left in memory from them cannot look like it.
    pub(super) cookie: u32,
}

impl MetadataLayout {
    /// What stands before the packet.
    pub const BYTES: usize = 12;

    /// The hash of the packet behind these bytes, if the device has one that tells flows apart.
    /// Once: the bytes then hold none.
    pub fn take_hash(self, before: &mut [u8; Self::BYTES]) -> Option<u32> {
        let (words, _) = before.as_chunks_mut::<4>();
        let [hash, kind, cookie] = words else { return None };
        let is_written = u32::from_ne_bytes(*cookie) == self.cookie;
        *cookie = [0; 4];
        (is_written && u32::from_ne_bytes(*kind) & RSS_KIND_L4 != 0)
            .then(|| u32::from_ne_bytes(*hash))
    }
}

/// `XDP_RSS_L4`, net/xdp.h: the hash covers the ports too, so it tells flows apart.
const RSS_KIND_L4: u32 = 1 << 3;

/// The kernel's function that asks the driver.
#[derive(Clone, Copy, Debug)]
pub(super) struct HashCall {
    /// The BTF id of `bpf_xdp_metadata_rx_hash`.
    pub(super) function: i32,
    /// Says that the hash has been written.
    pub(super) cookie: u32,
}

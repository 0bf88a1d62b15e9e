//! Commands to a device (virtio 1.2, section 5.1.6.5), and remarks on its answers for reports.

use std::fmt;

use forebay_sys::random_key;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_CTRL_MQ, VIRTIO_NET_CTRL_MQ_HASH_CONFIG, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET,
    VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_HASH_REPORT, VIRTIO_NET_F_MQ, VIRTIO_NET_RSS_HASH_TYPE_IPv4,
    VIRTIO_NET_RSS_HASH_TYPE_IPv6, VIRTIO_NET_RSS_HASH_TYPE_TCPv4, VIRTIO_NET_RSS_HASH_TYPE_TCPv6,
    VIRTIO_NET_RSS_HASH_TYPE_UDPv4, VIRTIO_NET_RSS_HASH_TYPE_UDPv6,
};

use super::config::VirtioNetConfig;
use super::control::ANSWER_TIMEOUT;
use super::features::Features;

/// Maximum number of commands in a session: one of each kind.
pub(super) const COMMANDS_MAX: usize = 2;

/// Requested hash types: those of all protocols that the path itself hashes. The path skips
/// extension headers without hashing them, so no `_EX` type is requested.
const HASH_TYPES: u32 = VIRTIO_NET_RSS_HASH_TYPE_IPv4
    | VIRTIO_NET_RSS_HASH_TYPE_TCPv4
    | VIRTIO_NET_RSS_HASH_TYPE_UDPv4
    | VIRTIO_NET_RSS_HASH_TYPE_IPv6
    | VIRTIO_NET_RSS_HASH_TYPE_TCPv6
    | VIRTIO_NET_RSS_HASH_TYPE_UDPv6;

/// Length of a hash key: what the longest input needs, and every device takes (section 5.1.4.1).
const HASH_KEY_BYTES: u8 = 40;

/// Hash key of a device. Random, as in the kernel's drivers (`netdev_rss_key_fill`): a sender who
/// knew the key could choose the CPU.
#[derive(Clone, Copy)]
pub(super) struct HashKey([u8; HASH_KEY_BYTES as usize]);

impl HashKey {
    pub(super) fn drawn() -> Self {
        let drawn = [random_key(), random_key(), random_key()];
        let mut key = [0; HASH_KEY_BYTES as usize];
        key.iter_mut().zip(drawn.as_flattened()).for_each(|(byte, drawn)| *byte = *drawn);
        Self(key)
    }
}

impl fmt::Debug for HashKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HashKey(secret)")
    }
}

/// Command to a device.
#[derive(Clone, Copy, Debug)]
pub(super) enum ControlCommand {
    /// Number of queue pairs to use (section 5.1.6.5.5).
    QueuePairs(u16),
    /// Hash types to compute, and the key (section 5.1.6.5.6.4).
    Hashes { types: u32, key: HashKey },
}

impl ControlCommand {
    /// Name in the specification.
    fn name(self) -> &'static str {
        match self {
            Self::QueuePairs(_) => "VQ_PAIRS_SET",
            Self::Hashes { .. } => "HASH_CONFIG",
        }
    }

    /// Encodes the command: class, command, and its specific data. All words are little-endian.
    pub(super) fn bytes(self) -> Vec<u8> {
        let (command, body) = match self {
            Self::QueuePairs(pairs) => {
                (VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET, pairs.to_le_bytes().to_vec())
            }
            Self::Hashes { types, key: HashKey(key) } => {
                // struct virtio_net_hash_config: `hash_types`, `reserved[4]`, `hash_key_length`,
                // `hash_key_data`.
                let words = [&types.to_le_bytes()[..], &[0; 8], &[HASH_KEY_BYTES]];
                (VIRTIO_NET_CTRL_MQ_HASH_CONFIG, [&words.concat(), &key[..]].concat())
            }
        };
        let header = [VIRTIO_NET_CTRL_MQ, command].map(|word| word.to_le_bytes()[0]);
        [&header, &body[..]].concat()
    }
}

/// Result of a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum CommandAnswer {
    /// Accepted.
    Done,
    /// `VIRTIO_NET_ERR`, or any other value than `VIRTIO_NET_OK`.
    Refused,
    /// No answer within [`ANSWER_TIMEOUT`].
    Silence,
}

/// Facts known to both sides before commands are sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Known {
    pub(super) features: Features,
    pub(super) config: VirtioNetConfig,
    /// Number of queue pairs that the back end supports (`GET_QUEUE_NUM`).
    pub(super) queue_pairs: u64,
}

impl Known {
    /// Returns the number of queue pairs that may be used.
    pub(super) fn queue_pairs_max(self) -> u64 {
        let configured = self.config.queue_pairs_max.filter(|_| self.features.has(VIRTIO_NET_F_MQ));
        configured.map_or(self.queue_pairs, |configured| self.queue_pairs.min(configured.into()))
    }

    /// Returns the index of the control ring. `None` if the back end has none, or its index is
    /// unknown: with `MQ` the index follows from the device's configuration alone, which most back
    /// ends do not provide. They leave commands to the front end, and use the queues that
    /// `SET_VRING_ENABLE` enables.
    pub(super) fn control_ring(self) -> Option<u8> {
        if !self.features.has(VIRTIO_NET_F_CTRL_VQ) {
            return None;
        }
        let has_mq = self.features.has(VIRTIO_NET_F_MQ);
        let pairs = if has_mq { self.config.queue_pairs_max? } else { 1 };
        // The back end has the control ring only if it has all rings before it.
        let has = u64::from(pairs) <= self.queue_pairs;
        // A message names a ring by eight bits (`SET_VRING_KICK`).
        u8::try_from(pairs.checked_mul(2)?).ok().filter(|_| has)
    }
}

/// Commands of a session, and remarks for reports.
#[derive(Debug, Default)]
pub(super) struct Commands {
    /// Commands in the order in which they are sent.
    pub(super) list: Vec<ControlCommand>,
    pub(super) remarks: Remarks,
}

/// Remarks on a session for reports.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Remarks {
    /// Reason why queue pairs are not used as requested.
    pub(super) queues: Option<String>,
    /// Result of requesting the device's hashes, if they were requested.
    pub(super) device_hash: Option<String>,
}

impl Commands {
    /// Returns the commands that set the number of queue pairs, if more than one, and the hashes,
    /// if there is a key.
    pub(super) fn new(known: Known, pairs: usize, key: Option<HashKey>) -> Self {
        let mut commands = Self::default();
        if pairs > 1 {
            let pairs = u16::try_from(pairs).unwrap_or(u16::MAX);
            commands.list.push(ControlCommand::QueuePairs(pairs));
        }
        if let Some(key) = key {
            let remark = match ask_for_hashes(known, key) {
                Ok(command) => {
                    commands.list.push(command);
                    "yes".to_owned()
                }
                Err(why) => why,
            };
            commands.remarks.device_hash = Some(remark);
        }
        commands
    }

    /// Withdraws all commands, and remarks the reason: the back end then uses the queues that are
    /// enabled, as most back ends do.
    pub(super) fn withdraw(&mut self, why: &str) {
        for command in std::mem::take(&mut self.list) {
            self.remark(command, why.to_owned());
        }
    }

    /// Takes the answers to all commands. Returns whether the device may use more than one queue
    /// pair.
    pub(super) fn take_answers(&mut self, answers: &[CommandAnswer]) -> bool {
        let mut uses_all = true;
        for (command, answer) in std::mem::take(&mut self.list).into_iter().zip(answers) {
            let name = command.name();
            match answer {
                CommandAnswer::Done => {}
                // A device uses one pair until it accepts VQ_PAIRS_SET.
                CommandAnswer::Refused => {
                    self.remark(command, format!("the back end refused {name}"));
                    uses_all &= !matches!(command, ControlCommand::QueuePairs(_));
                }
                // The back end does not serve the control queue, and so leaves commands to the
                // front end: see `Known`.
                CommandAnswer::Silence => {
                    let timeout_ms = ANSWER_TIMEOUT.as_millis();
                    self.remark(command, format!("no answer to {name} in {timeout_ms} ms"));
                }
            }
        }
        uses_all
    }

    fn remark(&mut self, command: ControlCommand, why: String) {
        match command {
            ControlCommand::QueuePairs(_) => self.remarks.queues = Some(why),
            ControlCommand::Hashes { .. } => self.remarks.device_hash = Some(format!("no: {why}")),
        }
    }
}

/// Returns the command that requests the hashes that the device can compute, with that key.
///
/// # Errors
/// A remark on why they cannot be requested.
fn ask_for_hashes(known: Known, key: HashKey) -> Result<ControlCommand, String> {
    if !known.features.has(VIRTIO_NET_F_HASH_REPORT) {
        return Err("no: the back end does not offer HASH_REPORT".to_owned());
    }
    // HASH_CONFIG is sent over the control queue alone.
    if known.control_ring().is_none() {
        return Err("as the back end has it: it takes no commands".to_owned());
    }
    let VirtioNetConfig { hash_types, hash_key_max_bytes, .. } = known.config;
    let types = hash_types & HASH_TYPES;
    if types == 0 {
        return Err(format!("no: of the hashes {hash_types:#x} of the back end none is of use"));
    }
    // The input of IPv6 addresses and ports has 36 bytes, which take a key of 40.
    if hash_key_max_bytes < HASH_KEY_BYTES {
        return Err(format!(
            "no: the back end takes keys of {hash_key_max_bytes} bytes, not of {HASH_KEY_BYTES}"
        ));
    }
    Ok(ControlCommand::Hashes { types, key })
}

#[cfg(test)]
mod tests {
    use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;

    use super::*;
    use crate::virtio::features::RequestedFeatures;

    fn known(offered: &[u32], queue_pairs_max: Option<u16>, queue_pairs: u64) -> Known {
        let bits = offered.iter().fold(1 << VIRTIO_F_VERSION_1, |bits, bit| bits | 1_u64 << bit);
        let requested = RequestedFeatures { device_hash: true, ..RequestedFeatures::default() };
        let features = Features::negotiate(bits, requested).unwrap();
        let config = VirtioNetConfig {
            queue_pairs_max,
            mtu: None,
            hash_key_max_bytes: HASH_KEY_BYTES,
            hash_types: u32::MAX,
        };
        Known { features, config, queue_pairs }
    }

    #[test]
    fn net_3_control_queue_index_follows_device_pairs() {
        let mq = [VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_MQ];
        for (offered, configured, has, most, ring) in [
            (&mq[..], Some(4), 4, 4, Some(8)),
            (&mq, Some(4), 128, 4, Some(8)),
            (&mq, Some(127), 128, 127, Some(254)),
            // Ring 256 exceeds the eight bits of a message.
            (&mq, Some(128), 128, 128, None),
            (&mq, Some(0x8000), u64::MAX, 0x8000, None),
            // The back end has fewer rings than its configuration says.
            (&mq, Some(4), 2, 2, None),
            // As DPDK: no configuration can be read.
            (&mq, None, 128, 128, None),
            (&mq[..1], Some(4), 1, 1, Some(2)),
            (&mq[..1], None, 1, 1, Some(2)),
            (&[], Some(4), 1, 1, None),
        ] {
            let known = known(offered, configured, has);
            assert_eq!((known.queue_pairs_max(), known.control_ring()), (most, ring), "{known:?}");
        }
    }

    #[test]
    fn rps_5_hashes_requested_where_possible() {
        let key = HashKey::drawn();
        let of = |known| Commands::new(known, 1, Some(key));
        let hashes = [VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_HASH_REPORT];
        let can = known(&hashes, None, 1);
        assert!(matches!(of(can).list[..], [ControlCommand::Hashes { types: HASH_TYPES, .. }]));
        let short = VirtioNetConfig { hash_key_max_bytes: 39, ..can.config };
        let other = VirtioNetConfig { hash_types: 0x1c0, ..can.config };
        for (cannot, why) in [
            (known(&hashes[..1], None, 1), "no: the back end does not offer HASH_REPORT"),
            (known(&hashes, None, 0), "as the back end has it: it takes no commands"),
            (Known { config: short, ..can }, "no: the back end takes keys of 39 bytes, not of 40"),
            (
                Known { config: other, ..can },
                "no: of the hashes 0x1c0 of the back end none is of use",
            ),
        ] {
            let commands = of(cannot);
            assert_eq!(commands.remarks.device_hash.as_deref(), Some(why));
            assert!(commands.list.is_empty());
        }
        let unasked = Commands::new(can, 1, None);
        assert!(unasked.list.is_empty() && unasked.remarks == Remarks::default());
    }

    #[test]
    fn keys_are_not_revealed() {
        let key = HashKey::drawn();
        assert_eq!(format!("{key:?}"), "HashKey(secret)");
        assert!(key.0 != HashKey::drawn().0 && key.0[32..] != [0; 8], "all of it is drawn");
    }
}

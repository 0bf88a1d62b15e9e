//! Commands that a device is given (virtio 1.2, section 5.1.6.5), and what there is to be told of its
//! answers.

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

/// The most commands of a session: one of each.
pub(super) const COMMANDS_MAX: usize = 2;

/// The hashes that are asked for: of all that the path itself hashes. Extension headers are passed over
/// there, never hashed, so there are none of `_EX`.
const HASH_TYPES: u32 = VIRTIO_NET_RSS_HASH_TYPE_IPv4
    | VIRTIO_NET_RSS_HASH_TYPE_TCPv4
    | VIRTIO_NET_RSS_HASH_TYPE_UDPv4
    | VIRTIO_NET_RSS_HASH_TYPE_IPv6
    | VIRTIO_NET_RSS_HASH_TYPE_TCPv6
    | VIRTIO_NET_RSS_HASH_TYPE_UDPv6;

/// Bytes of a key that the longest input takes, and that every device takes (section 5.1.4.1).
const HASH_KEY_BYTES: u8 = 40;

/// The key that a device is to hash with. Drawn, as the kernel's drivers do (`netdev_rss_key_fill`):
/// who knew it could aim at a CPU.
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

/// Commands.
#[derive(Clone, Copy, Debug)]
pub(super) enum ControlCommand {
    /// Number of queue pairs that are used (section 5.1.6.5.5).
    QueuePairs(u16),
    /// Header fields that are hashed, and the key (section 5.1.6.5.6.4).
    Hashes { types: u32, key: HashKey },
}

impl ControlCommand {
    /// As the specification names it.
    fn name(self) -> &'static str {
        match self {
            Self::QueuePairs(_) => "VQ_PAIRS_SET",
            Self::Hashes { .. } => "HASH_CONFIG",
        }
    }

    /// The class, the command, and what is specific to it. All words are little-endian.
    pub(super) fn bytes(self) -> Vec<u8> {
        let (command, body) = match self {
            Self::QueuePairs(pairs) => {
                (VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET, pairs.to_le_bytes().to_vec())
            }
            Self::Hashes { types, key: HashKey(key) } => {
                // struct virtio_net_hash_config: `hash_types`, `reserved[4]`, `hash_key_length`.
                let words = [&types.to_le_bytes()[..], &[0; 8], &[HASH_KEY_BYTES]];
                (VIRTIO_NET_CTRL_MQ_HASH_CONFIG, [&words.concat(), &key[..]].concat())
            }
        };
        let header = [VIRTIO_NET_CTRL_MQ, command].map(|word| word.to_le_bytes()[0]);
        [&header, &body[..]].concat()
    }
}

/// Outcome of a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum CommandAnswer {
    /// Accepted.
    Done,
    /// The device did not do it: `VIRTIO_NET_ERR`, or anything but `VIRTIO_NET_OK`.
    Refused,
    /// Nothing, in [`ANSWER_TIMEOUT`].
    Silence,
}

/// State that both sides know when commands are given.
#[derive(Clone, Copy, Debug)]
pub(super) struct Known {
    pub(super) features: Features,
    pub(super) config: VirtioNetConfig,
    /// Configuration of the back end.
    pub(super) queue_pairs: u64,
}

impl Known {
    /// The queue pairs that may be used.
    pub(super) fn queue_pairs_max(self) -> u64 {
        let configured = self.config.queue_pairs_max.filter(|_| self.features.has(VIRTIO_NET_F_MQ));
        configured.map_or(self.queue_pairs, |configured| self.queue_pairs.min(configured.into()))
    }

    /// Ring that takes commands. None: the back end has none, or nobody knows which it is. That
    /// stands in the device's configuration alone, and most back ends have none that can be read: they
    /// leave commands to the front end, and go by its `SET_VRING_ENABLE`.
    pub(super) fn control_ring(self) -> Option<u8> {
        if !self.features.has(VIRTIO_NET_F_CTRL_VQ) {
            return None;
        }
        let has_mq = self.features.has(VIRTIO_NET_F_MQ);
        let pairs = if has_mq { self.config.queue_pairs_max? } else { 1 };
        // The back end has it only if it has all that are before it.
        let has = u64::from(pairs) <= self.queue_pairs;
        // A message names a ring by eight bits (`SET_VRING_KICK`).
        u8::try_from(pairs.checked_mul(2)?).ok().filter(|_| has)
    }
}

/// The commands of a session, and what there is to be told of them.
#[derive(Debug, Default)]
pub(super) struct Commands {
    /// In the order in which they are given.
    pub(super) list: Vec<ControlCommand>,
    pub(super) remarks: Remarks,
}

/// Facts of a back end that is set up.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Remarks {
    /// Of its queue pairs, if they are not used as they should be.
    pub(super) queues: Option<String>,
    /// Answer to the question whether it hashes, if that was asked for.
    pub(super) device_hash: Option<String>,
}

impl Commands {
    /// Commands for so many queue pairs, if there are more than one, and for hashes under
    /// that key, if there is one.
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

    /// Notes that commands cannot be given, and `why`: then the back end goes by what is enabled, as
    /// most do.
    pub(super) fn withdraw(&mut self, why: &str) {
        for command in std::mem::take(&mut self.list) {
            self.remark(command, why.to_owned());
        }
    }

    /// Takes the answers to all of them. Returns whether the device may use more than one queue pair.
    pub(super) fn take_answers(&mut self, answers: &[CommandAnswer]) -> bool {
        let mut uses_all = true;
        for (command, answer) in std::mem::take(&mut self.list).into_iter().zip(answers) {
            let name = command.name();
            match answer {
                CommandAnswer::Done => {}
                // One pair is what it has used from the beginning.
                CommandAnswer::Refused => {
                    self.remark(command, format!("the back end refused {name}"));
                    uses_all &= !matches!(command, ControlCommand::QueuePairs(_));
                }
                // Nobody serves the queue, so commands are left to the front end: see `Known`.
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

/// Asks for the hashes that the device can compute, under that key.
///
/// # Errors
/// Why it cannot be asked, and what that comes to.
fn ask_for_hashes(known: Known, key: HashKey) -> Result<ControlCommand, String> {
    if !known.features.has(VIRTIO_NET_F_HASH_REPORT) {
        return Err("no: the back end does not offer HASH_REPORT".to_owned());
    }
    if known.control_ring().is_none() {
        return Err("as the back end has it: it takes no commands".to_owned());
    }
    let VirtioNetConfig { hash_types, hash_key_max_bytes, .. } = known.config;
    let types = hash_types & HASH_TYPES;
    if types == 0 {
        return Err(format!("no: of the hashes {hash_types:#x} of the back end none is of use"));
    }
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
    use crate::virtio::features::OfferedFeatures;

    fn known(offered: &[u32], queue_pairs_max: Option<u16>, queue_pairs: u64) -> Known {
        let bits = offered.iter().fold(1 << VIRTIO_F_VERSION_1, |bits, bit| bits | 1_u64 << bit);
        let desired_cpus = OfferedFeatures { device_hash: true, ..OfferedFeatures::default() };
        let features = Features::negotiate(bits, desired_cpus).unwrap();
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
            // No message can name ring 256.
            (&mq, Some(128), 128, 128, None),
            (&mq, Some(0x8000), u64::MAX, 0x8000, None),
            // The back end has fewer than its configuration says.
            (&mq, Some(4), 2, 2, None),
            // As DPDK's: nobody says.
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

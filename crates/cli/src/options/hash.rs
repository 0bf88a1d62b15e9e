//! Options of the hash.

use clap::{Args, ValueEnum};
use forebay_rx::flow_key::FlowKeyRules;
use forebay_rx::hash::toeplitz::{STANDARD_KEY, SYMMETRIC_KEY};
use forebay_rx::hash::{Hasher, RETA_ENTRIES};

use crate::failure::Failure;

/// A hash and its key.
#[derive(Debug, Args)]
pub(crate) struct HashOptions {
    /// How flows are hashed
    #[arg(long, value_enum, default_value_t)]
    pub(crate) hash: HashKind,

    /// The hash's key, in hexadecimal [default: drawn for keyed, the standard one for toeplitz]
    #[arg(long, value_name = "HEX")]
    pub(crate) hash_key: Option<String>,

    /// Key of a flow: auto looks behind the headers that the kernel does, inner behind all
    /// tunnels, outer behind none; with ,quic:PORTS:LEN (or that alone) QUIC goes by connection ID
    /// [default: auto]
    #[arg(long, value_name = "RULES")]
    pub(crate) flow_key: Option<FlowKeyRules>,
}

/// Hash function of flows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum)]
pub(crate) enum HashKind {
    /// SipHash under a secret key: no stranger can aim at one CPU
    #[default]
    Keyed,
    /// SipHash under a secret key, both directions of a flow alike
    KeyedSymmetric,
    /// As network cards do it
    Toeplitz,
    /// As network cards do it under the key 6d5a…, both directions of a flow alike
    ToeplitzSymmetric,
    /// As the live device has hashed a packet, where it has; else keyed
    Device,
}

/// Refuses more queues than an indirection table deals packets to.
pub(crate) fn check_queues(queues: usize) -> Result<(), Failure> {
    if queues <= usize::from(RETA_ENTRIES) {
        return Ok(());
    }
    let problem = format!("--queues {queues}: there is no way to deal frames to all");
    let help = format!("give at most {RETA_ENTRIES}: an indirection table has as many entries");
    Err(Failure::usage(problem, help))
}

impl HashOptions {
    /// The hasher. `drawn` draws the key of the keyed hash if none is given.
    pub(crate) fn hasher(&self, drawn: impl FnOnce() -> [u8; 16]) -> Result<Hasher, Failure> {
        self.function(drawn).map(|hasher| hasher.with_rules(self.flow_key.unwrap_or_default()))
    }

    fn function(&self, drawn: impl FnOnce() -> [u8; 16]) -> Result<Hasher, Failure> {
        let given = self.hash_key.as_deref().map(|text| {
            let help = "give pairs of hexadecimal digits";
            let refused = |error| Failure::usage(format!("--hash-key {text}: {error}"), help);
            hex::decode(text).map_err(refused)
        });
        let given = given.transpose()?;
        match self.hash {
            HashKind::Keyed | HashKind::KeyedSymmetric | HashKind::Device => {
                let key = match given {
                    Some(key) => key.try_into().map_err(|key: Vec<u8>| {
                        let problem = format!("--hash-key of {} bytes", key.len());
                        Failure::usage(problem, "a key for the keyed hash has 16 bytes")
                    })?,
                    None => drawn(),
                };
                Ok(Hasher::keyed(&key, self.hash == HashKind::KeyedSymmetric))
            }
            HashKind::Toeplitz | HashKind::ToeplitzSymmetric => {
                let symmetric = self.hash == HashKind::ToeplitzSymmetric;
                let default = if symmetric { SYMMETRIC_KEY } else { STANDARD_KEY };
                let key = given.unwrap_or_else(|| default.to_vec());
                Hasher::toeplitz(&key).map_err(|error| {
                    let help = "a key for the Toeplitz hash has at least 40 bytes";
                    Failure::usage(format!("--hash-key: {error}"), help)
                })
            }
        }
    }
}

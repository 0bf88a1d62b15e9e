//! Which socket a datagram is for.

use std::net::{IpAddr, SocketAddr};

use super::SocketId;
use crate::cpu::CpuId;
use crate::hash::FlowHash;
use crate::packet::Packet;

/// How a socket shares its address.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Reuse {
    /// With nobody.
    #[default]
    None,
    /// Each flow goes to one of the group, by its hash.
    Hash,
    /// To the one of this CPU.
    ThisCpu,
}

/// A bound socket.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Binding {
    /// Which.
    pub id: SocketId,
    /// Its address.
    pub local: SocketAddr,
    /// Whom it is connected to.
    pub remote: Option<SocketAddr>,
    /// Whether an IPv6 socket leaves IPv4 alone.
    pub is_v6_only: bool,
    /// How it shares its address.
    pub reuse: Reuse,
    /// The CPU whose datagrams it gets of its group.
    pub cpu: Option<CpuId>,
    /// Groups that it has joined.
    pub groups: Vec<IpAddr>,
}

impl Binding {
    /// One that is not connected and shares nothing.
    #[must_use]
    pub fn new(id: SocketId, local: SocketAddr) -> Self {
        Self {
            id,
            local,
            remote: None,
            is_v6_only: false,
            reuse: Reuse::None,
            cpu: None,
            groups: Vec::new(),
        }
    }
}

/// What is asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Wanted {
    /// Who sent it.
    pub source: SocketAddr,
    /// Whom to.
    pub destination: SocketAddr,
    /// The flow's hash.
    pub hash: FlowHash,
    /// Where it is delivered.
    pub cpu: CpuId,
}

impl Wanted {
    /// What a datagram asks for.
    #[must_use]
    pub fn of(packet: &Packet, cpu: CpuId) -> Option<Self> {
        let view = packet.view();
        let (from, to) = view.ports()?;
        Some(Self {
            source: SocketAddr::new(view.source()?, from),
            destination: SocketAddr::new(view.destination()?, to),
            hash: packet.hash,
            cpu,
        })
    }
}

/// What was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Found {
    /// Nobody.
    None,
    /// This one.
    One(SocketId),
}

/// All sockets.
#[derive(Clone, Debug, Default)]
pub struct SocketTable {
    bindings: Vec<Binding>,
}

impl SocketTable {
    /// Of these.
    #[must_use]
    pub fn new(bindings: Vec<Binding>, _seed: u64) -> Self {
        Self { bindings }
    }

    /// The socket that a datagram is for.
    #[must_use]
    pub fn find(&self, wanted: &Wanted) -> Found {
        let matches = |binding: &&Binding| {
            binding.local.port() == wanted.destination.port()
                && (binding.local.ip().is_unspecified()
                    || binding.local.ip() == wanted.destination.ip())
                && binding.remote.is_none_or(|remote| remote == wanted.source)
        };
        let score = |binding: &&Binding| {
            (
                binding.remote.is_some(),
                !binding.local.ip().is_unspecified(),
                binding.cpu == Some(wanted.cpu),
            )
        };
        let best = self.bindings.iter().filter(matches).max_by_key(score);
        best.map_or(Found::None, |binding| Found::One(binding.id))
    }

    /// All that a datagram to a group is for.
    pub fn find_all(&self, wanted: &Wanted, out: &mut Vec<SocketId>) {
        let port = wanted.destination.port();
        out.extend(self.bindings.iter().filter(|b| b.local.port() == port).map(|b| b.id));
    }

    /// Who has the address.
    #[must_use]
    pub fn conflict(&self, new: &Binding) -> Option<SocketId> {
        let same = |b: &&Binding| {
            b.local == new.local && (b.reuse == Reuse::None || new.reuse == Reuse::None)
        };
        self.bindings.iter().find(same).map(|b| b.id)
    }
}

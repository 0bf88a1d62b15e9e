//! Reassembly of fragments delivered to CPUs: a network layer for each, and the fragments they
//! share.

use std::net::IpAddr;
use std::sync::Arc;

use forebay_buf::Region;
use forebay_buf::pool::{ChunkClass, Pool, carve, region_bytes};
use forebay_rx::{CpuId, Packet};
use forebay_stack::network::reassembly::{Fragments, FragmentsConfig};
use forebay_stack::network::{Identity, NetworkConfig, NetworkLayer, NetworkVerdict, Prefix};

use super::application::read;
use crate::laws::{Law, Laws};

/// Frames for each CPU, enough for fragments of datagrams that are never completed.
const POOL_FRAMES: u32 = 4_096;

/// Chunk size for a datagram's headers and both fragments.
const CHUNK_BYTES: u32 = 512;

/// Addresses of the host that all frames are for.
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const ADDRESS: [u8; 4] = [11, 9, 0, 1];

/// A network layer for each CPU. Network layers get copies, so the accounting of the frames is not
/// affected.
pub(super) struct SimReassembly {
    cpus: Vec<(NetworkLayer, Pool)>,
    identity: Identity,
}

impl SimReassembly {
    pub(super) fn new(cpus: u16) -> Self {
        let fragments = Arc::new(Fragments::shared(FragmentsConfig::default(), cpus.into()));
        let network = |pool| {
            let config = NetworkConfig::default();
            (NetworkLayer::with_fragments(Arc::clone(&fragments), config, Arc::default()), pool)
        };
        let address = Prefix { address: IpAddr::from(ADDRESS), bits: 8 };
        Self {
            cpus: pools(cpus).into_iter().map(network).collect(),
            identity: Identity { mac: Some(MAC), addresses: vec![address], ..Identity::default() },
        }
    }

    /// Processes a packet delivered on a CPU.
    pub(super) fn take(&mut self, cpu: CpuId, packet: &Packet, now_ns: u64, laws: &mut Laws) {
        let (network, pool) = &mut self.cpus[cpu.index()];
        let Some(copy) = packet.copied(pool) else {
            return laws.broke(Law::Conservation, || format!("no memory for {packet:?}"));
        };
        match network.receive(copy, &self.identity, now_ns, pool) {
            NetworkVerdict::Kept => {}
            NetworkVerdict::Datagram(datagram) => {
                let first = datagram.view().payload().first_chunk().and_then(read);
                let second = datagram.frame.data().last_chunk().and_then(read);
                laws.became_whole([first, second]);
                pool.put(datagram.frame);
            }
            other => laws.broke(Law::Conservation, || format!("{packet:?} became {other:?}")),
        }
    }

    /// Checks the laws that hold at the end of a run.
    pub(super) fn check_rest(&mut self, laws: &mut Laws) {
        laws.check_whole();
        self.cpus.iter_mut().for_each(|(network, _)| network.end());
        self.cpus.iter_mut().for_each(|(_, pool)| pool.flush());
        let away = self.cpus.iter_mut().map(|(_, pool)| pool.in_use() as u64).sum();
        laws.agree(Law::Conservation, "frames of fragments not home at the end", away, 0);
    }
}

fn pools(cpus: u16) -> Vec<Pool> {
    let class = ChunkClass { chunk_bytes: CHUNK_BYTES, chunks: POOL_FRAMES };
    let shares: Vec<_> = (0..cpus).map(|_| vec![class]).collect();
    let region = Region::allocate(region_bytes(&shares));
    carve(region, &shares).expect("the region is as large as asked for")
}

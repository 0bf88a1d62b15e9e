//! Service threads: one per CPU, which does all work for its queries.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use forebay::net::{Datagrams, Net, Stack, UdpSocket};
use forebay::{CpuId, CpuThread};

use crate::answer::{PAYLOAD_MAX_BYTES, answer};
use crate::prepared::Zone;

/// Queries read at once.
const BATCH_MAX: usize = 64;

/// Work of one thread.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Served {
    pub(crate) queries: u64,
    pub(crate) answers: u64,
    pub(crate) batches: u64,
}

/// A zone with the sockets that serve it.
pub(crate) struct Server {
    zone: Arc<Zone>,
    /// One socket per CPU, for the datagrams delivered on that CPU.
    sockets: Vec<(CpuId, UdpSocket)>,
    served: Mutex<Vec<(CpuId, Served)>>,
}

impl Server {
    /// Binds a socket per CPU.
    pub(crate) fn bind(
        zone: Arc<Zone>,
        net: &Net,
        cpus: &[CpuId],
        listen: SocketAddr,
    ) -> io::Result<Self> {
        let bind = |&cpu: &CpuId| Ok((cpu, net.socket().reuse_port_on(cpu).bind(listen)?));
        let sockets = cpus.iter().map(bind).collect::<io::Result<_>>()?;
        Ok(Self { zone, sockets, served: Mutex::default() })
    }

    /// Answers the queries delivered on one CPU, until the run ends.
    pub(crate) fn serve(&self, cpu: &mut CpuThread<Stack>) {
        let here = cpu.cpu();
        let Some((_, socket)) = self.sockets.iter().find(|(cpu, _)| *cpu == here) else { return };
        let (mut batch, mut room) = (Datagrams::new(), [0; PAYLOAD_MAX_BYTES as usize]);
        let mut served = Served::default();
        while socket.recv_batch_on(cpu, &mut batch, BATCH_MAX) > 0 {
            served.batches += 1;
            for query in &mut batch {
                served.queries += 1;
                let Some(len) = answer(&self.zone, query.payload(), &mut room) else { continue };
                // Never fails: a frame has room for the largest answer.
                served.answers += u64::from(query.reply(&room[..len]).is_ok());
            }
            if let Err(error) = socket.send_replies(&mut batch) {
                eprintln!("CPU {here}: {error}");
                break;
            }
        }
        self.served.lock().unwrap_or_else(PoisonError::into_inner).push((here, served));
    }

    /// Work of each thread, and the number of queries that its socket had no room for.
    pub(crate) fn served(&self) -> Vec<(CpuId, Served, u64)> {
        let mut served = self.served.lock().unwrap_or_else(PoisonError::into_inner).clone();
        served.sort_by_key(|(cpu, _)| *cpu);
        let full = |cpu: CpuId| self.sockets.iter().find(|(of, _)| *of == cpu);
        let full = |cpu| full(cpu).map_or(0, |(_, socket)| socket.counts().rcvbuf_errors);
        served.into_iter().map(|(cpu, served)| (cpu, served, full(cpu))).collect()
    }
}

//! Reads on the thread of an engine CPU, which turns that CPU while there is nothing to read.
//!
//! Datagrams that a turn has delivered count as processed from the next turn on (the drain rule). Their flows may then move to
//! CPUs that have sockets of their own. So a read returns all of them before it turns the CPU again, and waits until the
//! answers are sent.

use std::thread;

use forebay_engine::CpuThread;
use forebay_rx::Handler;

use super::datagram::Datagrams;
use super::udp::UdpSocket;

impl UdpSocket {
    /// Receives in place on the thread of an engine CPU, which polls and delivers packets itself
    /// while nothing is queued: no other thread is woken. Returns 0 once the engine has ended, or at once if `max` is 0.
    ///
    /// **Order.** A call that turns the CPU releases the datagrams of the calls before: their flows may move to other CPUs.
    /// Answers stay in order, even if each CPU has a socket of its own
    /// ([`reuse_port_on`](super::SocketOptions::reuse_port_on)), if this thread alone reads and answers the socket, and
    /// answers everything before it calls again. Threads that share a socket may turn their CPUs rarely while others fill it.
    /// A thread that stops calling keeps its last flows on its CPU, and holds up changes that wait for all CPUs, such as
    /// another hash key.
    pub fn recv_batch_on<H: Handler>(
        &self,
        cpu: &mut CpuThread<H>,
        batch: &mut Datagrams,
        max: usize,
    ) -> usize {
        batch.clear();
        if max == 0 {
            return 0;
        }
        let Self(endpoint) = self;
        endpoint.wake.add_inline(cpu.cpu(), || cpu.waker());
        let shared = &endpoint.shared;
        let by = shared.transmitter_index();
        let gathered = shared.transmitter_of(by).mark();
        loop {
            let count = self.take_of_turn(cpu.turns(), batch, max);
            if count > 0 {
                return count;
            }
            let has_answered = || shared.transmitter_of(by).has_sent(gathered);
            let is_ready = || endpoint.has_datagram_else_arm();
            if !cpu.turn_until_answered(is_ready, has_answered) {
                return self.take_last(batch, max);
            }
        }
    }

    /// Takes datagrams that were queued before the end of this turn of the CPU.
    fn take_of_turn(&self, turn: u64, batch: &mut Datagrams, max: usize) -> usize {
        loop {
            let (count, has_more) = self.0.try_take(|reader| {
                reader.mark_turn(turn);
                let count = match reader.has_of_turn() {
                    true => self.0.take_batch(reader, batch, max).unwrap_or(0),
                    false => 0,
                };
                (count, reader.has_of_turn())
            });
            if count > 0 || !has_more {
                return count;
            }
            thread::yield_now(); // the datagram is in the queue, but not visible yet
        }
    }

    /// Takes what is queued, once no more will arrive.
    fn take_last(&self, batch: &mut Datagrams, max: usize) -> usize {
        loop {
            let count = self.try_take(batch, max);
            if count > 0 || !self.0.has_datagram_else_arm() {
                return count;
            }
            thread::yield_now(); // as above
        }
    }
}

// Time a packet buffer takes that is allocated on one CPU, passed through an rte_ring and freed on
// the other, 32 at once. Both CPUs have rte_mempool's cache of 256.
#include "dpdk.h"
#include <rte_launch.h>
#include <rte_ring.h>

enum { BULK = 32, CAPACITY = 1024, BUFFERS = 8191, PASSED = 2000000 / BULK * BULK };

static struct rte_mempool *pool;
static struct rte_ring *ring;
static uint64_t opened, closed;

static int consumer(void *unused)
{
	struct rte_mbuf *batch[BULK];
	for (uint64_t round = 1;; round++) {
		while (__atomic_load_n(&opened, __ATOMIC_ACQUIRE) < round) answer_probe();
		for (uint64_t got = 0; got < PASSED;) {
			unsigned count = rte_ring_sc_dequeue_burst(ring, (void **)batch, BULK, NULL);
			if (count) rte_pktmbuf_free_bulk(batch, count);
			got += count;
		}
		__atomic_store_n(&closed, round, __ATOMIC_RELEASE);
	}
	return unused != NULL;
}

static double sample(void)
{
	static uint64_t round;
	struct rte_mbuf *batch[BULK];
	double began = now_ns();
	__atomic_store_n(&opened, ++round, __ATOMIC_RELEASE);
	for (uint64_t sent = 0; sent < PASSED; sent += BULK) {
		while (rte_pktmbuf_alloc_bulk(pool, batch, BULK)) ;
		while (!rte_ring_sp_enqueue_bulk(ring, (void **)batch, BULK, NULL)) ;
	}
	while (__atomic_load_n(&closed, __ATOMIC_ACQUIRE) < round) ;
	return (now_ns() - began) / PASSED;
}

int main(int argc, char **argv)
{
	char lcores[32];
	read_options(argc, argv);
	snprintf(lcores, sizeof lcores, "%d,%d", options.cpus[0], options.cpus[1]);
	start_eal(lcores);
	pool = rte_pktmbuf_pool_create("packets", BUFFERS, 256, 0, RTE_MBUF_DEFAULT_BUF_SIZE, SOCKET_ID_ANY);
	ring = rte_ring_create("passed", CAPACITY, SOCKET_ID_ANY, RING_F_SP_ENQ | RING_F_SC_DEQ);
	if (!pool || !ring) fail("rte_pktmbuf_pool_create or rte_ring_create");
	if (rte_eal_remote_launch(consumer, NULL, options.cpus[1])) fail("rte_eal_remote_launch");
	repeat_pair(sample, options.flows, options.window_ms * 1e6);
	fflush(stdout);
	_exit(0);
}

// Time an object takes through an rte_ring with one producer and one consumer, each on a CPU of its
// own, 32 at once, from the first enqueue to the last dequeue.
#include "dpdk.h"
#include <rte_launch.h>
#include <rte_ring.h>

enum { BULK = 32, CAPACITY = 1024, OBJECTS = 4000000 };

static struct rte_ring *objects;
static uint64_t opened, closed, sum;

static int consumer(void *unused)
{
	void *batch[BULK];
	for (uint64_t round = 1;; round++) {
		while (__atomic_load_n(&opened, __ATOMIC_ACQUIRE) < round) answer_probe();
		uint64_t got = 0, all = 0;
		while (got < OBJECTS) {
			unsigned count = rte_ring_sc_dequeue_burst(objects, batch, BULK, NULL);
			for (unsigned i = 0; i < count; i++) all += (uintptr_t)batch[i];
			got += count;
		}
		sum = all;
		__atomic_store_n(&closed, round, __ATOMIC_RELEASE);
	}
	return unused != NULL;
}

static double sample(void)
{
	static uint64_t round;
	void *batch[BULK];
	double began = now_ns();
	__atomic_store_n(&opened, ++round, __ATOMIC_RELEASE);
	for (uint64_t next = 1; next <= OBJECTS;) {
		for (int i = 0; i < BULK; i++) batch[i] = (void *)(uintptr_t)next++;
		while (!rte_ring_sp_enqueue_bulk(objects, batch, BULK, NULL)) ;
	}
	while (__atomic_load_n(&closed, __ATOMIC_ACQUIRE) < round) ;
	if (sum != OBJECTS * (OBJECTS + 1ull) / 2) {
		fputs("objects were lost\n", stderr);
		_exit(1);
	}
	return (now_ns() - began) / OBJECTS;
}

int main(int argc, char **argv)
{
	char lcores[32];
	read_options(argc, argv);
	snprintf(lcores, sizeof lcores, "%d,%d", options.cpus[0], options.cpus[1]);
	start_eal(lcores);
	objects = rte_ring_create("objects", CAPACITY, SOCKET_ID_ANY, RING_F_SP_ENQ | RING_F_SC_DEQ);
	if (!objects) fail("rte_ring_create");
	if (rte_eal_remote_launch(consumer, NULL, options.cpus[1])) fail("rte_eal_remote_launch");
	repeat_pair(sample, options.flows, options.window_ms * 1e6);
	fflush(stdout);
	_exit(0);
}

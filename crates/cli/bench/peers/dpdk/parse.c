// Time rte_net_get_ptype takes for the headers of a frame of 60 bytes (Ethernet, IPv4, UDP), as it
// is called by drivers whose device does not tell them. Its result is kept in the buffer.
#include "dpdk.h"
#include <rte_net.h>

// Few, since a buffer is larger than our frames of the same benchmark: all stay in the second-level cache.
enum { BUFFERS = 256, FRAME_BYTES = 60, LAYERS = RTE_PTYPE_L2_MASK | RTE_PTYPE_L3_MASK | RTE_PTYPE_L4_MASK };

static const uint8_t headers[42] = {
	2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0,
	0x45, 0, 0, 46, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2,
	0, 0, 0, 53, 0, 26, 1, 1,
};
static struct rte_mbuf *packets[BUFFERS];

static double sample(void)
{
	double began = now_ns(), took;
	uint64_t parsed = 0;
	do {
		for (int round = 0; round < 128; round++)
			for (int i = 0; i < BUFFERS; i++) {
				struct rte_net_hdr_lens lens;
				struct rte_mbuf *packet = packets[i];
				packet->packet_type = rte_net_get_ptype(packet, &lens, LAYERS);
				packet->l2_len = lens.l2_len;
				packet->l3_len = lens.l3_len;
				packet->l4_len = lens.l4_len;
			}
		parsed += 128 * BUFFERS;
		took = now_ns() - began;
	} while (took < 10e6);
	return took / parsed;
}

int main(int argc, char **argv)
{
	char lcore[16];
	read_options(argc, argv);
	snprintf(lcore, sizeof lcore, "%d", options.cpus[0]);
	start_eal(lcore);
	struct rte_mempool *pool = rte_pktmbuf_pool_create("packets", BUFFERS, 0, 0, RTE_MBUF_DEFAULT_BUF_SIZE, SOCKET_ID_ANY);
	if (!pool || rte_pktmbuf_alloc_bulk(pool, packets, BUFFERS)) fail("rte_pktmbuf_pool_create");
	for (int i = 0; i < BUFFERS; i++) {
		uint8_t *bytes = (uint8_t *)rte_pktmbuf_append(packets[i], FRAME_BYTES);
		memset(bytes, 0, FRAME_BYTES);
		memcpy(bytes, headers, sizeof headers);
		bytes[35] = i % 100;
	}
	uint32_t expected = RTE_PTYPE_L2_ETHER | RTE_PTYPE_L3_IPV4 | RTE_PTYPE_L4_UDP;
	struct solo result = repeat_solo(sample, options.flows, options.window_ms * 1e6);
	if (packets[0]->packet_type != expected || packets[0]->l4_len != 8) {
		fputs("rte_net_get_ptype did not find the headers\n", stderr);
		_exit(1);
	}
	print_solo(result);
	putchar('\n');
	fflush(stdout);
	_exit(0);
}

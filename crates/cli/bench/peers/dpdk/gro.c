// Time a frame takes through rte_gro in bursts of 64 from a capture (mode: its path): merging alone;
// with what rte_gro wants parsed; and from allocation and copy to the return of the buffer.
#include "dpdk.h"
#include <rte_ether.h>
#include <rte_gro.h>
#include <rte_tcp.h>

enum { BURST = 64, FRAMES_MAX = 8192, GRO, PARSE_GRO, ALL };

static struct { uint8_t *bytes; uint32_t len; } frames[FRAMES_MAX];
static struct rte_gro_param gro = {.gro_types = RTE_GRO_TCP_IPV4, .max_flow_num = BURST, .max_item_per_flow = BURST};
static struct rte_mempool *pool;
static int frame_count, region;
static uint64_t frames_in, packets_out;

static void load(const char *path)
{
	FILE *file = fopen(path, "rb");
	uint32_t header[4];
	if (!file || fseek(file, 24, SEEK_SET)) fail(path);
	while (frame_count < FRAMES_MAX && fread(header, sizeof header, 1, file) == 1) {
		uint8_t *bytes = malloc(header[2]);
		if (fread(bytes, header[2], 1, file) != 1) fail(path);
		frames[frame_count].bytes = bytes;
		frames[frame_count++].len = header[2];
	}
}

static inline void fill(struct rte_mbuf *packet, int number)
{
	memcpy(rte_pktmbuf_mtod(packet, uint8_t *), frames[number].bytes, frames[number].len);
	packet->data_len = packet->pkt_len = frames[number].len;
}

static inline void parse(struct rte_mbuf *packet)
{
	const uint8_t *ip = rte_pktmbuf_mtod(packet, const uint8_t *) + RTE_ETHER_HDR_LEN;
	packet->l2_len = RTE_ETHER_HDR_LEN;
	packet->l3_len = (ip[0] & 15) * 4;
	packet->l4_len = (ip[packet->l3_len + 12] >> 4) * 4;
	packet->packet_type = RTE_PTYPE_L2_ETHER | RTE_PTYPE_L3_IPV4 | (ip[9] == IPPROTO_TCP ? RTE_PTYPE_L4_TCP : RTE_PTYPE_L4_UDP);
}

static double burst(int first)
{
	struct rte_mbuf *packets[BURST];
	double began = now_ns();
	if (rte_pktmbuf_alloc_bulk(pool, packets, BURST)) fail("rte_pktmbuf_alloc_bulk");
	for (int i = 0; i < BURST; i++) fill(packets[i], first + i);
	if (region == PARSE_GRO) began = now_ns();
	for (int i = 0; i < BURST; i++) parse(packets[i]);
	if (region == GRO) began = now_ns();
	unsigned left = rte_gro_reassemble_burst(packets, BURST, &gro);
	double merged = now_ns() - began;
	rte_pktmbuf_free_bulk(packets, left);
	frames_in += BURST;
	packets_out += left;
	return region == ALL ? now_ns() - began : merged;
}

static double sample(void)
{
	double began = now_ns(), timed = 0;
	uint64_t done = 0;
	double clock = now_ns();
	for (int i = 0; i < 15; i++) now_ns();
	clock = (now_ns() - clock) / 16;
	while (now_ns() - began < 10e6)
		for (int first = 0; first + BURST <= frame_count; first += BURST) {
			timed += burst(first) - clock;
			done += BURST;
		}
	return timed / done;
}

int main(int argc, char **argv)
{
	static const char *const names[] = {"gro", "parse_gro", "all"};
	char lcore[16];
	read_options(argc, argv);
	snprintf(lcore, sizeof lcore, "%d", options.cpus[0]);
	start_eal(lcore);
	load(options.mode);
	pool = rte_pktmbuf_pool_create("packets", 2047, 256, 0, RTE_MBUF_DEFAULT_BUF_SIZE, SOCKET_ID_ANY);
	if (!pool || frame_count < BURST) fail("rte_pktmbuf_pool_create");
	putchar('{');
	for (int i = 0; i < 3; i++) {
		region = i == 0 ? GRO : i == 1 ? PARSE_GRO : ALL;
		printf("\"%s\":", names[i]);
		print_solo(repeat_solo(sample, options.flows, options.window_ms * 1e6));
		putchar(',');
	}
	printf("\"coalesce_ratio\":%.2f}\n", (double)frames_in / packets_out);
	fflush(stdout);
	_exit(0);
}

// Time of one Toeplitz hash over addresses and ports: rte_softrss_be (mode soft4, soft6), or what
// rte_thash has inline for CPUs with GFNI and AVX-512 (mode gfni4, gfni6).
#include "dpdk.h"

enum { TUPLES = 4096, STRIDE = 128, KEY_BYTES = 40 };

static const uint8_t key[KEY_BYTES] = {
	0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0, 0xd0, 0xca, 0x2b, 0xcb,
	0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c, 0x6a, 0x42, 0xb7, 0x3b, 0xbe, 0xac, 0x01, 0xfa,
};
static uint8_t tuples[TUPLES][STRIDE] __attribute__((aligned(64))), converted[KEY_BYTES];
static uint64_t matrices[KEY_BYTES * 8] __attribute__((aligned(64)));
static int words, is_gfni;
static volatile uint32_t kept;

static uint32_t hash(uint8_t *tuple)
{
#ifdef RTE_THASH_GFNI_DEFINED
	if (is_gfni) return rte_thash_gfni(matrices, tuple, words * 4);
#endif
	return rte_softrss_be((uint32_t *)tuple, words, converted);
}

static double sample(void)
{
	double began = now_ns(), took;
	uint64_t hashed = 0;
	do {
		uint32_t all = 0;
		for (int i = 0; i < TUPLES; i++) all ^= hash(tuples[i]);
		kept = all;
		hashed += TUPLES;
		took = now_ns() - began;
	} while (took < 10e6);
	return took / hashed;
}

int main(int argc, char **argv)
{
	uint64_t random = 1;
	read_options(argc, argv);
	pin(options.cpus[0]);
	words = strchr(options.mode, '6') ? RTE_THASH_V6_L4_LEN : RTE_THASH_V4_L4_LEN;
	is_gfni = options.mode[0] == 'g';
#ifdef RTE_THASH_GFNI_DEFINED
	rte_thash_complete_matrix(matrices, key, KEY_BYTES);
#else
	if (is_gfni) {
		fputs("this CPU has no GFNI and AVX-512\n", stderr);
		_exit(1);
	}
#endif
	rte_convert_rss_key((const uint32_t *)key, (uint32_t *)converted, KEY_BYTES);
	for (int i = 0; i < TUPLES; i++)
		for (int at = 0; at < STRIDE; at++) {
			random = random * 6364136223846793005ull + 1442695040888963407ull;
			tuples[i][at] = random >> 56;
		}
	print_solo(repeat_solo(sample, options.flows, options.window_ms * 1e6));
	putchar('\n');
	fflush(stdout);
	_exit(0);
}

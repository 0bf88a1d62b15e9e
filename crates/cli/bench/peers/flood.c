// Sends 60-byte UDP frames as fast as one CPU can: the kernel runs an XDP program on live frames
// (BPF_PROG_TEST_RUN), which writes the flow's source port and redirects the frame to the device.
#include "bpf.h"

enum { SLOTS = 8192, FRAME_BYTES = 60, FIRST_PORT = 10000, REPEATS = 1 << 16 };

struct plan { uint64_t next; uint16_t ports[SLOTS]; };

static uint16_t checksum(const uint8_t *bytes, int len)
{
	uint32_t sum = 0;
	for (int i = 0; i < len; i += 2) sum += bytes[i] << 8 | bytes[i + 1];
	while (sum >> 16) sum = (sum & 0xffff) + (sum >> 16);
	return htons(~sum);
}

// Source ports of the slots: flows in turn, or (mode zipf) as often as 1/rank, in a mixed order.
static void deal(struct plan *plan)
{
	double sum = 0, share = 0;
	uint64_t random = 1;
	int slot = 0;
	for (int flow = 1; flow <= options.flows; flow++) sum += 1.0 / flow;
	for (int flow = 1; flow <= options.flows; flow++) {
		share += is_mode("zipf") ? 1 / (flow * sum) : 1.0 / options.flows;
		int end = flow == options.flows ? SLOTS : (int)(share * SLOTS);
		while (slot < end) plan->ports[slot++] = htons(FIRST_PORT + flow);
	}
	for (int i = SLOTS - 1; i > 0; i--) {
		random = random * 6364136223846793005ull + 1442695040888963407ull;
		int other = (random >> 33) % (i + 1);
		uint16_t port = plan->ports[i];
		plan->ports[i] = plan->ports[other];
		plan->ports[other] = port;
	}
}

static void fill(uint8_t *frame)
{
	struct in_addr from;
	inet_pton(AF_INET, "10.77.0.1", &from);
	memcpy(frame, "\2\0\0\0\0\2\2\0\0\0\0\1\x08\0\x45\0\0\0\0\0\x40\0\x40\x11\0\0", 26);
	*(uint16_t *)(frame + 16) = htons(FRAME_BYTES - 14);
	memcpy(frame + 26, &from, 4);
	memcpy(frame + 30, &options.to, 4);
	*(uint16_t *)(frame + 24) = checksum(frame + 14, 20);
	*(uint16_t *)(frame + 36) = htons(options.port);
	*(uint16_t *)(frame + 38) = htons(FRAME_BYTES - 34);
}

int main(int argc, char **argv)
{
	static struct plan plan;
	static uint8_t frame[FRAME_BYTES];
	read_options(argc, argv);
	pin(options.cpus[0]);
	deal(&plan);
	fill(frame);
	int zero = 0, ifindex = if_nametoindex(options.device);
	int map = map_create(BPF_MAP_TYPE_ARRAY, 4, sizeof plan, 1);
	map_update(map, &zero, &plan);
	const struct bpf_insn program[] = {
		MOV(6, 1),
		LOAD_FD(7, BPF_PSEUDO_MAP_VALUE, map),
		LDX(BPF_DW, 3, 7, 0),
		ALU(BPF_ADD, 3, 1),
		STX(BPF_DW, 7, 0, 3),
		ALU(BPF_AND, 3, SLOTS - 1),
		ALU(BPF_LSH, 3, 1),
		ALU_REG(BPF_ADD, 7, 3),
		LDX(BPF_H, 3, 7, offsetof(struct plan, ports)),
		LDX(BPF_W, 1, 6, offsetof(struct xdp_md, data)),
		LDX(BPF_W, 2, 6, offsetof(struct xdp_md, data_end)),
		MOV(4, 1),
		ALU(BPF_ADD, 4, 42),
		JUMP_REG(BPF_JGT, 4, 2, 1),
		STX(BPF_H, 1, 34, 3),
		SET(1, ifindex),
		SET(2, 0),
		CALL(BPF_FUNC_redirect),
		EXIT,
	};
	struct xdp_md context = {.data_end = FRAME_BYTES, .ingress_ifindex = ifindex};
	union bpf_attr attr = {.test = {
		.prog_fd = xdp_load(program, sizeof program / sizeof *program),
		.data_in = (uintptr_t)frame, .data_size_in = FRAME_BYTES,
		.ctx_in = (uintptr_t)&context, .ctx_size_in = sizeof context,
		.repeat = REPEATS, .flags = BPF_F_TEST_XDP_LIVE_FRAMES, .batch_size = BATCH,
	}};
	ready();
	for (;;) {
		if (bpf(BPF_PROG_TEST_RUN, &attr) && errno != EINTR) fail("BPF_PROG_TEST_RUN");
	}
}

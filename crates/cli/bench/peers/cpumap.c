// Steering by XDP: a hash of addresses and ports picks one of the CPUs (one, or a power of two), and
// BPF_MAP_TYPE_CPUMAP takes the frame there. The reader is another program.
#include "bpf.h"

enum { QUEUE_PACKETS = 2048, SEED = 0x9e3779b1 };

int main(int argc, char **argv)
{
	read_options(argc, argv);
	int cpus = sysconf(_SC_NPROCESSORS_CONF);
	int cpumap = map_create(BPF_MAP_TYPE_CPUMAP, 4, sizeof(struct bpf_cpumap_val), cpus);
	int targets = map_create(BPF_MAP_TYPE_ARRAY, 4, 4, THREADS_MAX);
	for (int i = 0; i < options.threads; i++) {
		struct bpf_cpumap_val queue = {.qsize = QUEUE_PACKETS};
		map_update(cpumap, &options.cpus[i], &queue);
		map_update(targets, &i, &options.cpus[i]);
	}
	const struct bpf_insn program[] = {
		LDX(BPF_W, 2, 1, offsetof(struct xdp_md, data)),
		LDX(BPF_W, 3, 1, offsetof(struct xdp_md, data_end)),
		MOV(4, 2),
		ALU(BPF_ADD, 4, 38),
		JUMP_REG(BPF_JGT, 4, 3, 23), // no room for ports
		LDX(BPF_H, 5, 2, 12),
		JUMP(BPF_JNE, 5, 8, 21), // not IPv4
		LDX(BPF_W, 6, 2, 26),
		LDX(BPF_W, 7, 2, 30),
		ALU_REG(BPF_XOR, 6, 7),
		LDX(BPF_W, 7, 2, 34),
		ALU_REG(BPF_XOR, 6, 7),
		{.code = BPF_ALU | BPF_MUL | BPF_K, .dst_reg = 6, .imm = (int)SEED},
		{.code = BPF_ALU | BPF_RSH | BPF_K, .dst_reg = 6, .imm = 16},
		ALU(BPF_AND, 6, options.threads - 1),
		STX(BPF_W, 10, -4, 6),
		MOV(2, 10),
		ALU(BPF_ADD, 2, -4),
		LOAD_FD(1, BPF_PSEUDO_MAP_FD, targets),
		CALL(BPF_FUNC_map_lookup_elem),
		JUMP(BPF_JEQ, 0, 0, 6),
		LDX(BPF_W, 2, 0, 0),
		LOAD_FD(1, BPF_PSEUDO_MAP_FD, cpumap),
		SET(3, XDP_PASS),
		CALL(BPF_FUNC_redirect_map),
		EXIT,
		SET(0, XDP_PASS),
		EXIT,
	};
	xdp_attach(xdp_load(program, sizeof program / sizeof *program), if_nametoindex(options.device));
	ready();
	for (;;) pause();
}

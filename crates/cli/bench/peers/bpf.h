// Calls of bpf(2) without a library: maps, XDP programs as literal instructions, and links, which
// are gone with the process that made them.
#ifndef FOREBAY_BPF_H
#define FOREBAY_BPF_H
#include "peer.h"
#include <linux/bpf.h>
#include <linux/if_link.h>
#include <sys/syscall.h>

#define LDX(size, to, from, at) {.code = BPF_LDX | BPF_MEM | size, .dst_reg = to, .src_reg = from, .off = at}
#define STX(size, to, at, from) {.code = BPF_STX | BPF_MEM | size, .dst_reg = to, .src_reg = from, .off = at}
#define MOV(to, from) {.code = BPF_ALU64 | BPF_MOV | BPF_X, .dst_reg = to, .src_reg = from}
#define SET(to, value) {.code = BPF_ALU64 | BPF_MOV | BPF_K, .dst_reg = to, .imm = value}
#define ALU(op, to, value) {.code = BPF_ALU64 | op | BPF_K, .dst_reg = to, .imm = value}
#define ALU_REG(op, to, from) {.code = BPF_ALU64 | op | BPF_X, .dst_reg = to, .src_reg = from}
#define JUMP(op, reg, value, skip) {.code = BPF_JMP | op | BPF_K, .dst_reg = reg, .imm = value, .off = skip}
#define JUMP_REG(op, reg, other, skip) {.code = BPF_JMP | op | BPF_X, .dst_reg = reg, .src_reg = other, .off = skip}
#define LOAD_FD(to, kind, fd) {.code = BPF_LD | BPF_DW | BPF_IMM, .dst_reg = to, .src_reg = kind, .imm = fd}, {0}
#define CALL(function) {.code = BPF_JMP | BPF_CALL, .imm = function}
#define EXIT {.code = BPF_JMP | BPF_EXIT}

static inline int bpf(int command, union bpf_attr *attr)
{
	return syscall(__NR_bpf, command, attr, sizeof *attr);
}

static inline int map_create(int type, int key, int value, int entries)
{
	union bpf_attr attr = {.map_type = type, .key_size = key, .value_size = value, .max_entries = entries};
	int fd = bpf(BPF_MAP_CREATE, &attr);
	if (fd < 0) fail("BPF_MAP_CREATE");
	return fd;
}

static inline void map_update(int map, const void *key, const void *value)
{
	union bpf_attr attr = {.map_fd = map, .key = (uintptr_t)key, .value = (uintptr_t)value};
	if (bpf(BPF_MAP_UPDATE_ELEM, &attr)) fail("BPF_MAP_UPDATE_ELEM");
}

static inline int xdp_load(const struct bpf_insn *program, int count)
{
	static char log[65536];
	union bpf_attr attr = {.prog_type = BPF_PROG_TYPE_XDP, .insns = (uintptr_t)program, .insn_cnt = count,
			       .license = (uintptr_t)"GPL", .log_buf = (uintptr_t)log, .log_size = sizeof log, .log_level = 1};
	int fd = bpf(BPF_PROG_LOAD, &attr);
	if (fd < 0) {
		fputs(log, stderr);
		fail("BPF_PROG_LOAD");
	}
	return fd;
}

static inline void xdp_attach(int program, int ifindex)
{
	union bpf_attr attr = {.link_create = {.prog_fd = program, .target_ifindex = ifindex, .attach_type = BPF_XDP,
					       .flags = XDP_FLAGS_DRV_MODE}};
	if (bpf(BPF_LINK_CREATE, &attr) < 0) fail("BPF_LINK_CREATE");
}
#endif

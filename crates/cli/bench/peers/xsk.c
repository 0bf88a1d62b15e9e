// A reader of an AF_XDP socket with libxdp: counts what comes (mode spin or poll), or sends each
// datagram back (mode echo: asleep in poll(2); mode echo-spin: always awake).
#include "bpf.h"
#include <linux/if_xdp.h>
#include <xdp/xsk.h>

enum { FRAMES = 4096, FRAME_BYTES = 4096, RING = 2048, TRIES = 200 };

static struct xsk_ring_prod fill, tx;
static struct xsk_ring_cons completion, rx;
static uint8_t *area;
static int fd, sleeps;

static void open_socket(void)
{
	struct xsk_umem *umem;
	struct xsk_socket *socket;
	struct xsk_umem_config memory = {.fill_size = FRAMES, .comp_size = RING, .frame_size = FRAME_BYTES};
	struct xsk_socket_config config = {.rx_size = RING, .tx_size = RING, .libxdp_flags = XSK_LIBXDP_FLAGS__INHIBIT_PROG_LOAD,
		.bind_flags = XDP_USE_NEED_WAKEUP};
	size_t bytes = (size_t)FRAMES * FRAME_BYTES;
	area = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	if (area == MAP_FAILED) fail("mmap");
	if ((errno = -xsk_umem__create(&umem, area, bytes, &fill, &completion, &memory))) fail("xsk_umem__create");
	// The kernel frees the queue of a program before this one a while after its end.
	for (int i = 0; (errno = -xsk_socket__create(&socket, options.device, 0, umem, &rx, &tx, &config)); i++) {
		if (errno != EBUSY || i == TRIES) fail("xsk_socket__create");
		usleep(10000);
	}
	fd = xsk_socket__fd(socket);
	uint32_t at = 0;
	xsk_ring_prod__reserve(&fill, FRAMES, &at);
	for (int i = 0; i < FRAMES; i++) *xsk_ring_prod__fill_addr(&fill, at++) = (uint64_t)i * FRAME_BYTES;
	xsk_ring_prod__submit(&fill, FRAMES);
}

static void redirect_to_socket(void)
{
	int zero = 0, map = map_create(BPF_MAP_TYPE_XSKMAP, 4, 4, 1);
	map_update(map, &zero, &fd);
	const struct bpf_insn program[] = {
		LDX(BPF_W, 2, 1, offsetof(struct xdp_md, rx_queue_index)),
		LOAD_FD(1, BPF_PSEUDO_MAP_FD, map),
		SET(3, XDP_PASS),
		CALL(BPF_FUNC_redirect_map),
		EXIT,
	};
	xdp_attach(xdp_load(program, sizeof program / sizeof *program), if_nametoindex(options.device));
}

// A batch of what has come; waits if there is none.
static uint32_t take(uint32_t *at)
{
	struct pollfd wait = {fd, POLLIN, 0};
	for (;;) {
		uint32_t got = xsk_ring_cons__peek(&rx, BATCH, at);
		if (got) return got;
		if (sleeps) poll(&wait, 1, -1);
		else if (xsk_ring_prod__needs_wakeup(&fill)) recvfrom(fd, NULL, 0, MSG_DONTWAIT, NULL, NULL);
	}
}

static void give_back(uint64_t address)
{
	uint32_t at = 0;
	while (!xsk_ring_prod__reserve(&fill, 1, &at)) ;
	*xsk_ring_prod__fill_addr(&fill, at) = address & ~(uint64_t)(FRAME_BYTES - 1);
	xsk_ring_prod__submit(&fill, 1);
}

static _Noreturn void *reader(void *number)
{
	pin(options.cpus[*(int *)number]);
	ready();
	for (;;) {
		uint32_t from, to, got = take(&from);
		while (xsk_ring_prod__reserve(&fill, got, &to) != got) ;
		for (uint32_t i = 0; i < got; i++) {
			uint64_t address = xsk_ring_cons__rx_desc(&rx, from + i)->addr;
			*xsk_ring_prod__fill_addr(&fill, to + i) = address & ~(uint64_t)(FRAME_BYTES - 1);
		}
		xsk_ring_prod__submit(&fill, got);
		xsk_ring_cons__release(&rx, got);
		count(0, got);
	}
}

// The answer to a UDP datagram: addresses and ports change places. It has no checksum, as IPv4 allows:
// the request may have none yet, if the sender left it to its device.
static int turn(uint8_t *frame, uint32_t len)
{
	uint8_t kept[6];
	if (len < 42 || frame[12] != 8 || frame[13] || frame[23] != IPPROTO_UDP) return 0;
	memcpy(kept, frame, 6), memcpy(frame, frame + 6, 6), memcpy(frame + 6, kept, 6);
	memcpy(kept, frame + 26, 4), memcpy(frame + 26, frame + 30, 4), memcpy(frame + 30, kept, 4);
	memcpy(kept, frame + 34, 2), memcpy(frame + 34, frame + 36, 2), memcpy(frame + 36, kept, 2);
	frame[40] = frame[41] = 0;
	return 1;
}

static _Noreturn void *echo(void *number)
{
	pin(options.cpus[*(int *)number]);
	ready();
	for (;;) {
		uint32_t from, to, got = take(&from);
		for (uint32_t i = 0; i < got; i++) {
			struct xdp_desc desc = *xsk_ring_cons__rx_desc(&rx, from + i);
			if (!turn(area + desc.addr, desc.len) || !xsk_ring_prod__reserve(&tx, 1, &to)) {
				give_back(desc.addr);
				continue;
			}
			*xsk_ring_prod__tx_desc(&tx, to) = (struct xdp_desc){.addr = desc.addr, .len = desc.len};
			xsk_ring_prod__submit(&tx, 1);
		}
		xsk_ring_cons__release(&rx, got);
		if (xsk_ring_prod__needs_wakeup(&tx)) sendto(fd, NULL, 0, MSG_DONTWAIT, NULL, 0);
		uint32_t sent = xsk_ring_cons__peek(&completion, BATCH, &from);
		for (uint32_t i = 0; i < sent; i++) give_back(*xsk_ring_cons__comp_addr(&completion, from + i));
		xsk_ring_cons__release(&completion, sent);
	}
}

int main(int argc, char **argv)
{
	int echoes;
	read_options(argc, argv);
	echoes = is_mode("echo") || is_mode("echo-spin");
	sleeps = is_mode("echo") || is_mode("poll");
	open_socket();
	redirect_to_socket();
	start(echoes ? echo : reader);
	while (echoes) pause();
	measure();
}

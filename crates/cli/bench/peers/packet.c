// A reader of AF_PACKET sockets: counts the frames of a TPACKET_V3 ring (mode ring; with a fanout by
// hash if it has several CPUs) or of recvmmsg(2) (mode messages), or sends each back (mode echo).
#include "peer.h"
#include <linux/if_ether.h>
#include <linux/if_packet.h>

enum { BLOCK_BYTES = 1 << 18, BLOCKS = 64, RETIRE_MS = 10 };

static int ifindex;

static int opened(void)
{
	int fd = socket(AF_PACKET, SOCK_RAW, 0), one = 1, bytes = 16 << 20;
	if (fd < 0) fail("socket");
	setsockopt(fd, SOL_PACKET, PACKET_IGNORE_OUTGOING, &one, sizeof one);
	setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &bytes, sizeof bytes);
	return fd;
}

static void attach(int fd)
{
	struct sockaddr_ll local = {.sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL), .sll_ifindex = ifindex};
	if (bind(fd, (void *)&local, sizeof local)) fail("bind");
	int fanout = (getpid() & 0xffff) | PACKET_FANOUT_HASH << 16;
	if (options.threads > 1 && setsockopt(fd, SOL_PACKET, PACKET_FANOUT, &fanout, sizeof fanout)) fail("PACKET_FANOUT");
}

static _Noreturn void *ring(void *number)
{
	int thread = *(int *)number, fd = opened(), version = TPACKET_V3;
	struct tpacket_req3 request = {.tp_block_size = BLOCK_BYTES, .tp_block_nr = BLOCKS, .tp_frame_size = PACKET_BYTES_MAX,
		.tp_frame_nr = BLOCK_BYTES / PACKET_BYTES_MAX * BLOCKS, .tp_retire_blk_tov = RETIRE_MS};
	if (setsockopt(fd, SOL_PACKET, PACKET_VERSION, &version, sizeof version)) fail("PACKET_VERSION");
	if (setsockopt(fd, SOL_PACKET, PACKET_RX_RING, &request, sizeof request)) fail("PACKET_RX_RING");
	uint8_t *blocks = mmap(NULL, (size_t)BLOCK_BYTES * BLOCKS, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (blocks == MAP_FAILED) fail("mmap");
	attach(fd);
	pin(options.cpus[thread]);
	if (thread == options.threads - 1) ready();
	struct pollfd wait = {fd, POLLIN, 0};
	for (int block = 0;; block = (block + 1) % BLOCKS) {
		struct tpacket_block_desc *desc = (void *)(blocks + (size_t)block * BLOCK_BYTES);
		while (!(__atomic_load_n(&desc->hdr.bh1.block_status, __ATOMIC_ACQUIRE) & TP_STATUS_USER)) poll(&wait, 1, -1);
		uint64_t bytes = 0;
		uint8_t *at = (uint8_t *)desc + desc->hdr.bh1.offset_to_first_pkt;
		for (uint32_t i = 0; i < desc->hdr.bh1.num_pkts; i++) {
			bytes += ((struct tpacket3_hdr *)at)->tp_len;
			at += ((struct tpacket3_hdr *)at)->tp_next_offset;
		}
		if (bytes) count(thread, desc->hdr.bh1.num_pkts);
		__atomic_store_n(&desc->hdr.bh1.block_status, TP_STATUS_KERNEL, __ATOMIC_RELEASE);
	}
}

// The answer to a UDP datagram: addresses and ports change places. It has no checksum, as IPv4 allows:
// the request may have none yet, if the sender left it to its device.
static void turn(uint8_t *frame)
{
	uint8_t kept[6];
	memcpy(kept, frame, 6), memcpy(frame, frame + 6, 6), memcpy(frame + 6, kept, 6);
	memcpy(kept, frame + 26, 4), memcpy(frame + 26, frame + 30, 4), memcpy(frame + 30, kept, 4);
	memcpy(kept, frame + 34, 2), memcpy(frame + 34, frame + 36, 2), memcpy(frame + 36, kept, 2);
	frame[40] = frame[41] = 0;
}

static _Noreturn void *messages(void *number)
{
	static uint8_t buffers[BATCH][PACKET_BYTES_MAX];
	struct iovec parts[BATCH];
	struct mmsghdr batch[BATCH];
	int fd = opened();
	attach(fd);
	memset(batch, 0, sizeof batch);
	pin(options.cpus[*(int *)number]);
	ready();
	for (;;) {
		for (int i = 0; i < BATCH; i++) {
			parts[i] = (struct iovec){buffers[i], PACKET_BYTES_MAX};
			batch[i].msg_hdr = (struct msghdr){.msg_iov = &parts[i], .msg_iovlen = 1};
		}
		int got = recvmmsg(fd, batch, BATCH, MSG_WAITFORONE, NULL);
		if (got <= 0) continue;
		count(0, got);
		if (!is_mode("echo")) continue;
		int answers = 0;
		for (int i = 0; i < got; i++) {
			uint8_t *frame = buffers[i];
			if (batch[i].msg_len < 42 || frame[12] != 8 || frame[13] || frame[23] != IPPROTO_UDP) continue;
			turn(frame);
			parts[answers++] = (struct iovec){frame, batch[i].msg_len};
		}
		sendmmsg(fd, batch, answers, 0);
	}
}

int main(int argc, char **argv)
{
	read_options(argc, argv);
	ifindex = if_nametoindex(options.device);
	start(is_mode("ring") ? ring : messages);
	while (is_mode("echo")) pause();
	measure();
}

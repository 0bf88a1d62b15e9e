// A reader of a UDP socket of the kernel: counts what recvmmsg(2) takes (mode block or spin), or
// sends each datagram back (mode echo or echo-spin).
#include "peer.h"

static int bound(void)
{
	int fd = socket(AF_INET, SOCK_DGRAM, 0), bytes = 4 << 20;
	struct sockaddr_in local = {.sin_family = AF_INET, .sin_port = htons(options.port)};
	if (fd < 0) fail("socket");
	setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &bytes, sizeof bytes);
	if (bind(fd, (void *)&local, sizeof local)) fail("bind");
	return fd;
}

static _Noreturn void *reader(void *number)
{
	static uint8_t buffers[BATCH][PACKET_BYTES_MAX];
	struct iovec parts[BATCH];
	struct mmsghdr messages[BATCH];
	int flags = is_mode("spin") ? MSG_DONTWAIT : MSG_WAITFORONE, fd = bound();
	memset(messages, 0, sizeof messages);
	for (int i = 0; i < BATCH; i++) {
		parts[i] = (struct iovec){buffers[i], PACKET_BYTES_MAX};
		messages[i].msg_hdr.msg_iov = &parts[i];
		messages[i].msg_hdr.msg_iovlen = 1;
	}
	pin(options.cpus[*(int *)number]);
	ready();
	for (;;) {
		int got = recvmmsg(fd, messages, BATCH, flags, NULL);
		if (got > 0) count(0, got);
	}
}

static _Noreturn void echo(void)
{
	static uint8_t buffer[PACKET_BYTES_MAX];
	int flags = is_mode("echo-spin") ? MSG_DONTWAIT : 0, fd = bound();
	pin(options.cpus[0]);
	ready();
	for (;;) {
		struct sockaddr_in from;
		socklen_t len = sizeof from;
		ssize_t got = recvfrom(fd, buffer, sizeof buffer, flags, (void *)&from, &len);
		if (got > 0) sendto(fd, buffer, got, 0, (void *)&from, len);
	}
}

int main(int argc, char **argv)
{
	read_options(argc, argv);
	if (is_mode("echo") || is_mode("echo-spin")) echo();
	start(reader);
	measure();
}

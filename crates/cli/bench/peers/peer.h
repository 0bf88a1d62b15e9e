// Shared by all peers: pinning, counters, the window of measurement, and the line of the result.
// A reader only adds to a counter; the main thread sleeps, and reads the counters at both ends.
#ifndef FOREBAY_PEER_H
#define FOREBAY_PEER_H
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { BATCH = 64, THREADS_MAX = 16, PACKET_BYTES_MAX = 2048, FIRST_PACKET_MS = 10000 };

static struct {
	const char *device, *mode;
	int cpus[THREADS_MAX], threads, port, flows;
	long warm_up_ms, window_ms;
	struct in_addr to;
} options;

static struct { _Alignas(128) uint64_t packets; } counts[THREADS_MAX];

static inline void fail(const char *what)
{
	fprintf(stderr, "%s: %s\n", what, strerror(errno));
	_exit(1);
}

static inline void count(int thread, uint64_t packets)
{
	uint64_t *to = &counts[thread].packets;
	__atomic_store_n(to, *to + packets, __ATOMIC_RELAXED);
}

static inline uint64_t counted(void)
{
	uint64_t sum = 0;
	for (int i = 0; i < THREADS_MAX; i++) sum += __atomic_load_n(&counts[i].packets, __ATOMIC_RELAXED);
	return sum;
}

static inline uint64_t clock_ns(clockid_t clock)
{
	struct timespec t;
	clock_gettime(clock, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static inline void pin(int cpu)
{
	cpu_set_t set;
	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	if (sched_setaffinity(0, sizeof set, &set)) fail("sched_setaffinity");
}

// A peer ends when its standard input is closed, so that none outlives who started it.
static void *end_with_input(void *unused)
{
	char c;
	while (read(0, &c, 1) > 0) ;
	_exit(0);
	return unused;
}

// --device D --mode M --cpus 0,1 --port P --to A --flows N --warm-up MS --window MS
static inline void read_options(int argc, char **argv)
{
	pthread_t thread;
	for (int i = 1; i + 1 < argc; i += 2) {
		const char *name = argv[i], *value = argv[i + 1];
		if (!strcmp(name, "--device")) options.device = value;
		else if (!strcmp(name, "--mode")) options.mode = value;
		else if (!strcmp(name, "--port")) options.port = atoi(value);
		else if (!strcmp(name, "--flows")) options.flows = atoi(value);
		else if (!strcmp(name, "--warm-up")) options.warm_up_ms = atol(value);
		else if (!strcmp(name, "--window")) options.window_ms = atol(value);
		else if (!strcmp(name, "--to")) inet_pton(AF_INET, value, &options.to);
		else if (!strcmp(name, "--cpus")) {
			for (const char *s = value; s && options.threads < THREADS_MAX; s = strchr(s, ','), s = s ? s + 1 : s)
				options.cpus[options.threads++] = atoi(s);
		}
	}
	if (!options.mode) options.mode = "";
	if (!options.threads) options.threads = 1;
	pthread_create(&thread, NULL, end_with_input, NULL);
}

static inline int is_mode(const char *mode) { return !strcmp(options.mode, mode); }

static inline void ready(void)
{
	puts("ready");
	fflush(stdout);
}

// Starts a reader on each of the CPUs.
static inline void start(void *(*reader)(void *))
{
	static int numbers[THREADS_MAX];
	for (int i = 0; i < options.threads; i++) {
		pthread_t thread;
		numbers[i] = i;
		if ((errno = pthread_create(&thread, NULL, reader, &numbers[i]))) fail("pthread_create");
	}
}

// Waits for the first packet, warms up, and prints the packets of the window as JSON.
static inline void measure(void)
{
	for (int ms = 0; !counted(); ms++) {
		if (ms > FIRST_PACKET_MS) {
			fputs("no packet came\n", stderr);
			_exit(1);
		}
		usleep(1000);
	}
	usleep(options.warm_up_ms * 1000);
	uint64_t packets = counted(), ns = clock_ns(CLOCK_MONOTONIC), cpu = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
	usleep(options.window_ms * 1000);
	for (int ms = 0; counted() == packets && ms < FIRST_PACKET_MS; ms++) usleep(1000);
	packets = counted() - packets;
	ns = clock_ns(CLOCK_MONOTONIC) - ns;
	cpu = clock_ns(CLOCK_PROCESS_CPUTIME_ID) - cpu;
	printf("{\"packets\":%llu,\"ns\":%llu,\"cpu_ns\":%llu}\n", (unsigned long long)packets, (unsigned long long)ns,
	       (unsigned long long)cpu);
	fflush(stdout);
	_exit(0);
}
#endif

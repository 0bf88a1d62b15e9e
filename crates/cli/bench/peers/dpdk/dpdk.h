// Shared by DPDK's programs: the start of its environment, short repeats, and their result. As in
// `forebay bench`: a disturbed repeat on one CPU is dropped, one across two is filed by distance.
#ifndef FOREBAY_DPDK_H
#define FOREBAY_DPDK_H
#include "peer.h"
#include <rte_eal.h>
#include <rte_errno.h>
#include <rte_mbuf.h>
#include <rte_thash.h>

enum { SAMPLES_MAX = 64, WARM_UP = 2, CLASSES = 4, MOVED = 3 };

// Some ten seconds.
static const uint64_t SPINS_MAX = 10000000000ull;

static const char *const class_names[CLASSES] = {"smt_sibling", "same_l3", "far_l3", "moved"};

struct samples { double values[SAMPLES_MAX]; int count; };

// Median of the undisturbed repeats on one CPU; if every one was disturbed, of the first disturbed ones.
struct solo { double median; int all_disturbed; };

// Without huge pages if there are none: the result is the same, but for misses of the TLB.
// The first CPU is the main one, whichever has the lower number.
static inline void start_eal(const char *lcores)
{
	char main_lcore[16];
	snprintf(main_lcore, sizeof main_lcore, "%d", options.cpus[0]);
	char *args[16] = {"peer", "-l", (char *)lcores, "--main-lcore", main_lcore, "--no-pci", "--no-telemetry",
			  "--iova-mode=va", "--log-level=3"};
	int count = 9;
	FILE *free_pages = popen("grep -c '^HugePages_Free: *0$' /proc/meminfo", "r");
	if (free_pages && fgetc(free_pages) == '1')
		args[count++] = "--no-huge", args[count++] = "-m", args[count++] = "256", args[count++] = "--no-shconf";
	else args[count++] = "--in-memory"; // which excludes --no-huge
	if (rte_eal_init(count, args) < 0) {
		fprintf(stderr, "rte_eal_init: %s\n", rte_strerror(rte_errno));
		_exit(1);
	}
}

static inline double now_ns(void) { return clock_ns(CLOCK_MONOTONIC); }

static inline int compare_doubles(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

static inline void add(struct samples *to, double value)
{
	if (to->count < SAMPLES_MAX) to->values[to->count++] = value;
}

static inline double median(struct samples *of)
{
	qsort(of->values, of->count, sizeof(double), compare_doubles);
	return of->count ? (of->values[(of->count - 1) / 2] + of->values[of->count / 2]) / 2 : 0;
}

// A fixed loop: takes longer when the other thread of the core, or somebody else, disturbs.
static inline double calibrate(void)
{
	uint64_t x = 1, y = 2, z = 3, w = 4;
	double began = now_ns();
	for (uint64_t i = 0; i < 20000; i++) {
		x = x * 0x9e3779b97f4a7c15ull + i;
		y = (y ^ (y >> 7)) + i;
		z += (z << 3) ^ i;
		w ^= w * 5 + i;
		__asm__ volatile("" : "+r"(x), "+r"(y), "+r"(z), "+r"(w));
	}
	return now_ns() - began;
}

// Repeats on one CPU until there are enough undisturbed ones, for `most_ns` at most.
static inline struct solo repeat_solo(double (*sample)(void), int reps, double most_ns)
{
	struct samples kept = {.count = 0}, disturbed = {.count = 0};
	double best = 1e18, began = now_ns();
	for (int i = 0; i < 50; i++) {
		double took = calibrate();
		best = took < best ? took : best;
	}
	while (kept.count < reps && now_ns() - began < most_ns) {
		double before = calibrate(), value = sample(), after = calibrate();
		best = before < best ? before : best;
		best = after < best ? after : best;
		add(before > best * 1.35 || after > best * 1.35 ? &disturbed : &kept, value);
	}
	return (struct solo){median(kept.count ? &kept : &disturbed), !kept.count};
}

static inline void print_solo(struct solo of)
{
	printf("{\"median\":%.4f,\"all_disturbed\":%s}", of.median, of.all_disturbed ? "true" : "false");
}

// One cache line between two CPUs, there and back.
static struct { volatile uint64_t ask, answer, there, back; } probe[4] __attribute__((aligned(128)));

static inline void answer_probe(void)
{
	if (!probe[0].ask) return;
	probe[1].answer = 1;
	while (probe[0].ask) probe[3].back = probe[2].there;
	probe[1].answer = 0;
}

// Counts an idle turn of a loop that waits for the other CPU, which may have ended.
static inline void spin(uint64_t *turns)
{
	if (++*turns < SPINS_MAX) return;
	fprintf(stderr, "the other CPU does not answer: leave both CPUs to the comparison\n");
	_exit(1);
}

static inline int distance(void)
{
	double best = 1e18;
	uint64_t turns = 0;
	probe[0].ask = 1;
	while (!probe[1].answer) spin(&turns);
	for (int batch = 0; batch < 5; batch++) {
		double began = now_ns();
		for (int i = 0; i < 200; i++) {
			uint64_t trip = probe[2].there + 1;
			probe[2].there = trip;
			while (probe[3].back != trip) spin(&turns);
		}
		double took = (now_ns() - began) / 200;
		best = took < best ? took : best;
	}
	probe[0].ask = 0;
	while (probe[1].answer) spin(&turns);
	return best < 85 ? 0 : best < 260 ? 1 : 2;
}

// Repeats across two CPUs, filed by distance, until one has enough; prints the medians.
static inline void repeat_pair(double (*sample)(void), int reps, double most_ns)
{
	static struct samples classes[CLASSES];
	double began = now_ns();
	int before = distance(), is_enough = 0;
	for (int round = 0; !is_enough && (round <= WARM_UP || now_ns() - began < most_ns); round++) {
		double value = sample();
		int after = distance(), class = before == after ? before : MOVED;
		if (round >= WARM_UP) add(&classes[class], value);
		is_enough = class != MOVED && classes[class].count >= reps;
		before = after;
	}
	printf("{\"classes\":{");
	const char *between = "";
	for (int i = 0; i < CLASSES; i++) {
		if (!classes[i].count) continue;
		printf("%s\"%s\":{\"median\":%.4f}", between, class_names[i], median(&classes[i]));
		between = ",";
	}
	puts("}}");
}
#endif

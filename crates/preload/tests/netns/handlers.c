/* Uses a UDP socket and a connection while a handler uses them, too, thousands of times a second; and says what
 * handlers find. */
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

static int udp, connection, listener;
static volatile sig_atomic_t handled, failed, ended;
static pthread_t main_thread;

static void use(void)
{
	char bytes[64];
	struct pollfd polled[2] = {{udp, POLLIN, 0}, {connection, POLLIN, 0}};

	if (poll(polled, 2, 0) < 0 && errno != EINTR)
		failed = errno;
	if (send(udp, "datagram", 8, MSG_DONTWAIT) < 0 && errno != EAGAIN)
		failed = errno;
	if (recv(udp, bytes, sizeof bytes, MSG_DONTWAIT) < 0 && errno != EAGAIN)
		failed = errno;
	if (send(connection, "bytes", 5, MSG_DONTWAIT) < 0 && errno != EAGAIN)
		failed = errno;
	if (recv(connection, bytes, sizeof bytes, MSG_DONTWAIT) < 0 && errno != EAGAIN)
		failed = errno;
}

static void handle(int number, siginfo_t *info, void *context)
{
	int before = errno;

	if (number != SIGALRM || info->si_signo != SIGALRM || context == NULL)
		failed = -1;
	use();
	handled++;
	errno = before;
}

/* Says what the handler of a signal finds. */
static void find(int number, siginfo_t *info, void *context)
{
	struct sigaction current;
	sigset_t blocked;

	sigprocmask(SIG_BLOCK, NULL, &blocked);
	sigaction(number, NULL, &current);
	printf("%d: code %d, value %d, blocked %d, other %d, default %d\n", number, info->si_code, info->si_value.sival_int,
	       sigismember(&blocked, number), sigismember(&blocked, SIGUSR2), current.sa_handler == SIG_DFL);
}

static void plain(int number)
{
	printf("plain %d\n", number);
}

/* Sets handlers in each way, and has them called. */
static void actions(void)
{
	static const int flags[] = {0, SA_NODEFER, SA_RESETHAND, SA_NODEFER | SA_RESETHAND, SA_RESTART, SA_ONSTACK};
	static const int wrong[] = {-1, 0, SIGKILL, SIGSTOP, 32, 65};
	struct sigaction action = {.sa_sigaction = find}, before;
	struct sigaction none = {.sa_handler = SIG_DFL};
	sigset_t blocked;

	sigaddset(&action.sa_mask, SIGUSR2);
	for (unsigned i = 0; i < sizeof flags / sizeof *flags; i++) {
		action.sa_flags = SA_SIGINFO | flags[i];
		printf("%d ", sigaction(SIGUSR1, &action, NULL));
		printf("%d ", sigaction(SIGUSR1, NULL, &before));
		printf("%d %x\n", before.sa_sigaction == find, before.sa_flags);
		sigqueue(getpid(), SIGUSR1, (union sigval){7});
		sigprocmask(SIG_BLOCK, NULL, &blocked);
		printf("%d %d ", sigismember(&blocked, SIGUSR1), sigaction(SIGUSR1, &none, &before));
		printf("%d %x\n", before.sa_sigaction == find, before.sa_flags);
	}
	printf("%d ", signal(SIGRTMIN, plain) == SIG_DFL);
	printf("%d ", sigaction(SIGRTMIN, NULL, &before));
	printf("%d %x %d\n", before.sa_handler == plain, before.sa_flags, sigismember(&before.sa_mask, SIGRTMIN));
	raise(SIGRTMIN);
	printf("%d\n", signal(SIGRTMIN, SIG_IGN) == plain);
	for (unsigned i = 0; i < sizeof wrong / sizeof *wrong; i++) {
		errno = 0;
		printf("%d ", signal(wrong[i], plain) == SIG_ERR);
		printf("%d ", errno);
		errno = 0;
		printf("%d ", sigaction(wrong[i], &action, NULL));
		printf("%d\n", errno);
	}
	printf("%d ", sysv_signal(SIGUSR1, plain) == SIG_DFL);
	sigaction(SIGUSR1, NULL, &before);
	printf("%d %x\n", before.sa_handler == plain, before.sa_flags);
	raise(SIGUSR1);
	printf("%d\n", signal(SIGUSR1, plain) == SIG_DFL);
	siginterrupt(SIGUSR1, 1);
	sigaction(SIGUSR1, NULL, &before);
	printf("%d %x\n", before.sa_handler == plain, before.sa_flags);
	raise(SIGUSR1);
}

/* Says in which other ways handlers are set, and what they find. */
static void older_ways(void)
{
	struct sigaction before, action = {.sa_handler = plain, .sa_flags = SA_NODEFER};

	siginterrupt(SIGUSR1, 1);
	signal(SIGUSR1, plain);
	sigaction(SIGUSR1, NULL, &before);
	printf("interrupts %x\n", before.sa_flags);
	siginterrupt(SIGUSR1, 0);
	ssignal(SIGUSR1, plain);
	sigaction(SIGUSR1, NULL, &before);
	printf("restarts %x\n", before.sa_flags);
	printf("%d ", sigset(SIGUSR1, SIG_HOLD) == plain);
	raise(SIGUSR1);
	printf("held, %d\n", sigset(SIGUSR1, plain) == SIG_HOLD);
	printf("%d ", sigset(SIGUSR1, SIG_DFL) == plain);
	printf("%d %d\n", sigset(SIGKILL, plain) == SIG_ERR, errno);
	/* Blocked by its mask, though not by its flags. */
	sigaddset(&action.sa_mask, SIGUSR1);
	action.sa_sigaction = find;
	action.sa_flags |= SA_SIGINFO;
	sigaction(SIGUSR1, &action, &before);
	raise(SIGUSR1);
	signal(SIGUSR1, SIG_DFL);
}

static int queued, misplaced;

static void count_queued(int number, siginfo_t *info, void *context)
{
	if (info->si_value.sival_int != queued || info->si_code != SI_QUEUE || info->si_pid != getpid())
		misplaced++;
	queued = info->si_value.sival_int + 1;
}

static void *queue(void *nothing)
{
	for (int i = 0; i < 20000; i++) {
		while (pthread_sigqueue(main_thread, SIGRTMIN, (union sigval){i}) != 0)
			usleep(10);
		if (i % 4 == 3)
			usleep(20);
	}
	while (queued < 20000)
		usleep(10);
	ended = 1;
	return nothing;
}

/* Has several real-time signals queued, which are to come in order. */
static void in_order(void)
{
	struct sigaction action = {.sa_sigaction = count_queued, .sa_flags = SA_SIGINFO};
	pthread_t thread;

	sigaction(SIGRTMIN, &action, NULL);
	pthread_create(&thread, NULL, queue, NULL);
	while (!ended)
		use();
	pthread_join(thread, NULL);
	printf("queued %d, misplaced %d\n", queued, misplaced);
}

static void count(int number)
{
	handled++;
}

static void *send_signals(void *nothing)
{
	while (handled < 2000) {
		pthread_kill(main_thread, SIGUSR1);
		usleep(rand() % 60);
	}
	ended = 1;
	return nothing;
}

/* Waits with a mask for a signal that is blocked before and afterwards, while packets come. */
static void masked(void)
{
	struct sigaction action = {.sa_handler = count};
	struct pollfd polled = {listener, POLLIN, 0};
	struct timespec moment = {0, 100000};
	int unblocked = 0, early = 0;
	sigset_t signals, none, before, blocked;
	pthread_t thread;

	sigemptyset(&none);
	sigemptyset(&signals);
	sigaddset(&signals, SIGUSR1);
	sigaction(SIGUSR1, &action, NULL);
	sigprocmask(SIG_BLOCK, &signals, &before);
	ended = handled = 0;
	pthread_create(&thread, NULL, send_signals, NULL);
	while (!ended) {
		int seen = handled;
		use();
		early += handled != seen;
		ppoll(&polled, 1, &moment, &none);
		sigprocmask(SIG_BLOCK, &signals, &blocked);
		unblocked += !sigismember(&blocked, SIGUSR1);
	}
	pthread_join(thread, NULL);
	printf("unblocked %d, early %d\n", unblocked, early);
	signal(SIGUSR1, SIG_IGN);
	sigprocmask(SIG_SETMASK, &before, NULL);
}

static void spoil(int number)
{
	handled++;
	errno = ERANGE;
}

/* Sends after the end: the error is the call's, though the handler has another one. */
static void spoiled(void)
{
	handled = 0;
	signal(SIGPIPE, spoil);
	shutdown(connection, SHUT_WR);
	printf("%zd ", send(connection, "byte", 4, 0));
	printf("%d, handled %d\n", errno, handled);
}

int main(void)
{
	struct sigaction action = {.sa_sigaction = handle, .sa_flags = SA_SIGINFO | SA_RESTART};
	struct itimerval often = {{0, 100}, {0, 100}};
	struct sockaddr_in near = {AF_INET, htons(7)}, far = {AF_INET, htons(9)};

	main_thread = pthread_self();
	listener = socket(AF_INET, SOCK_STREAM, 0);
	inet_pton(AF_INET, "10.9.0.1", &near.sin_addr);
	inet_pton(AF_INET, "10.9.0.2", &far.sin_addr);
	udp = socket(AF_INET, SOCK_DGRAM, 0);
	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int));
	if (bind(udp, (void *)&near, sizeof near) || connect(udp, (void *)&far, sizeof far))
		return 1;
	if (bind(listener, (void *)&near, sizeof near) || listen(listener, 8))
		return 2;
	connection = accept(listener, NULL, NULL);
	if (connection < 0)
		return 3;
	actions();
	older_ways();
	in_order();
	masked();
	handled = 0;
	sigaction(SIGALRM, &action, NULL);
	setitimer(ITIMER_REAL, &often, NULL);
	while (handled < 3000)
		use();
	setitimer(ITIMER_REAL, &(struct itimerval){0}, NULL);
	spoiled();
	printf("handled, %d\n", failed);
	fflush(stdout);
	_exit(0);
}

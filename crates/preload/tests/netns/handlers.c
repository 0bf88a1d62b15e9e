/* Uses a UDP socket and a connection while a handler uses them, too, thousands of times a second; and says what
 * handlers find. */
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

static int udp, connection;
static volatile sig_atomic_t handled, failed;

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

int main(void)
{
	struct sigaction action = {.sa_sigaction = handle, .sa_flags = SA_SIGINFO | SA_RESTART};
	struct itimerval often = {{0, 100}, {0, 100}};
	struct sockaddr_in near = {AF_INET, htons(7)}, far = {AF_INET, htons(9)};
	int listener = socket(AF_INET, SOCK_STREAM, 0);

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
	sigaction(SIGALRM, &action, NULL);
	setitimer(ITIMER_REAL, &often, NULL);
	while (handled < 3000)
		use();
	printf("handled, %d\n", failed);
	fflush(stdout);
	_exit(0);
}

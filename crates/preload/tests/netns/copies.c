/* Forks while another thread closes duplicates of a connection. The child can close its copies, all of them. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static int connection;

static void *close_duplicates(void *nothing)
{
	for (;;)
		close(dup(connection));
	return nothing;
}

/* Closes what it has but for standard input and output. Returns how many of these are left. */
static int close_copies(void)
{
	int left = 0;

	for (int number = 3; number < 64; number++) {
		close(number);
		left += fcntl(number, F_GETFD) >= 0;
	}
	return left;
}

int main(void)
{
	struct sockaddr_in near = {AF_INET, htons(7)};
	int listener = socket(AF_INET, SOCK_STREAM, 0), left = 0, status;
	pthread_t thread;

	inet_pton(AF_INET, "10.9.0.1", &near.sin_addr);
	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int));
	if (bind(listener, (void *)&near, sizeof near) || listen(listener, 8))
		return 1;
	connection = accept(listener, NULL, NULL);
	pthread_create(&thread, NULL, close_duplicates, NULL);
	for (int i = 0; i < 300; i++) {
		pid_t child = fork();
		if (child == 0)
			_exit(close_copies());
		waitpid(child, &status, 0);
		left += status != 0;
	}
	printf("closed, %d\n", left);
	fflush(stdout);
	_exit(0);
}

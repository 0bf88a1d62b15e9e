"""Makes the same calls on sockets of the kernel or of Forebay, and prints each answer on a line.

The peer, in another namespace, does what it is told over a connection of the kernel.
"""
import array, ctypes, errno, fcntl, os, select, signal, socket, struct, sys, termios, threading, time

NEAR, FAR, CONTROL = ("10.9.0.1", 7), ("10.9.0.2", 9), ("10.9.0.2", 10)
NEAR_V6, FAR_V6 = ("fd09::1", 17), ("fd09::2", 9)
WAIT_MS = 20_000
FIONREAD, SIOCOUTQ, SIOCOUTQNSD, SIOCATMARK = termios.FIONREAD, termios.TIOCOUTQ, 0x894B, 0x8905
ERRNO = errno.errorcode


def peer():
    """Commands: one a line, each answered by a line."""
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(FAR)
    udp.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
    udp_v6 = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    udp_v6.bind(FAR_V6)
    of_all = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    of_all.setsockopt(socket.IPPROTO_IP, IP_RECVTTL, 1)
    of_all.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton(GROUP) + socket.inet_aton(FAR[0]))
    of_all.bind(("::", WHENCE_PORT))
    of_all.settimeout(20)
    listener = socket.create_server(CONTROL)
    print("ready", flush=True)
    control = listener.accept()[0].makefile("rwb")
    tcp = None
    for line in control:
        word, _, rest = line.decode().strip().partition(" ")
        answer = "done"
        if word == "connect":
            tcp = socket.create_connection((rest.split()[1], int(rest.split()[2])) if rest else NEAR)
        elif word == "knock":
            try:
                tcp = socket.create_connection((rest.split()[0], int(rest.split()[1])), 0.5)
                tcp.settimeout(None)
            except OSError as error:
                answer = repr(error)
        elif word == "watch":
            watch = watched()
        elif word == "seen":
            answer = seen(watch, rest)
        elif word == "nodelay":
            tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        elif word == "send":
            tcp.sendall(b"x" * int(rest))
        elif word == "urgent":
            tcp.send(b"u", socket.MSG_OOB)
        elif word == "read":
            wanted, got = int(rest), b""
            while len(got) < wanted:
                got += tcp.recv(wanted - len(got)) or sys.exit("the stream has ended")
            answer = str(sum(got))
        elif word == "end":
            answer = repr(tcp.recv(1))
        elif word == "shut":
            tcp.shutdown(socket.SHUT_WR)
        elif word == "reset":
            tcp.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            tcp.close()
        elif word == "drip":
            threading.Thread(target=again_and_again, args=(0.02, tcp.send, b"x")).start()
        elif word == "sip":
            threading.Thread(target=again_and_again, args=(0.01, tcp.recv, 65_536)).start()
        elif word == "close":
            tcp.close()
        elif word == "datagram":
            udp.sendto(b"d" * int(rest), NEAR)
        elif word == "ping":
            (udp_v6 if ":" in rest.split()[0] else udp).sendto(b"ping", (rest.split()[0], int(rest.split()[1])))
        elif word in ("join", "leave"):
            option = socket.IP_ADD_MEMBERSHIP if word == "join" else socket.IP_DROP_MEMBERSHIP
            udp.setsockopt(socket.IPPROTO_IP, option, socket.inet_aton(rest) + socket.inet_aton(FAR[0]))
        elif word == "hear":
            from_v6 = udp_v6 if rest else udp
            from_v6.settimeout(20)
            answer = repr(from_v6.recv(70_000)[:20])
        elif word == "whence":
            data, messages, _, source = of_all.recvmsg(100, 100)
            answer = repr((data, [value for *_, value in messages], source))
        control.write(answer.encode() + b"\n")
        control.flush()


def again_and_again(pause, call, argument):
    """Makes a call after each pause, until the connection has ended."""
    try:
        while call(argument):
            time.sleep(pause)
    except OSError:
        pass


def say(what, call, *arguments):
    """Prints the answer of a call, or its error."""
    try:
        value = call(*arguments)
    except OSError as error:
        value = ERRNO.get(error.errno, error)
    print(f"{what}: {value}")
    return value


def events(mask):
    names = ("IN", "OUT", "ERR", "HUP", "RDHUP")
    bits = (select.POLLIN, select.POLLOUT, select.POLLERR, select.POLLHUP, select.POLLRDHUP)
    return "|".join(name for name, bit in zip(names, bits) if mask & bit) or "none"


def polled(it, asked=None, wait_ms=0):
    """Events of poll."""
    poll = select.poll()
    all = select.POLLIN | select.POLLOUT | select.POLLRDHUP
    poll.register(it, all if asked is None else asked)
    return events(sum(mask for _, mask in poll.poll(wait_ms)))


def await_event(it, mask):
    poll = select.poll()
    poll.register(it, mask)
    assert poll.poll(WAIT_MS), "nothing has happened"


def number(it, request):
    word = array.array("i", [0])
    fcntl.ioctl(it.fileno(), request, word)
    return word[0]


def await_bytes(it, count):
    began = time.monotonic()
    while number(it, FIONREAD) < count:
        assert time.monotonic() - began < WAIT_MS / 1000, "the bytes have not come"
    await_event(it, select.POLLIN)  # of Forebay's a moment later


def kernels(protocol, name):
    with open("/proc/self/net/snmp") as lines:
        names, values = [line.split() for line in lines if line.startswith(protocol + ":")]
    return int(values[names.index(name)])


def until(call):
    began = time.monotonic()
    while not call():
        assert time.monotonic() - began < WAIT_MS / 1000, "it has not happened"
    return True


def os_accept(listener):
    """accept without Python's waiting and trying again."""
    return listener._accept()


def accepted(listener, tell):
    tell("connect")
    return listener.accept()[0]


def poll(it, mask):
    poll = select.poll()
    poll.register(it, mask)
    return lambda wait_ms: events(sum(found for _, found in poll.poll(wait_ms)))


def select_(it, mask):
    """select, for one of three sets."""
    sets = [[it] if mask & bit else [] for bit in (select.EPOLLIN, select.EPOLLOUT, select.EPOLLPRI)]
    return lambda wait_ms: [len(found) for found in select.select(*sets, wait_ms / 1000)]


def epoll(it, mask):
    """epoll, level-triggered."""
    epoll = select.epoll()
    epoll.register(it, mask)
    return lambda wait_ms: events(sum(found for _, found in epoll.poll(wait_ms / 1000)))


def epoll_edge(it, mask):
    return epoll(it, mask | select.EPOLLET)


def epoll_once(it, mask):
    return epoll(it, mask | select.EPOLLONESHOT)


def epoll_nested(it, mask):
    inner, outer = select.epoll(), select.epoll()
    inner.register(it, mask)
    outer.register(inner, select.EPOLLIN)
    return lambda wait_ms: (events(sum(found for _, found in outer.poll(wait_ms / 1000))), inner.fileno() and "")


WAITS = (poll, select_, epoll, epoll_edge, epoll_once, epoll_nested)


BYTES_RECEIVED, RECEIVE_WINDOW = 128, 232


def info(it, kind, at):
    return struct.unpack_from(kind, it.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 240), at)[0]


def fill(it):
    """Sends until there was no room for a while, and the peer has all that it takes. Returns the number of bytes."""
    sent, full = 0, time.monotonic() + 0.3
    while time.monotonic() < full or number(it, SIOCOUTQ) != number(it, SIOCOUTQNSD):
        try:
            sent += it.send(bytes(65_536), socket.MSG_DONTWAIT)
            full = time.monotonic() + 0.3
        except BlockingIOError:
            time.sleep(0.01)
    return sent

"""Makes the same calls on sockets of the kernel or of Forebay, and prints each answer on a line.

The peer, in another namespace, does what it is told over a connection of the kernel.
"""
import array, ctypes, errno, fcntl, os, select, signal, socket, struct, sys, termios, threading, time

NEAR, FAR, CONTROL = ("10.9.0.1", 7), ("10.9.0.2", 9), ("10.9.0.2", 10)
WAIT_MS = 20_000
FIONREAD, SIOCOUTQ, SIOCOUTQNSD, SIOCATMARK = termios.FIONREAD, termios.TIOCOUTQ, 0x894B, 0x8905
ERRNO = errno.errorcode


def peer():
    """Commands: one a line, each answered by a line."""
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(FAR)
    listener = socket.create_server(CONTROL)
    print("ready", flush=True)
    control = listener.accept()[0].makefile("rwb")
    tcp = None
    for line in control:
        word, _, rest = line.decode().strip().partition(" ")
        answer = "done"
        if word == "connect":
            tcp = socket.create_connection(NEAR)
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
        elif word == "hear":
            udp.settimeout(20)
            answer = repr(udp.recv(70_000)[:20])
        control.write(answer.encode() + b"\n")
        control.flush()


def again_and_again(pause, call, argument):
    """Makes a call after each pause, until the connection has ended."""
    try:
        while call(argument):
            time.sleep(pause)
    except OSError:
        pass


def main():
    control = socket.create_connection(CONTROL).makefile("rwb")

    def tell(command):
        control.write(command.encode() + b"\n")
        control.flush()
        return control.readline().decode().strip()

    signals = []
    signal.signal(signal.SIGPIPE, lambda *_: signals.append("SIGPIPE"))
    signal.signal(signal.SIGALRM, lambda *_: signals.append("SIGALRM"))
    datagrams(tell)
    listener = listening(tell)
    connection = lambda: accepted(listener, tell)
    for part in (waits, reads, writes, ends, resets, slow_peers, shutdowns, queues, duplicates, threads,
                 options, quick_acks, files, misuse, peeks, bounds):
        print("#", part.__name__)
        part(connection, tell)
        print("signals", signals)
        signals.clear()
    interrupted(connection, tell, signals)
    again(listener, connection, tell)
    print("kernel", kernels("Tcp", "PassiveOpens") + kernels("Udp", "InDatagrams"))


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


def kernels(protocol, name):
    with open("/proc/self/net/snmp") as lines:
        names, values = [line.split() for line in lines if line.startswith(protocol + ":")]
    return int(values[names.index(name)])


def listening(tell):
    print("# listening")
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    say("bind", listener.bind, NEAR)
    say("accept too early", listener.accept)
    say("listen", listener.listen, 64)
    say("listen", listener.listen, 65)
    say("bind again", listener.bind, ("10.9.0.1", 8))
    bounded(listener)
    say("name", listener.getsockname)
    say("peer", listener.getpeername)
    say("recv", listener.recv, 1)
    say("send", listener.send, b"x")
    say("events", polled, listener)
    for name in ("SO_ACCEPTCONN", "SO_TYPE", "SO_DOMAIN", "SO_PROTOCOL", "SO_ERROR", "SO_REUSEADDR"):
        say(name, listener.getsockopt, socket.SOL_SOCKET, getattr(socket, name))
    for name in ("FIONREAD", "SIOCOUTQ", "SIOCOUTQNSD", "SIOCATMARK"):
        say(name, number, listener, globals()[name])
    listener.setblocking(False)
    say("accept nothing", listener.accept)
    listener.setblocking(True)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 20_000))
    say("accept until the time-out", lambda: os_accept(listener))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
    # Every way to wait for a connection.
    for wait in WAITS:
        waiter = wait(listener, select.EPOLLIN)
        say(f"{wait.__name__} nothing", waiter, 0)
        tell("connect")
        say(f"{wait.__name__} connection", waiter, WAIT_MS)
        it, peer = listener.accept()
        say("inheritable, flags", lambda: (it.get_inheritable(), fcntl.fcntl(it, fcntl.F_GETFL)))
        say("names", lambda: (it.getsockname() == NEAR, it.getpeername() == peer, peer[0]))
        say("inherited", lambda: (it.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                                  it.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
        say(f"{wait.__name__} no more", waiter, 0)
        it.close()
        tell("close")
    return listener


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


def waits(connection, tell):
    for wait in WAITS:
        it, name = connection(), wait.__name__
        both = select.EPOLLIN | select.EPOLLOUT
        say(f"{name} new", wait(it, both), WAIT_MS)
        waiter = wait(it, select.EPOLLIN)
        say(f"{name} nothing", waiter, 0)
        tell("send 10")
        await_bytes(it, 10)
        say(f"{name} bytes", waiter, WAIT_MS)
        say(f"{name} again", waiter, 0)
        say(f"{name} part", it.recv, 4)
        say(f"{name} rest", waiter, 0)
        say(f"{name} read", it.recv, 100)
        say(f"{name} all read", waiter, 0)
        tell("send 5")
        await_bytes(it, 5)
        say(f"{name} bytes again", waiter, 300)
        it.close()
        tell("close")


def reads(connection, tell):
    for blocks in (True, False):
        it = connection()
        it.setblocking(blocks)
        dont_wait = socket.MSG_DONTWAIT
        say("nothing", it.recv, 10, dont_wait)
        say("no room, nothing", it.recvmsg, 0, 0, dont_wait)
        say("read without room", os.read, it.fileno(), 0)
        tell("send 100")
        await_bytes(it, 100)
        say("waiting", number, it, FIONREAD)
        say("no room", it.recvmsg, 0, 0)
        say("peek", lambda: len(it.recv(7, socket.MSG_PEEK)))
        say("peek all", lambda: len(it.recv(1000, socket.MSG_PEEK)))
        say("cut", lambda: len(it.recv(10)))
        say("trunc", lambda: it.recv_into(bytearray(10), 10, socket.MSG_TRUNC))
        say("waiting", number, it, FIONREAD)
        say("read", lambda: len(os.read(it.fileno(), 10)))
        say("readv", lambda: os.readv(it.fileno(), [bytearray(3), bytearray(0), bytearray(9)]))
        say("recvfrom", lambda: (lambda got: (len(got[0]), got[1]))(it.recvfrom(8)))
        say("recvmsg", lambda: (lambda got: (len(got[0]),) + got[1:])(it.recvmsg(10, 100)))
        say("recvmsg peek", lambda: (lambda got: (len(got[0]),) + got[1:])(it.recvmsg(10, 0, socket.MSG_PEEK)))
        for rooms in (1, 2, 3):
            say("peek in parts", lambda: peeked(it, [bytearray(2) for _ in range(rooms)]))
        say("recvmsg_into", lambda: it.recvmsg_into([bytearray(5), bytearray(5)])[0])
        say("pread", os.pread, it.fileno(), 4, 0)
        say("error queue", it.recv, 10, socket.MSG_ERRQUEUE)
        say("out of band", it.recv, 1, socket.MSG_OOB)
        say("wait all, there", lambda: len(it.recv(20, socket.MSG_WAITALL)))
        say("rest", lambda: len(it.recv(1000)))
        say("nothing more", it.recv, 10, dont_wait)
        if blocks:
            late = threading.Timer(0.05, tell, ["send 30"])
            tell("send 20")
            late.start()
            say("wait all, later", lambda: len(it.recv(50, socket.MSG_WAITALL)))
            late.join()
            it.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 30_000))
            say("time-out", it.getsockopt, socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)
            say("until the time-out", it.recv, 10)
            tell("send 3")
            await_bytes(it, 3)
            say("wait all until the time-out", it.recv, 10, socket.MSG_WAITALL)
            say("readv of too many", os.readv, it.fileno(), [bytearray(1)] * 1025)
        tell("urgent")
        say("urgent", urgent, it)
        say("urgent again", it.recv, 1, socket.MSG_OOB)
        it.close()
        tell("close")


def urgent(it):
    """The urgent byte, once it is there."""
    while True:
        try:
            return it.recv(1, socket.MSG_OOB)
        except OSError as error:
            assert error.errno in (errno.EINVAL, errno.EAGAIN), error


def writes(connection, tell):
    it = connection()
    say("send nothing", it.send, b"")
    say("write nothing", os.write, it.fileno(), b"")
    say("send", it.send, b"a" * 10)
    say("more", it.send, b"b" * 10, socket.MSG_MORE)
    say("writev", os.writev, it.fileno(), [b"c" * 5, b"", b"d" * 5])
    say("sendmsg", it.sendmsg, [b"e" * 7, b"f" * 3], [], socket.MSG_NOSIGNAL)
    say("sendto", it.sendto, b"g" * 10, FAR)
    say("arrived", tell, "read 50")
    say("unacknowledged", lambda: until(lambda: number(it, SIOCOUTQ) == 0))
    it.setblocking(False)
    sent = 0
    # Buffers grow while there is room in those of the peer.
    while polled(it, select.POLLOUT, 500) == "OUT":
        try:
            while True:
                sent += it.send(bytes(65_536))
        except OSError as error:
            assert error.errno == errno.EAGAIN, error
    # Not writable says that there is little room; the last ACKs may have made some.
    sent += fill(it)
    print("full:", sent > 65_536)
    say("not writable", polled, it, select.POLLOUT)
    say("don't wait", it.send, b"x", socket.MSG_DONTWAIT)
    it.setblocking(True)
    it.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 30_000))
    say("until the time-out", it.send, b"x")
    say("writev of too many", os.writev, it.fileno(), [b"x"] * 1025)
    it.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 0))
    say("taken", tell, f"read {sent}")
    say("writable", polled, it, select.POLLOUT, WAIT_MS)
    reader = threading.Thread(target=lambda: say("large, arrived", tell, "read 3000000"))
    reader.start()
    sent = it.send(b"y" * 3_000_000)
    reader.join()
    print("large:", sent)
    it.close()
    tell("close")


def until(call):
    began = time.monotonic()
    while not call():
        assert time.monotonic() - began < WAIT_MS / 1000, "it has not happened"
    return True


def ends(connection, tell):
    it = connection()
    tell("send 5")
    tell("shut")
    await_event(it, select.POLLRDHUP)
    await_bytes(it, 5)
    say("events", polled, it)
    say("last", it.recv, 10)
    say("end", it.recv, 10)
    say("end again", it.recv, 10)
    say("events at the end", polled, it)
    say("peek at the end", it.recv, 10, socket.MSG_PEEK)
    say("still sends", it.send, b"z" * 4)
    say("arrived", tell, "read 4")
    for wait in WAITS:
        say(f"{wait.__name__} end", wait(it, select.EPOLLIN | select.EPOLLRDHUP), WAIT_MS)
    say("shut", it.shutdown, socket.SHUT_WR)
    say("peer's end", tell, "end")
    await_event(it, 0)
    say("events of both ends", polled, it)
    say("send after shutdown", it.send, b"x")
    it.close()
    tell("close")


def resets(connection, tell):
    it = connection()
    tell("reset")
    await_event(it, select.POLLERR)
    say("events", polled, it)
    say("reset", it.recv, 10)
    say("then", it.recv, 10)
    say("send", it.send, b"x")
    say("send without a signal", it.send, b"x", socket.MSG_NOSIGNAL)
    say("peer", it.getpeername)
    say("shutdown", it.shutdown, socket.SHUT_WR)
    say("events", polled, it)
    it.close()
    it = connection()
    tell("reset")
    await_event(it, select.POLLERR)
    say("SO_ERROR", it.getsockopt, socket.SOL_SOCKET, socket.SO_ERROR)
    say("SO_ERROR", it.getsockopt, socket.SOL_SOCKET, socket.SO_ERROR)
    say("recv", it.recv, 10)
    it.close()
    it = connection()
    tell("send 5")
    await_bytes(it, 5)
    tell("reset")
    await_event(it, select.POLLERR)
    say("after bytes", it.recv, 10)
    it.close()
    for call in (
        lambda: it.recv(10, socket.MSG_WAITALL),
        lambda: it.recvmsg_into([bytearray(3), bytearray(9)], 0, socket.MSG_WAITALL)[0],
    ):
        it = connection()
        tell("send 5")
        await_bytes(it, 5)
        tell("reset")
        await_event(it, select.POLLERR)
        say("a part before the reset", call)
        say("events", polled, it)
        say("the reset", it.recv, 10)
        say("then", it.recv, 10)
        it.close()
    it = connection()
    late = threading.Timer(0.3, tell, ["reset"])
    late.start()
    say("sent in part", lambda: 0 < it.send(bytes(30_000_000)) < 30_000_000)
    late.join()
    say("SO_ERROR", it.getsockopt, socket.SOL_SOCKET, socket.SO_ERROR)
    say("send then", it.send, b"x")
    it.close()
    it = connection()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        signal.pause()
    tell("reset")
    say("told in spite of a child", lambda: "RDHUP" in polled(it, select.POLLRDHUP, WAIT_MS))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    it.close()


def slow_peers(connection, tell):
    """A time-out is that of the whole call, although its wait goes on with each byte."""
    for word, option, call in (
        ("drip", socket.SO_RCVTIMEO, lambda it: len(it.recv(500, socket.MSG_WAITALL)) < 500),
        ("sip", socket.SO_SNDTIMEO, lambda it: it.send(bytes(30_000_000)) < 30_000_000),
    ):
        it = connection()
        it.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 0, 300_000))
        tell(word)
        if word == "drip":
            await_bytes(it, 1)
        say(word, call, it)
        it.close()
        tell("close")


def shutdowns(connection, tell):
    it = connection()
    say("receiving", it.shutdown, socket.SHUT_RD)
    say("events", polled, it)
    say("recv", it.recv, 10)
    say("send", it.send, b"x")
    say("sending", it.shutdown, socket.SHUT_WR)
    say("events", polled, it)
    say("send", it.send, b"x")
    say("again", it.shutdown, socket.SHUT_RDWR)
    say("wrong", it.shutdown, 3)
    it.close()
    tell("close")


def queues(connection, tell):
    """Bytes in the queues: received ones up to an urgent one, and sent ones with the FIN."""
    it = connection()
    for inline in (0, 1):
        it.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, inline)
        for part in ("send 3", "urgent", "send 2"):
            tell(part)
        say("received", until, lambda: info(it, "Q", BYTES_RECEIVED) == 6 + 6 * inline)
        for _ in range(3):
            say("waiting, at the urgent byte", lambda: (number(it, FIONREAD), number(it, SIOCATMARK)))
            say("read", it.recv, 10, socket.MSG_DONTWAIT)
        say("urgent", it.recv, 1, socket.MSG_OOB)
    fill(it)
    before = [number(it, of) for of in (SIOCOUTQ, SIOCOUTQNSD)]
    print("nothing in flight:", before[0] == before[1])
    say("end", it.shutdown, socket.SHUT_WR)
    print("by the end:", [number(it, of) - len for of, len in zip((SIOCOUTQ, SIOCOUTQNSD), before)])
    it.close()
    tell("close")


# Places in struct tcp_info.
BYTES_RECEIVED, RECEIVE_WINDOW = 128, 232


def info(it, kind, at):
    return struct.unpack_from(kind, it.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 240), at)[0]


def quick_acks(connection, tell):
    it = connection()
    is_quick = lambda: it.getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK)

    def replied():
        tell("send 5")
        await_bytes(it, 5)
        it.recv(5)
        return it.send(b"reply")

    say("at first", is_quick)
    # The reply comes soon enough at last, on a busy machine, too.
    say("after a reply", until, lambda: replied() and not is_quick())
    for value in (1, 0, 3):
        say(f"set to {value}", it.setsockopt, socket.IPPROTO_TCP, socket.TCP_QUICKACK, value)
        say("then", is_quick)
    say("short", it.setsockopt, socket.IPPROTO_TCP, socket.TCP_QUICKACK, b"x")
    it.close()
    tell("close")


def duplicates(connection, tell):
    it = connection()
    second = it.dup()
    third = socket.socket(fileno=fcntl.fcntl(it.fileno(), fcntl.F_DUPFD_CLOEXEC, 40))
    say("number", lambda: third.fileno() >= 40)
    it.setblocking(False)
    say("shared flag", lambda: fcntl.fcntl(second, fcntl.F_GETFL) & os.O_NONBLOCK != 0)
    say("nothing", second.recv, 1)
    it.setblocking(True)
    tell("send 6")
    say("first", it.recv, 2)
    it.close()
    say("second", second.recv, 2)
    os.dup2(second.fileno(), third.fileno())
    second.close()
    say("third", third.recv, 2)
    say("send", third.send, b"abc")
    say("arrived", tell, "read 3")
    third.close()
    say("peer's end", tell, "end")
    tell("close")


def threads(connection, tell):
    it = connection()
    got = []
    readers = [threading.Thread(target=lambda: got.append(it.recv(1))) for _ in range(3)]
    for reader in readers:
        reader.start()
    for _ in readers:
        tell("send 1")
    for reader in readers:
        reader.join()
    print("read by threads:", got)
    reader = threading.Thread(target=lambda: say("recv while shut down", it.recv, 1))
    reader.start()
    it.shutdown(socket.SHUT_RDWR)
    reader.join()
    it.close()
    tell("close")


def options(connection, tell):
    it = connection()
    level, tcp = socket.SOL_SOCKET, socket.IPPROTO_TCP
    descriptors = len(os.listdir("/proc/self/fd"))
    for name in ("SO_TYPE", "SO_DOMAIN", "SO_PROTOCOL", "SO_ACCEPTCONN", "SO_ERROR", "SO_KEEPALIVE"):
        say(name, it.getsockopt, level, getattr(socket, name))
    for name in ("TCP_NODELAY", "TCP_QUICKACK", "TCP_CORK"):
        say(name, it.setsockopt, tcp, getattr(socket, name), 1)
    print("descriptors opened", len(os.listdir("/proc/self/fd")) - descriptors)
    it.setsockopt(tcp, socket.TCP_CORK, 0)
    for where, name, value in (
        (level, "SO_KEEPALIVE", 0), (level, "SO_OOBINLINE", 1), (level, "SO_REUSEADDR", 1), (level, "SO_PRIORITY", 3),
        (level, "SO_RCVBUF", 30_000), (tcp, "TCP_NODELAY", 0), (tcp, "TCP_CORK", 1), (tcp, "TCP_CORK", 0),
        (tcp, "TCP_KEEPIDLE", 7), (tcp, "TCP_KEEPINTVL", 5), (tcp, "TCP_KEEPCNT", 3), (tcp, "TCP_KEEPIDLE", 0),
        (tcp, "TCP_KEEPCNT", 300), (tcp, "TCP_USER_TIMEOUT", 900), (tcp, "TCP_USER_TIMEOUT", -1),
        (tcp, "TCP_LINGER2", 9), (tcp, "TCP_QUICKACK", 1), (tcp, "TCP_DEFER_ACCEPT", 3),
        (tcp, "TCP_NOTSENT_LOWAT", 16_384), (tcp, "TCP_QUICKACK", 0), (socket.IPPROTO_IP, "IP_TOS", 16), (socket.IPPROTO_IP, "IP_TTL", 9),
        (socket.IPPROTO_IP, "IP_TTL", 999), (tcp, "TCP_WINDOW_CLAMP", 100), (tcp, "TCP_WINDOW_CLAMP", 20_000),
        (tcp, "TCP_WINDOW_CLAMP", 0),
    ):
        say(f"{name} = {value}", it.setsockopt, where, getattr(socket, name), value)
        say(name, it.getsockopt, where, getattr(socket, name))
    say("SO_LINGER", it.setsockopt, level, socket.SO_LINGER, struct.pack("ii", 1, 7))
    say("SO_LINGER", it.getsockopt, level, socket.SO_LINGER, 8)
    say("SO_LINGER", it.setsockopt, level, socket.SO_LINGER, struct.pack("ii", 0, 0))
    for name in ("SO_ACCEPTCONN", "SO_TYPE", "SO_DOMAIN", "SO_PROTOCOL", "SO_ERROR"):
        say(name, it.getsockopt, level, getattr(socket, name))
    say("TCP_CONGESTION", lambda: len(it.getsockopt(tcp, socket.TCP_CONGESTION, 16)))
    say("TCP_CONGESTION = x", it.setsockopt, tcp, socket.TCP_CONGESTION, b"x")
    say("TCP_CONGESTION = reno", it.setsockopt, tcp, socket.TCP_CONGESTION, b"reno")
    say("TCP_CONGESTION", it.getsockopt, tcp, socket.TCP_CONGESTION, 16)
    say("TCP_MAXSEG", it.getsockopt, tcp, socket.TCP_MAXSEG)
    say("TCP_INFO", lambda: it.getsockopt(tcp, socket.TCP_INFO, 104)[0])
    say("short", it.setsockopt, tcp, socket.TCP_NODELAY, b"x")
    say("unknown", it.setsockopt, tcp, 999, 1)
    say("unknown", it.getsockopt, tcp, 999)
    it.close()
    tell("close")


def files(connection, tell):
    it = connection()
    with open("/proc/self/exe", "rb") as file:
        expected = sum(file.read(10_000))
        file.seek(5)
        say("sendfile", os.sendfile, it.fileno(), file.fileno(), 0, 10_000)
        say("position", file.tell)
        say("arrived", lambda: int(tell("read 10000")) == expected)
        say("sendfile from its position", os.sendfile, it.fileno(), file.fileno(), None, 10)
        say("position", lambda: os.lseek(file.fileno(), 0, os.SEEK_CUR))
        say("arrived", tell, "read 10")
        say("sendfile of no file", os.sendfile, it.fileno(), -1, 0, 10)
        say("sendfile of no file", os.sendfile, it.fileno(), -1, None, 10)
        say("sendfile beyond the end", os.sendfile, it.fileno(), file.fileno(), 1 << 40, 10)
    splices(it, tell)
    it.close()
    tell("close")


def peeked(it, rooms):
    """Length of what is there, and whether it stays and is the same."""
    count = it.recvmsg_into(rooms, 0, socket.MSG_PEEK)[0]
    return count, b"".join(rooms)[:count] == it.recv(count, socket.MSG_PEEK)


def splices(it, tell):
    """Between a connection and a pipe, which has room for 16 pages."""
    out, into = os.pipe()
    number, dont_wait = it.fileno(), 2
    say("nothing in the pipe", os.splice, out, number, 10, None, None, dont_wait)
    say("to no pipe", os.splice, number, -1, 10)
    say("from no pipe", os.splice, -1, number, 10)
    later = threading.Timer(0.1, os.write, (into, b"late"))
    later.start()
    say("waits for the pipe", os.splice, out, number, 10)
    later.join()
    say("arrived", tell, "read 4")
    os.write(into, b"a" * 20_000)
    say("to connection", os.splice, out, number, 30_000)
    say("arrived", tell, "read 20000")
    os.write(into, b"b" * 10)
    say("a part, and more follows", os.splice, out, number, 4, None, None, 4)
    say("the rest", os.splice, out, number, 100)
    say("arrived", tell, "read 10")
    tell("send 9")
    await_bytes(it, 9)
    say("from connection", os.splice, number, into, 5)
    say("from connection", os.splice, number, into, 5, None, None, dont_wait)
    say("in the pipe", os.read, out, 100)
    it.setblocking(False)
    say("nothing there", os.splice, number, into, 5)
    it.setblocking(True)
    os.write(into, b"c" * 65_536)
    tell("send 5")
    await_bytes(it, 5)
    say("no room", os.splice, number, into, 5, None, None, dont_wait)
    say("it stays", it.recv, 10)
    say("nothing asked for", os.splice, number, into, 0)
    say("wrong flag", os.splice, number, into, 5, None, None, 64)
    say("offset of the pipe", os.splice, number, into, 5, None, 0)
    say("offset of the connection", os.splice, number, into, 5, 0)
    say("to itself", os.splice, number, number, 5)
    os.close(into)
    say("all of it", os.splice, out, number, 100_000)
    say("arrived", tell, "read 65536")
    say("end of the pipe", os.splice, out, number, 5)
    os.close(out)
    out, into = os.pipe()
    os.close(out)
    tell("send 5")
    await_bytes(it, 5)
    say("no reader", os.splice, number, into, 5)
    say("it stays", it.recv, 10)
    os.close(into)


def misuse(connection, tell):
    it = connection()
    say("connect", it.connect, FAR)
    say("listen", it.listen, 1)
    say("accept", lambda: os_accept(it))
    say("bind", it.bind, ("10.9.0.1", 8))
    say("seek", os.lseek, it.fileno(), 0, 0)
    say("kind", lambda: os.fstat(it.fileno()).st_mode >> 12)
    fd = it.detach()
    os.close(fd)
    say("closed", os.read, fd, 1)
    tell("close")


def peeks(connection, tell):
    """Looks at bytes that have not all come."""
    it, all = connection(), socket.MSG_PEEK | socket.MSG_WAITALL
    look = lambda flags=all: len(it.recv(50, flags))
    late = threading.Timer(0.05, tell, ["send 30"])
    tell("send 20")
    late.start()
    say("peek all, later", look)
    late.join()
    say("peek all in parts", lambda: it.recvmsg_into([bytearray(20), bytearray(30)], 0, all)[0])
    say("still there", lambda: len(it.recv(100)))
    tell("send 3")
    await_bytes(it, 3)
    say("peek what is there", look, all | socket.MSG_DONTWAIT)
    # Again and again: the first may come before the call.
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    say("peek all until a signal", look)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    it.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 50_000))
    say("peek all until the time-out", look)
    it.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
    late = threading.Timer(0.05, tell, ["shut"])
    late.start()
    say("peek all until the end", look)
    late.join()
    say("read", lambda: len(it.recv(100)))
    say("peek the end", look)
    it.close()
    tell("close")
    it = connection()
    for inline in (0, 1):
        it.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, inline)
        for part in ("send 3", "urgent", "send 2"):
            tell(part)
        say("received", until, lambda: info(it, "Q", BYTES_RECEIVED) == 6 + 6 * inline)
        say("peek all until the urgent byte", look)
        say("read up to it", it.recv, 10)
        say("peek behind it", look, all | socket.MSG_DONTWAIT)
        say("read behind it", it.recv, 10)
        say("read the rest", it.recv, 10, socket.MSG_DONTWAIT)
    it.close()
    tell("close")


class Header(ctypes.Structure):
    """struct msghdr, in a struct mmsghdr."""
    _fields_ = [("name", ctypes.c_void_p), ("name_len", ctypes.c_int), ("vectors", ctypes.c_void_p),
                ("count", ctypes.c_size_t), ("control", ctypes.c_void_p), ("control_len", ctypes.c_size_t),
                ("flags", ctypes.c_int), ("len", ctypes.c_uint)]


def bounded(it):
    """Calls whose arguments are out of bounds. None takes anything, or sends."""
    libc = ctypes.CDLL(None, use_errno=True)
    room = ctypes.create_string_buffer(100)
    vector = (ctypes.c_size_t * 2)(ctypes.addressof(room), 3)
    none = (ctypes.c_size_t * 2)(0, 0)

    def call(name, *arguments):
        result = getattr(libc, name)(it.fileno(), *arguments)
        return result if result >= 0 else ERRNO[ctypes.get_errno()]

    for name in (ctypes.addressof(room), None):
        for name_len in (-1, -2**31):
            for function in ("recvmsg", "recvmmsg", "sendmsg", "sendmmsg"):
                header = Header(name, name_len, ctypes.addressof(vector), 1)
                many = (1, socket.MSG_DONTWAIT, None)[:3 if function == "recvmmsg" else 2]
                flags = many if "mmsg" in function else (socket.MSG_DONTWAIT,)
                if name or "send" not in function:
                    say(f"{function}, {name is not None}, {name_len}", call, function, ctypes.byref(header), *flags)
    here = ctypes.c_long(-1)
    for flags in (0x1, 0x2, 0x4, 0x10, 0x20, 0x30, 0x40, 0x80, 0x2000, -1):
        with_flags = lambda vectors, name, more=0: call(name, vectors, 1, here, flags | more)
        say(f"preadv2 {flags}", with_flags, vector, "preadv2", 8)
        say(f"preadv2 of nothing {flags}", with_flags, none, "preadv2")
        say(f"pwritev2 of nothing {flags}", with_flags, none, "pwritev2")
        if flags > 0x20:
            say(f"pwritev2 {flags}", with_flags, vector, "pwritev2")
    for level, option in ((socket.IPPROTO_IP, 14), (socket.IPPROTO_IPV6, 24)):  # IP_MTU, IPV6_MTU
        say("MTU", it.getsockopt, level, option)
    for address in (("10.9.0.1", 8), ("10.9.0.1", 7), ("10.9.0.1", 0), ("10.77.0.1", 8)):
        say(f"bind again {address}", it.bind, address)
    say("bind without an address", call, "bind", None, 16)
    say("bind to a short address", call, "bind", ctypes.byref(room), 3)
    say("bind to another family", call, "bind", b"\x01\x00" + bytes(14), 16)


def bounds(connection, tell):
    it = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    it.bind(("", 0))
    say("bind to another port", it.bind, NEAR)
    it.close()
    it = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    it.bind(NEAR)
    tell("datagram 10")
    await_bytes(it, 10)
    bounded(it)
    it.connect(FAR)
    for level, option in ((socket.IPPROTO_IP, 14), (socket.IPPROTO_IPV6, 24)):
        say("MTU", it.getsockopt, level, option)
    say("the datagram", it.recv, 100, socket.MSG_DONTWAIT)
    it.close()
    it = connection()
    tell("send 10")
    await_bytes(it, 10)
    bounded(it)
    say("the rest", it.recv, 100, socket.MSG_DONTWAIT)
    for how in (socket.SHUT_RD, socket.SHUT_RD, socket.SHUT_WR, socket.SHUT_WR, socket.SHUT_RDWR, socket.SHUT_RDWR):
        say(f"shutdown {how}", it.shutdown, how)
    tell("close")
    await_event(it, select.POLLHUP)
    say("shutdown of an ended one", it.shutdown, socket.SHUT_RDWR)
    it.close()


def interrupted(connection, tell, signals):
    """A signal interrupts a read: without SA_RESTART, as Python installs handlers, Python reads again."""
    print("# interrupted")
    it = connection()
    late = threading.Timer(0.2, tell, ["send 2"])
    late.start()
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    say("recv", it.recv, 2)
    late.join()
    print("signals", signals)
    signals.clear()
    calls_of_c(it, tell, signals)
    print("signals", signals)
    it.close()
    tell("close")


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


def send_without_room(it, tell, call, room, signals):
    """Sends 1,000 bytes while there is no room; after 0.3 s the peer reads all that was sent before. A peer that takes more
    late, when it is probed, makes room before that: then once more, as if the alarm had not been set before."""
    sent, before = 0, len(signals)
    while True:
        sent += fill(it)
        has_asked = threading.Event()

        def ask():
            has_asked.set()
            tell(f"read {sent}")

        late = threading.Timer(0.3, ask)
        late.start()
        answer = call("send", room, 1000, 0)
        had_room = answer == 1000 and not has_asked.is_set()
        if had_room:
            late.cancel()
        late.join()
        if not had_room or has_asked.is_set():
            return answer
        signal.setitimer(signal.ITIMER_REAL, 0)
        del signals[before:]
        sent += 1000


def calls_of_c(it, tell, signals):
    """The same by the C library's functions, which Python does not call again."""
    libc = ctypes.CDLL(None, use_errno=True)
    room = ctypes.create_string_buffer(100_000)

    def call(name, *arguments):
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        result = getattr(libc, name)(it.fileno(), *arguments)
        return result if result >= 0 else ERRNO[ctypes.get_errno()]

    def all_restart(restart):
        for number in (signal.SIGALRM, signal.SIGPIPE, signal.SIGINT):
            signal.siginterrupt(number, not restart)

    for restart in (False, True):
        all_restart(restart)
        for micros in (0, 9_000_000):
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                it.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", micros // 1_000_000, 0))
            late = threading.Timer(0.3, tell, ["send 2"])
            late.start()
            answer = say(f"recv of C, {restart}, {micros}", call, "recv", room, 2, 0)
            late.join()
            if answer != 2:
                await_bytes(it, 2)
            say("left", it.recv, 2, socket.MSG_DONTWAIT)
            answer = say(f"send of C, {restart}, {micros}", send_without_room, it, tell, call, room, signals)
            if answer == 1000:
                tell("read 1000")
    all_restart(False)


def again(listener, connection, tell):
    """Listens anew while a connection lives."""
    print("# again")
    it = connection()
    listener.close()
    other = socket.socket()
    say("bind", other.bind, NEAR)
    other.close()
    other = socket.socket()
    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    other.setsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP, 20_000)
    say("bind", other.bind, NEAR)
    say("listen", other.listen)
    say("no clamp", other.setsockopt, socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP, 0)
    say("send", it.send, b"abc")
    say("arrived", tell, "read 3")
    it.close()
    tell("close")
    say("shut for writing", other.shutdown, socket.SHUT_WR)
    it = accepted(other, tell)
    say("clamp", it.getsockopt, socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP)
    say("window", lambda: info(it, "I", RECEIVE_WINDOW) <= 20_000)
    say("send", it.send, b"abc")
    say("arrived", tell, "read 3")
    late = threading.Timer(0.1, other.shutdown, [socket.SHUT_RD])
    late.start()
    say("accept until the end", lambda: os_accept(other))
    late.join()
    say("accept", lambda: os_accept(other))
    say("hung up", lambda: "HUP" in polled(other).split("|"))
    say("listen", other.listen)
    say("events", polled, other)
    tell("close")
    say("accepted", lambda: accepted(other, tell).getsockname())
    say("send", it.send, b"abc")


def datagrams(tell):
    print("# datagrams")
    it = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    it.bind(NEAR)
    dont_wait = socket.MSG_DONTWAIT
    for wait in WAITS:
        name = wait.__name__
        say(f"{name} new", wait(it, select.EPOLLIN | select.EPOLLOUT), WAIT_MS)
        waiter = wait(it, select.EPOLLIN)
        say(f"{name} nothing", waiter, 0)
        tell("datagram 10")
        await_event(it, select.POLLIN)
        say(f"{name} datagram", waiter, WAIT_MS)
        say(f"{name} again", waiter, 0)
        say(f"{name} peek", it.recvfrom, 4, socket.MSG_PEEK)
        say(f"{name} part", it.recvfrom, 4)
        say(f"{name} all read", waiter, 0)
    for flags in (0, dont_wait, socket.MSG_TRUNC, socket.MSG_PEEK, socket.MSG_PEEK | socket.MSG_TRUNC,
                  socket.MSG_WAITALL):
        tell("datagram 9")
        await_event(it, select.POLLIN)
        say(f"flags {flags}", it.recv_into, bytearray(4), 4, flags)
        say(f"recvmsg, flags {flags}", it.recvmsg, 4, 100, flags | dont_wait)
        say("left", it.recv, 10, dont_wait)
    tell("datagram 0")
    await_event(it, select.POLLIN)
    say("waiting", number, it, FIONREAD)
    say("empty", it.recvfrom, 10)
    tell("datagram 7")
    await_event(it, select.POLLIN)
    say("too many buffers", it.recvmsg_into, [bytearray(1)] * 1025)
    say("left", it.recv, 10, dont_wait)
    say("sent from too many", it.sendmsg, [b"x"] * 1025, [], 0, FAR)
    tell("datagram 8")
    await_event(it, select.POLLIN)
    say("waiting", number, it, FIONREAD)
    say("no room", it.recvmsg, 0, 0)
    say("nothing", it.recv, 1, dont_wait)
    say("error queue", it.recv, 10, socket.MSG_ERRQUEUE)
    say("out of band", it.recv, 1, socket.MSG_OOB | dont_wait)
    say("listen", it.listen, 1)
    say("accept", lambda: os_accept(it))
    say("shutdown", it.shutdown, socket.SHUT_WR)
    it.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 30_000))
    say("until the time-out", it.recv, 10)
    second = it.dup()
    it.close()
    tell("datagram 3")
    it = second
    await_event(it, select.POLLIN)
    say("duplicate", it.recv, 10)
    got = []
    it.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
    readers = [threading.Thread(target=lambda: got.append(it.recv(9))) for _ in range(3)]
    for reader in readers:
        reader.start()
    for _ in readers:
        tell("datagram 2")
    for reader in readers:
        reader.join()
    print("read by threads:", got)
    it.close()
    ancillary_data(tell)
    parts(tell)
    peers(tell)


def bound_datagrams():
    it = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    it.bind(NEAR)
    return it


SO_RXQ_OVFL, SO_TIMESTAMPS = 40, (29, 35, 37, 63, 64, 65)
IP_ORIGDSTADDR, UDP_CORK = 20, 1


def ancillary_data(tell):
    """Control messages of a datagram that stays, and of the same that is taken."""
    print("# ancillary_data")
    it = bound_datagrams()

    def received(what, room=400):
        tell("datagram 3")
        await_event(it, select.POLLIN)
        for flags in (socket.MSG_PEEK, 0):
            data, messages, flags, source = it.recvmsg(2, room, flags)
            # Times are none of the answers.
            shown = [(*kind, len(value) if kind[1] in SO_TIMESTAMPS else value.hex()) for *kind, value in messages]
            print(f"{what}: {data} {shown} {flags} {source}")

    for option in SO_TIMESTAMPS:
        say(f"option {option}", it.setsockopt, socket.SOL_SOCKET, option, 0x18 if option in (37, 65) else 1)
        say(f"option {option}", it.getsockopt, socket.SOL_SOCKET, option)
        received(f"times by {option}")
    for room in (0, 16, 20, 36, 40):
        received(f"times, {room} bytes", room)
    for option in SO_TIMESTAMPS:
        it.setsockopt(socket.SOL_SOCKET, option, 0)
    received("no times")
    say("overflow", it.setsockopt, socket.SOL_SOCKET, SO_RXQ_OVFL, 1)
    received("no overflow")
    for option in (socket.IP_RECVTOS, 12, 8, IP_ORIGDSTADDR):
        say(f"option {option}", it.setsockopt, socket.IPPROTO_IP, option, 1)
    interface = socket.if_nametoindex("exa").to_bytes(4, "little")
    tell("datagram 3")
    await_event(it, select.POLLIN)
    for flags in (socket.MSG_PEEK, 0):
        messages = it.recvmsg(2, 400, flags)[1]
        say("addresses", lambda: [(*kind, value.replace(interface, b"index!")) for *kind, value in messages])
    say("errors", it.setsockopt, socket.IPPROTO_IP, 11, 1)
    say("error queue", it.recvmsg, 10, 100, socket.MSG_ERRQUEUE)
    # What the queue of errors told is told once.
    say("to nobody", it.sendto, b"lost", ("10.9.0.2", 99))
    await_event(it, select.POLLIN)
    for _ in range(2):
        say("error queue", lambda: it.recvmsg(10, 0, socket.MSG_ERRQUEUE)[0])
    say("nothing more", it.recv, 10, socket.MSG_DONTWAIT)
    say("no error", it.getsockopt, socket.SOL_SOCKET, socket.SO_ERROR)
    it.close()


def parts(tell):
    """Datagrams of several calls."""
    print("# parts")
    it, more = bound_datagrams(), socket.MSG_MORE
    say("first", it.sendto, b"ab", more, FAR)
    say("second", it.send, b"cd", more)
    say("last, elsewhere", it.sendto, b"e", ("10.9.0.2", 99))
    say("heard", tell, "hear")
    say("nobody", it.send, b"x", more)
    say("cork", it.setsockopt, socket.IPPROTO_UDP, UDP_CORK, 1)
    for part in (b"1", b"", b"2"):
        say("part", it.sendto, part, FAR)
    say("uncork", it.setsockopt, socket.IPPROTO_UDP, UDP_CORK, 0)
    say("heard", tell, "hear")
    say("long", it.sendto, bytes(60_000), more, FAR)
    say("too long", it.sendto, bytes(6_000), more, FAR)
    say("whole", it.sendto, b"whole", FAR)
    say("heard", tell, "hear")
    it.close()


def peers(tell):
    """Peers that come, go and refuse, and ends."""
    print("# peers")
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name, *arguments):
        result = getattr(libc, name)(*arguments)
        return result if result >= 0 else ERRNO[ctypes.get_errno()]

    it = bound_datagrams()
    say("connect", it.connect, ("10.9.0.2", 99))
    say("refused", it.send, b"x")
    await_event(it, select.POLLIN)
    say("SO_ERROR", it.getsockopt, socket.SOL_SOCKET, socket.SO_ERROR)
    say("SO_ERROR", it.getsockopt, socket.SOL_SOCKET, socket.SO_ERROR)
    say("refused", it.send, b"x")
    await_event(it, select.POLLIN)
    say("recv", it.recv, 10)
    say("recv", it.recv, 10, socket.MSG_DONTWAIT)
    say("disconnect", call, "connect", it.fileno(), bytes(16), 16)
    say("names", lambda: (it.getsockname(), say("peer", it.getpeername)))
    tell("datagram 4")
    await_event(it, select.POLLIN)
    say("from anybody", it.recvfrom, 10)
    say("shut, wrong", it.shutdown, 3)
    say("shut, unconnected", it.shutdown, socket.SHUT_WR)
    say("send", it.sendto, b"x", FAR)
    say("events", polled, it)
    it.close()
    it = bound_datagrams()
    it.connect(FAR)
    late = threading.Timer(0.1, it.shutdown, [socket.SHUT_RD])
    late.start()
    say("recv until the end", it.recvfrom, 10)
    late.join()
    say("recvmsg", it.recvmsg, 10, 100)
    say("without waiting", it.recv, 10, socket.MSG_DONTWAIT)
    say("events", polled, it)
    tell("datagram 4")
    say("after the end", lambda: (time.sleep(0.1), it.recvfrom(10)))
    say("shut", it.shutdown, socket.SHUT_RDWR)
    say("send", it.send, b"x")
    say("events", polled, it)
    say("null", call, "recv", it.fileno(), None, 10, socket.MSG_DONTWAIT)
    for name in ("send", "recv"):
        kernels = ctypes.c_void_p(2**64 - 4096)
        say(f"{name}, the kernel's memory", call, name, it.fileno(), kernels, 10, socket.MSG_DONTWAIT)
    it.close()


peer() if sys.argv[1:] == ["peer"] else main()

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
    say("opened again", it.send, b"x", 0x20000000)  # MSG_FASTOPEN
    say("reset", it.recv, 10)
    say("then", it.recv, 10)
    say("opened at the end", it.send, b"x", 0x20000000)
    say("send", it.send, b"x")
    say("send without a signal", it.send, b"x", socket.MSG_NOSIGNAL)
    say("peer", it.getpeername)
    say("shutdown", it.shutdown, socket.SHUT_WR)
    say("events", polled, it)
    it.close()
    it = connection()
    tell("reset")
    await_event(it, select.POLLERR)
    for place, room in ((None, -1), (ctypes.create_string_buffer(4), -1)):
        say("SO_ERROR, no room", c, "getsockopt", it.fileno(), socket.SOL_SOCKET, socket.SO_ERROR, place, ctypes.byref(ctypes.c_int(room)))
    say("SO_ERROR, no length", c, "getsockopt", it.fileno(), socket.SOL_SOCKET, socket.SO_ERROR, ctypes.create_string_buffer(4), None)
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
    much = bytes(30_000_000) # before the time runs
    late = threading.Timer(0.6, tell, ["reset"])
    late.start()
    say("sent in part", lambda: 0 < it.send(much) < 30_000_000)
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

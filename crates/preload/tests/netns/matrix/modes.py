POLLRDNORM, POLLRDBAND, POLLWRNORM, POLLWRBAND = 0x40, 0x80, 0x100, 0x200
EVENTS = {"IN": 1, "PRI": 2, "OUT": 4, "ERR": 8, "HUP": 16, "RDNORM": 64, "WRNORM": 256, "RDHUP": 0x2000}


def named(mask):
    """Names of events, but for those of bands."""
    return "|".join(name for name, bit in EVENTS.items() if mask & bit) or "none"


def ppoll(it, mask):
    """ppoll, by its own time-out and mask."""
    place = ctypes.create_string_buffer(8)

    def wait(wait_ms):
        struct.pack_into("ihh", place, 0, it.fileno(), mask & 0xFFFF, 0)
        time = struct.pack("ll", wait_ms // 1000, wait_ms % 1000 * 1_000_000)
        found = c("ppoll", place, size(1), time, bytes(128))
        return found, named(struct.unpack_from("ihh", place)[2] & 0xFFFF)

    return wait


def pselect(it, mask):
    """pselect, for one of three sets."""

    def wait(wait_ms):
        number, sets = it.fileno(), [ctypes.create_string_buffer(128) for _ in range(3)]
        for bits, bit in zip(sets, (select.EPOLLIN, select.EPOLLOUT, select.EPOLLPRI)):
            if mask & bit:
                bits[number // 8] = 1 << number % 8
        time = struct.pack("ll", wait_ms // 1000, wait_ms % 1000 * 1_000_000)
        found = c("pselect", number + 1, *sets, time, None)
        return found, [any(bits.raw) for bits in sets]

    return wait


def epoll_pwait(it, mask):
    inner = select.epoll()
    inner.register(it, mask)
    place = ctypes.create_string_buffer(12 * 4)

    def wait(wait_ms):
        found = c("epoll_pwait", inner.fileno(), place, 4, wait_ms, bytes(128))
        return found, named(struct.unpack_from("=IQ", place)[0]) if found else ""

    return wait


def epoll_pwait2(it, mask):
    inner = select.epoll()
    inner.register(it, mask)
    place = ctypes.create_string_buffer(12 * 4)

    def wait(wait_ms):
        time = struct.pack("ll", wait_ms // 1000, wait_ms % 1000 * 1_000_000)
        found = c("epoll_pwait2", inner.fileno(), place, 4, time, None)
        return found, named(struct.unpack_from("=IQ", place)[0]) if found else ""

    return wait


def epoll_exclusive(it, mask):
    return epoll(it, mask | select.EPOLLEXCLUSIVE)


MORE_WAITS = (ppoll, pselect, epoll_pwait, epoll_pwait2, epoll_exclusive)


def more_waits(connection, tell):
    """Further ways to wait, for each kind of socket."""
    for wait in MORE_WAITS:
        name, both = wait.__name__, select.EPOLLIN | select.EPOLLOUT
        udp = bound_datagrams()
        waiter = wait(udp, both)
        say(f"{name} udp", waiter, WAIT_MS)
        waiter = wait(udp, select.EPOLLIN)
        say(f"{name} udp nothing", waiter, 10)
        tell("datagram 3")
        say(f"{name} udp datagram", waiter, WAIT_MS)
        udp.close()
        listener = LISTENER[0]
        waiter = wait(listener, both)
        say(f"{name} listener nothing", waiter, 10)
        tell("connect")
        say(f"{name} listener", waiter, WAIT_MS)
        it = listener.accept()[0]
        say(f"{name} listener no more", waiter, 0)
        waiter = wait(it, both)
        say(f"{name} connection", waiter, WAIT_MS)
        tell("send 3")
        await_event(it, select.POLLIN)
        say(f"{name} bytes", waiter, WAIT_MS)
        it.recv(3, socket.MSG_WAITALL)
        say(f"{name} read", waiter, 0)
        tell("shut")
        await_event(it, select.POLLRDHUP)
        say(f"{name} end", waiter, WAIT_MS)
        it.shutdown(socket.SHUT_WR)
        await_event(it, 0)
        say(f"{name} both ends", waiter, WAIT_MS)
        it.close()
        tell("close")


def bits(it, asked=0x23FF):
    """Events of poll, with those of data that is normal."""
    poll = select.poll()
    poll.register(it, asked)
    return named(sum(mask for _, mask in poll.poll(0)))


def event_bits(connection, tell):
    """All events of poll, in each state."""
    udp = bound_datagrams()
    say("udp", bits, udp)
    tell("datagram 3")
    await_bytes(udp, 3)
    say("datagram", bits, udp)
    for asked in (0, 1, 4, POLLRDNORM, POLLWRNORM, POLLRDBAND, 0x2000):
        say(f"asked {asked}", bits, udp, asked)
    udp.close()
    say("listener", bits, LISTENER[0])
    it = connection()
    say("connection", bits, it)
    tell("send 3")
    await_bytes(it, 3)
    say("bytes", bits, it)
    for asked in (0, 1, 4, POLLRDNORM, POLLWRNORM, 0x2000):
        say(f"asked {asked}", bits, it, asked)
    it.recv(3, socket.MSG_PEEK)
    say("peeked", bits, it)
    it.recv(2)
    say("part", bits, it)
    it.shutdown(socket.SHUT_WR)
    say("shut for writing", bits, it)
    it.recv(2)
    say("read", bits, it)
    it.shutdown(socket.SHUT_RD)
    say("shut for both", bits, it)
    it.close()
    tell("close")
    for first in (socket.SHUT_RD, socket.SHUT_WR):
        it = connection()
        it.shutdown(first)
        say(f"shut {first}", bits, it)
        tell("send 5")
        say("bytes all the same", await_bytes, it, 5)
        say("bits", bits, it)
        say("recv", it.recv, 3)
        say("recv", it.recv, 3)
        if first == socket.SHUT_RD:
            say("recv", it.recv, 3)
            say("send", it.send, b"abc")
            say("arrived", tell, "read 3")
        else:
            say("recv nothing", it.recv, 3, socket.MSG_DONTWAIT)
            say("peer's end", tell, "end")
        say("bits", bits, it)
        tell("shut")
        await_event(it, 0x2000)
        if first == socket.SHUT_WR:
            await_event(it, 0)
        say("bits at the end", bits, it)
        say("recv at the end", it.recv, 3)
        say("send at the end", it.send, b"x", socket.MSG_NOSIGNAL)
        it.close()
        tell("close")


def edges(connection, tell):
    """Edge-triggered and one-shot epoll: what is told once, and when again."""
    it = connection()
    waits = select.epoll()
    found = lambda wait_ms=0: [named(mask) for _, mask in waits.poll(wait_ms / 1000)]
    all = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP
    waits.register(it, all | select.EPOLLET)
    say("new", found, WAIT_MS)
    say("again", found)
    tell("send 5")
    await_bytes(it, 5)
    say("bytes", found, WAIT_MS)
    say("again", found)
    say("read all", it.recv, 5)
    say("read", found)
    tell("send 5")
    await_bytes(it, 5)
    say("more", found, WAIT_MS)
    waits.modify(it, all | select.EPOLLET)
    say("modified", found, WAIT_MS)
    say("again", found)
    waits.modify(it, select.EPOLLIN | select.EPOLLONESHOT)
    say("once", found, WAIT_MS)
    say("again", found)
    tell("shut")
    await_event(it, select.POLLRDHUP)
    say("disarmed", found, 20)
    waits.modify(it, all | select.EPOLLONESHOT)
    say("armed", found, WAIT_MS)
    waits.modify(it, 0)
    say("asked for nothing", found)
    waits.modify(it, all | select.EPOLLET)
    say("edge", found, WAIT_MS)
    it.shutdown(socket.SHUT_WR)
    say("hung up", found, WAIT_MS)
    say("again", found)
    for name, event in (("register", all), ("modify", all), ("unregister", None)):
        call = getattr(waits, name)
        arguments = () if event is None else (event,)
        say(name, call, it, *arguments)
    say("modify", waits.modify, it, all)
    say("unregister", waits.unregister, it)
    say("exclusive", waits.register, it, select.EPOLLIN | select.EPOLLEXCLUSIVE)
    say("exclusive, modified", waits.modify, it, select.EPOLLIN)
    say("exclusive, modified", waits.modify, it, select.EPOLLIN | select.EPOLLEXCLUSIVE)
    waits.unregister(it)
    say("exclusive once", waits.register, it, select.EPOLLIN | select.EPOLLEXCLUSIVE | select.EPOLLONESHOT)
    it.close()
    tell("close")
    # An edge once there is room again.
    it = connection()
    waits.register(it, select.EPOLLOUT | select.EPOLLET)
    say("writable", found, WAIT_MS)
    sent = fill(it)
    found()  # it may have been full before
    tell(f"read {sent}")
    say("room", found, WAIT_MS)
    it.setblocking(False)
    say("reset, unread", lambda: tell("reset"))
    say("reset", found, WAIT_MS)
    say("again", found)
    it.close()
    # Of two sets both learn of it.
    it = connection()
    others = [select.epoll() for _ in range(2)]
    for other in others:
        other.register(it, select.EPOLLIN | select.EPOLLET)
    tell("send 1")
    for other in others:
        say("each", lambda: [named(mask) for _, mask in other.poll(20)])
    second = it.dup()
    waits.register(second, select.EPOLLIN)
    it.close()
    say("of a duplicate", found, WAIT_MS)
    say("still of the other", lambda: [named(mask) for _, mask in others[0].poll(0)])
    tell("send 1")
    say("read", lambda: (await_bytes(second, 2), second.recv(9)))
    second.close()
    say("closed", found)
    tell("close")


def listener_edges(connection, tell):
    """A listener in sets of epoll, and accepted by several threads."""
    listener = LISTENER[0]
    waits = select.epoll()
    found = lambda wait_ms=0: [named(mask) for _, mask in waits.poll(wait_ms / 1000)]
    waits.register(listener, select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET)
    say("new", found, 10)
    tell("connect")
    say("connection", found, WAIT_MS)
    say("again", found)
    listener.accept()[0].close()
    tell("close")
    tell("connect")
    say("another", found, WAIT_MS)
    listener.accept()[0].close()
    say("none", found)
    tell("close")
    got = []
    acceptors = [threading.Thread(target=lambda: got.append(listener.accept()[0])) for _ in range(3)]
    for acceptor in acceptors:
        acceptor.start()
    for count in range(3):
        tell("connect")
        until(lambda: len(got) > count)
    for acceptor in acceptors:
        acceptor.join()
    print("accepted by threads:", len(got))
    for it in got:
        it.close()
    second = listener.dup()
    third = socket.socket(fileno=os.dup(listener.fileno()))
    third.close()
    tell("connect")
    say("of a duplicate", second.accept()[0].getsockname)
    second.setblocking(False)
    say("shared flag", listener.getblocking)
    say("flag", lambda: fcntl.fcntl(listener, fcntl.F_GETFL) & os.O_NONBLOCK != 0)
    say("no wait", lambda: os_accept(listener))
    listener.setblocking(True)
    second.close()
    say("TCP_INFO", lambda: listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)[0])
    tell("close")


def woken(connection, tell):
    """Threads that wait while another one shuts the connection down."""
    for wait in WAITS + MORE_WAITS:
        it = connection()
        waiter = wait(it, select.EPOLLIN)
        late = threading.Timer(0.05, it.shutdown, [socket.SHUT_RDWR])
        late.start()
        say(f"{wait.__name__} shut down", waiter, WAIT_MS)
        late.join()
        it.close()
        tell("close")
    for how in (socket.SHUT_RD, socket.SHUT_WR, socket.SHUT_RDWR):
        it = connection()
        late = threading.Timer(0.05, it.shutdown, [how])
        it.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 300_000))
        late.start()
        say(f"recv, shut {how}", it.recv, 5)
        late.join()
        it.close()
        tell("close")
    it = connection()
    much = bytes(30_000_000) # before the time runs
    late = threading.Timer(0.6, it.shutdown, [socket.SHUT_WR])
    late.start()
    say("sent in part", lambda: 0 < it.send(much) < 30_000_000)
    late.join()
    say("then", it.send, b"x", socket.MSG_NOSIGNAL)
    it.close()
    tell("close")
    it = connection()
    it.setblocking(False)
    late = threading.Timer(0.05, tell, ["send 3"])
    late.start()
    say("poll for ever", polled, it, select.POLLIN, -1)
    late.join()
    it.close()
    tell("close")

def messages(pieces, name=None, room=None):
    """struct mmsghdr for each piece: bytes to be sent, or a number of bytes to be received, or None for no memory."""
    kept, many = [], (Header * max(len(pieces), 1))()
    for header, piece in zip(many, pieces):
        place = ctypes.create_string_buffer(piece or 1) if isinstance(piece, int) else ctypes.create_string_buffer(piece or b"")
        length = piece if isinstance(piece, int) else 5 if piece is None else len(piece)
        vector = (ctypes.c_size_t * 2)(0 if piece is None else ctypes.addressof(place), length)
        header.vectors, header.count = ctypes.addressof(vector), 1
        if name is not None:
            named = ctypes.create_string_buffer(name, max(len(name), 16))
            header.name, header.name_len = ctypes.addressof(named), len(name)
            kept.append(named)
        kept += [place, vector]
    many.kept = kept
    return many


def lens(many):
    return [(header.len, header.flags, header.name_len) for header in many]


FAR_NAME = struct.pack("H", 2) + struct.pack("!H4s8x", 9, socket.inet_aton("10.9.0.2"))


def many_sent(connection, tell):
    """sendmmsg, of which a message is refused."""
    udp, wait = bound_datagrams(), socket.MSG_DONTWAIT
    for what, pieces in (("all", [b"one", b"two", b"three"]), ("empty ones", [b"", b"x", b""]), ("too long", [b"a", bytes(70_000), b"b"]),
                         ("too long first", [bytes(70_000), b"b"]), ("no memory", [b"a", None, b"b"]), ("no memory first", [None, b"b"])):
        many = messages(pieces, FAR_NAME)
        say(f"sendmmsg {what}", c, "sendmmsg", udp.fileno(), many, len(pieces), wait)
        say("lengths", lambda: [header.len for header in many])
        for _ in range(sum(header.len > 0 or not piece for header, piece in zip(many, pieces)) if "no memory" not in what else many[0].len):
            say("heard", tell, "hear")
        say("no error left", udp.getsockopt, socket.SOL_SOCKET, socket.SO_ERROR)
    many = messages([b"a", b"b"])
    say("sendmmsg to nobody", c, "sendmmsg", udp.fileno(), many, 2, wait)
    many = messages([b"a", b"b"], FAR_NAME[:8])
    say("sendmmsg to a short name", c, "sendmmsg", udp.fileno(), many, 2, wait)
    udp.close()
    it = connection()
    many = messages([b"one", b"two", b"", b"three"])
    say("sendmmsg", c, "sendmmsg", it.fileno(), many, 4, wait)
    say("lengths", lens, many)
    say("arrived", tell, "read 11")
    many = messages([b"one", None])
    say("sendmmsg, no memory", c, "sendmmsg", it.fileno(), many, 2, wait)
    say("arrived", tell, "read 3")
    many = messages([bytes(30_000_000), b""])
    say("sendmmsg, a part", c, "sendmmsg", it.fileno(), many, 2, wait)
    say("arrived", lambda: tell(f"read {many[0].len}") and 0 < many[0].len < 30_000_000)
    sent = fill(it)
    many = messages([bytes(3)])
    # A peer that takes more late makes room for some.
    for flags in (wait, 0):
        it.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 50_000))
        while (got := c("sendmmsg", it.fileno(), many, 1, flags)) == 1:
            sent += many[0].len
        print("sendmmsg, no room:", got)
    say("taken", tell, f"read {sent}")
    it.shutdown(socket.SHUT_WR)
    say("sendmmsg after the end", c, "sendmmsg", it.fileno(), many, 1, wait)
    it.close()
    tell("close")


def many_received(connection, tell):
    """recvmmsg, with time-outs of the call and of the socket."""
    udp, wait, one = bound_datagrams(), socket.MSG_DONTWAIT, 0x10000

    def arrive(*lens):
        for length in lens:
            tell(f"datagram {length}")
        await_event(udp, select.POLLIN)
        time.sleep(0.3 if lens[1:] else 0)  # nothing tells of those behind the first

    def receive(what, rooms, flags=0, limit=None, name=bytes(16)):
        many = messages(rooms, name)
        place = limit and ctypes.create_string_buffer(struct.pack("ll", *limit), 16)
        say(f"recvmmsg {what}", c, "recvmmsg", udp.fileno(), many, len(rooms), flags, place)
        say("lengths", lens, many)
        if limit and limit != (0, 0):
            left = struct.unpack("ll", place.raw)
            print("time is left:", left < limit, left > (0, 0))

    receive("nothing", [10, 10], wait)
    arrive(3, 0, 5)
    receive("three of four", [10, 2, 2, 10], wait)
    arrive(3, 4)
    receive("one waits, then none", [10, 10, 10], one)
    arrive(3, 4)
    receive("no time", [10, 10, 10], 0, (0, 0))
    receive("no time, one more", [10, 10, 10], wait, (0, 0))
    arrive(3, 4)
    receive("time", [10, 10], 0, (10, 0))
    arrive(3)
    receive("no more", [10, 10], wait, (10, 0))
    arrive(3)
    receive("peeked", [10, 10], wait | socket.MSG_PEEK)
    receive("cut", [2, 10], wait | socket.MSG_TRUNC)
    arrive(3)
    receive("without a name", [2], wait, name=None)
    for limit in ((0, 1_000_000_000), (0, -1), (-1, 0)):
        receive(f"wrong time {limit}", [10], wait, limit)
    arrive(3, 4)
    receive("no memory", [10, None, 10], wait)
    say("then", udp.recv, 10, wait)
    udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 50_000))
    receive("until the socket's time-out", [10, 10])
    arrive(3)
    receive("one, and until the socket's time-out", [10, 10])
    say("no error is left", udp.getsockopt, socket.SOL_SOCKET, socket.SO_ERROR)
    say("recv", udp.recv, 10, wait)
    udp.connect(("10.9.0.2", 99))
    udp.send(b"x")
    await_event(udp, select.POLLIN)
    receive("refused", [10, 10], wait)
    receive("then", [10, 10], wait)
    udp.close()
    udp = it = connection()
    tell("send 10")
    await_bytes(it, 10)
    receive("bytes", [3, 0, 3, 100], wait)
    tell("send 10")
    await_bytes(it, 10)
    receive("bytes, and one waits", [3, 100, 3], one)
    tell("send 5")
    await_bytes(it, 5)
    receive("bytes, no time", [3, 100, 3], 0, (0, 0))
    say("left", it.recv, 10, wait)
    tell("send 5")
    tell("shut")
    await_event(it, select.POLLRDHUP)
    receive("to the end", [3, 100, 3, 3])
    it.close()
    tell("close")


def signals_sent(connection, tell):
    """SIGPIPE, or none, of each call that sends after the end."""
    for end in ("shutdown", "reset", "reset, told"):
        calls = {
            "send": lambda n: c("send", n, b"x", size(1), 0),
            "send, no signal": lambda n: c("send", n, b"x", size(1), socket.MSG_NOSIGNAL),
            "send nothing": lambda n: c("send", n, b"", size(0), 0),
            "write": lambda n: c("write", n, b"x", size(1)),
            "write nothing": lambda n: c("write", n, b"", size(0)),
            "writev": lambda n: c("writev", n, messages([b"x"])[0].vectors and (ctypes.c_size_t * 2)(ctypes.addressof(X), 1), 1),
            "sendmsg": lambda n: c("sendmsg", n, messages([b"x"]), 0),
            "sendmmsg": lambda n: c("sendmmsg", n, messages([b"x"]), 1, 0),
            "sendto": lambda n: c("sendto", n, b"x", size(1), 0, FAR_NAME, 16),
            "urgent": lambda n: c("send", n, b"x", size(1), socket.MSG_OOB),
            "sendfile": lambda n: c("sendfile", n, FILE, ctypes.byref(ctypes.c_long(0)), size(10)),
            "sendfile nothing": lambda n: c("sendfile", n, FILE, ctypes.byref(ctypes.c_long(0)), size(0)),
            "splice": lambda n: c("splice", PIPE[0], None, n, None, size(1), 0),
        }
        for name, call in calls.items():
            it = connection()
            if end == "shutdown":
                it.shutdown(socket.SHUT_WR)
            else:
                tell("reset")
                await_event(it, select.POLLERR)
                if end == "reset, told":
                    it.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            before = len(SIGNALS)
            os.write(PIPE[1], b"x")
            say(f"{end}, {name}", call, it.fileno())
            print("raised:", SIGNALS[before:])
            say("again", call, it.fileno())
            say("events", polled, it)
            os.set_blocking(PIPE[0], False)
            try:
                os.read(PIPE[0], 100)
            except BlockingIOError:
                pass
            os.set_blocking(PIPE[0], True)
            it.close()
            if end == "shutdown":
                tell("close")


SIGNALS = []
X = ctypes.create_string_buffer(b"x")
FILE, PIPE = os.open("/proc/self/exe", os.O_RDONLY), os.pipe()


def copies(connection, tell):
    """sendfile and splice in their modes."""
    it = connection()
    number, out, into = it.fileno(), *os.pipe()
    os.write(into, b"piped")
    zero, place = os.open("/dev/zero", os.O_RDONLY), ctypes.c_long(3)
    say("sendfile of nothing", c, "sendfile", number, FILE, ctypes.byref(place), size(0))
    say("sendfile negative", c, "sendfile", number, FILE, ctypes.byref(ctypes.c_long(-1)), size(5))
    say("sendfile to a file", c, "sendfile", FILE, FILE, None, size(5))
    say("sendfile of a connection", c, "sendfile", FILE, number, None, size(5))
    say("sendfile of a connection to itself", c, "sendfile", number, number, None, size(5))
    say("sendfile to the listener", c, "sendfile", LISTENER[0].fileno(), FILE, ctypes.byref(place), size(5))
    written = os.open("/dev/null", os.O_WRONLY)
    say("sendfile of what cannot be read", c, "sendfile", number, written, None, size(5))
    folder = os.open("/", os.O_RDONLY)
    say("sendfile of a folder", c, "sendfile", number, folder, None, size(5))
    say("copy_file_range", c, "copy_file_range", FILE, None, number, None, size(5), 0)
    it.setblocking(False)
    sent = 0
    while isinstance(got := c("sendfile", number, zero, ctypes.byref(place), size(1 << 20)), int):
        sent += got
    print("sendfile, no room:", got)
    for descriptor in (zero, written, folder):
        os.close(descriptor)
    sent += fill(it)
    say("taken", tell, f"read {sent}")
    it.setblocking(True)
    say("splice to connection", c, "splice", out, None, number, None, size(5), 0)
    it.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 50_000))
    say("splice until the time-out", c, "splice", number, None, into, None, size(5), 0)
    tell("send 5")
    tell("shut")
    await_event(it, select.POLLRDHUP)
    say("splice the rest", c, "splice", number, None, into, None, size(100), 0)
    say("splice the end", c, "splice", number, None, into, None, size(100), 0)
    say("piped", os.read, out, 100)
    say("splice of the listener", c, "splice", LISTENER[0].fileno(), None, into, None, size(5), 2)
    os.write(into, b"x")
    say("splice to the listener", c, "splice", out, None, LISTENER[0].fileno(), None, size(5), 2)
    for descriptor in (out, into):
        os.close(descriptor)
    it.close()
    tell("close")


def all_waited(connection, tell):
    """MSG_WAITALL in all modes."""
    all = socket.MSG_WAITALL
    it = connection()
    length = lambda room, flags: len(it.recv(room, flags))
    say("nothing", length, 10, all | socket.MSG_DONTWAIT)
    tell("send 5")
    await_bytes(it, 5)
    say("some", length, 10, all | socket.MSG_DONTWAIT)
    it.setblocking(False)
    say("nothing", length, 10, all)
    tell("send 5")
    await_bytes(it, 5)
    say("some", length, 10, all)
    it.setblocking(True)
    tell("send 5")
    await_bytes(it, 5)
    late = threading.Timer(0.05, it.shutdown, [socket.SHUT_RD])
    late.start()
    say("until the end", length, 10, all)
    late.join()
    it.close()
    tell("close")
    it = connection()
    tell("send 5")
    late = threading.Timer(0.05, tell, ["urgent"])
    late.start()
    it.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 300_000))
    say("until the urgent byte", length, 10, all)
    late.join()
    it.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
    say("the urgent byte", c, "recvmmsg", it.fileno(), messages([10, 10]), 2, socket.MSG_OOB, None)
    late = threading.Timer(0, tell, ["send 3000000"])
    late.start()
    say("discarded", c, "recv", it.fileno(), None, size(3_000_000), all | socket.MSG_TRUNC)
    late.join()
    tell("close")
    say("discarded at the end", c, "recv", it.fileno(), None, size(10), all | socket.MSG_TRUNC)
    it.close()
    it = connection()
    tell("send 5")
    await_bytes(it, 5)
    it.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 50_000))
    say("discarded until the time-out", lambda: it.recv_into(bytearray(10), 10, all | socket.MSG_TRUNC))
    tell("send 5")
    await_bytes(it, 5)
    say("recvmsg", lambda: it.recvmsg_into([bytearray(3), bytearray(7)], 0, all)[0])
    say("recvmsg flags", lambda: it.recvmsg(5, 100, socket.MSG_DONTWAIT | 0x40000000))
    tell("send 5")
    await_bytes(it, 5)
    say("recvmsg flags", lambda: it.recvmsg(2, 100, 0x40000000)[1:])
    say("recvmsg cut", lambda: it.recvmsg(2, 100, socket.MSG_TRUNC)[1:])
    it.close()
    tell("close")


def kinds_of_files(connection, tell):
    """Calls on descriptors that are not of sockets alone."""
    for kind, it in kinds(connection, tell):
        number, room = it.fileno(), ctypes.create_string_buffer(200)
        for name, arguments in (("lseek", (0, 0)), ("ftruncate", (0,)), ("fsync", ()), ("fdatasync", ()), ("isatty", ()),
                                ("flock", (2 | 4,)), ("fchmod", (0o777,)), ("posix_fadvise", (0, 0, 0)), ("fallocate", (0, 0, 10)),
                                ("fchdir", ()), ("syncfs", ()), ("getdents64", (room, 200)), ("sockatmark", ()), ("isfdtype", (0o140000,))):
            say(f"{kind} {name}", lambda: c(name, number, *arguments))
        for command in (1, 3, 9, 11, 1031, 1032, 1034, 1036, 99):  # GETFD, GETFL, GETOWN, GETSIG, SETPIPE_SZ, GETPIPE_SZ, ...
            say(f"{kind} fcntl {command}", lambda: c("fcntl", number, command, 0))
        for request, argument in ((0x5401, room), (0x8912, ctypes.create_string_buffer(16)), (0x8933, ctypes.create_string_buffer(b"exa", 40)),
                                  (0x8915, ctypes.create_string_buffer(b"exa", 40)), (0x891B, ctypes.create_string_buffer(b"exa", 40)),
                                  (0x8919, ctypes.create_string_buffer(b"exa", 40)), (0x8913, ctypes.create_string_buffer(b"exa", 40)),
                                  (0x8921, ctypes.create_string_buffer(b"exa", 40)), (0x8927, ctypes.create_string_buffer(b"nil", 40)),
                                  (0x5421, None), (0x541B, None), (0x5411, None), (0x8905, None), (0x1234, room)):
            got = c("ioctl", number, request, argument)
            print(f"{kind} ioctl {request:x}: {got}", argument.raw[16:24].hex() if got == 0 and argument is not room and request not in (0x8912, 0x8933) else "")
        say(f"{kind} kind", lambda: os.fstat(number).st_mode >> 12)
        say(f"{kind} link", lambda: os.readlink(f"/proc/self/fd/{number}").split(":")[0])
        for extra in (socket.MSG_CTRUNC, socket.MSG_EOR, 0x800, 0x4, 0x4000000):
            if kind == "connection":
                say(f"{kind} send, flag {extra:x}", lambda: c("send", number, b"x", size(1), extra | socket.MSG_NOSIGNAL))
                say("arrived", tell, "read 1")
            if kind.endswith("udp"):
                say(f"{kind} send, flag {extra:x}", lambda: c("sendto", number, b"x", size(1), extra, FAR_NAME, 16))
                if extra != 0x4:
                    say("heard", tell, "hear")


def by_number(connection, tell):
    """System calls by their numbers, as libuv closes descriptors."""
    read, write, close = (63, 64, 57) if os.uname().machine == "aarch64" else (0, 1, 3)
    it = connection()
    it.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes(8))  # the listener's may be a reset
    it = it.detach()
    tell("send 3")
    await_event(it, select.POLLIN)
    room = ctypes.create_string_buffer(10)
    say("read by number", c, "syscall", read, it, room, size(10))
    say("write by number", c, "syscall", write, it, b"abc", size(3))
    say("arrived", tell, "read 3")
    say("close by number", c, "syscall", close, it)
    say("the peer sees", tell, "end")
    file = os.open("/proc/self/comm", os.O_RDONLY)
    print("a file at the number:", file == it, len(os.read(file, 100)) > 0)
    os.close(file)
    say("close by number again", c, "syscall", close, it)
    tell("close")

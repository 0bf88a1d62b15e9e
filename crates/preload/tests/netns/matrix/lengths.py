LIBC = ctypes.CDLL(None, use_errno=True)


def c(name, *arguments):
    """Result of a function of the C library, or its error."""
    function = getattr(LIBC, name)
    function.restype = ctypes.c_long
    ctypes.set_errno(0)
    result = function(*arguments)
    failed = result in (-1, 2**32 - 1)
    return ERRNO[ctypes.get_errno()] if failed else result & (2**32 - 1)


LISTENER = []


def size(value):
    return ctypes.c_size_t(value % 2**64)


def kinds(connection, tell):
    """A socket of each kind: of datagrams, connected, a listener and a connection."""
    udp = bound_datagrams()
    yield "udp", udp
    udp.connect(FAR)
    yield "connected udp", udp
    udp.close()
    yield "listener", LISTENER[0]
    it = connection()
    yield "connection", it
    it.close()
    tell("close")


def option_lengths(connection, tell):
    """Options by buffers that are too short, too long, or none."""
    level, tcp, ip = socket.SOL_SOCKET, socket.IPPROTO_TCP, socket.IPPROTO_IP
    options = [(level, getattr(socket, name)) for name in (
        "SO_ERROR", "SO_TYPE", "SO_KEEPALIVE", "SO_REUSEADDR", "SO_LINGER", "SO_RCVTIMEO", "SO_OOBINLINE", "SO_ACCEPTCONN",
        "SO_DOMAIN", "SO_PROTOCOL", "SO_BROADCAST", "SO_DONTROUTE", "SO_PRIORITY", "SO_RCVLOWAT", "SO_MARK")]
    options += [(tcp, getattr(socket, name)) for name in (
        "TCP_NODELAY", "TCP_QUICKACK", "TCP_CORK", "TCP_KEEPIDLE", "TCP_USER_TIMEOUT", "TCP_DEFER_ACCEPT", "TCP_LINGER2")]
    options += [(ip, getattr(socket, name)) for name in ("IP_TTL", "IP_TOS", "IP_RECVTOS", "IP_OPTIONS")]
    options += [(socket.IPPROTO_UDP, 1), (socket.IPPROTO_IPV6, 26), (level, 999), (99, 1)]
    for kind, it in kinds(connection, tell):
        number = it.fileno()
        for where, name in options:
            answers = []
            for room in (0, 1, 3, 4, 5, 8, 16, 17, -1):
                value, len = ctypes.create_string_buffer(b"\xee" * 24), ctypes.c_int(room)
                got = c("getsockopt", number, where, name, value, ctypes.byref(len))
                answers.append((got, len.value, value.raw[:max(len.value, 0)].hex()))
            answers.append(c("getsockopt", number, where, name, None, ctypes.byref(ctypes.c_int(4))))
            answers.append(c("getsockopt", number, where, name, None, ctypes.byref(ctypes.c_int(0))))
            answers.append(c("getsockopt", number, where, name, ctypes.create_string_buffer(8), None))
            print(f"{kind} {where} {name}: {answers}")
    for kind, it in kinds(connection, tell):
        number = it.fileno()
        for where, name in ((level, socket.SO_KEEPALIVE), (level, socket.SO_REUSEADDR), (level, socket.SO_LINGER),
                            (level, socket.SO_RCVTIMEO), (level, socket.SO_SNDTIMEO), (level, socket.SO_RCVBUF),
                            (tcp, socket.TCP_NODELAY), (tcp, socket.TCP_CORK), (tcp, socket.TCP_QUICKACK),
                            (tcp, socket.TCP_KEEPIDLE), (ip, socket.IP_TTL), (ip, socket.IP_TOS)):
            if kind.endswith("udp") and where == tcp:
                continue
            value = ctypes.create_string_buffer(struct.pack("ll", 0, 0), 16)
            value[0] = 1 if where != level or name not in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO) else 0
            answers = [c("setsockopt", number, where, name, value, len) for len in (0, 1, 3, 4, 5, 8, 15, 16, -1)]
            answers += [c("setsockopt", number, where, name, None, len) for len in (0, 4, 16)]
            print(f"{kind} set {where} {name}: {answers}")
        for seconds, micros in ((0, 999_999), (0, 1_000_000), (0, -1), (-1, 0), (-1, 5), (2**40, 0), (2**62, 0), (3, 7)):
            for name in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                say(f"{kind} time-out {seconds} {micros}", it.setsockopt, level, name, struct.pack("ll", seconds, micros))
                say(f"{kind} time-out", lambda: struct.unpack("ll", it.getsockopt(level, name, 16)))
                it.setsockopt(level, name, struct.pack("ll", 0, 0))


def buffers(connection, tell):
    """Calls with null pointers, nothing to do and too much of it."""
    room = ctypes.create_string_buffer(1000)
    here, wait = ctypes.addressof(room), socket.MSG_DONTWAIT
    for kind, it in kinds(connection, tell):
        number = it.fileno()
        for has_some in (False, True):
            if has_some and kind in ("udp", "connected udp"):
                tell("datagram 10")
                await_bytes(it, 10)
            if has_some and kind == "connection":
                tell("send 100")
                await_bytes(it, 100)
            what = f"{kind} {has_some}"
            for place, len in ((None, 0), (None, 5), (here, 0), (here, 2**31 - 1), (here, 2**31), (here, 2**62), (here, -1),
                               (2**63, 0), (2**63, 1), (8, 1)):
                if has_some and len == 5 and kind.endswith("udp"):
                    continue  # takes the datagram
                flags = wait | (socket.MSG_PEEK if has_some else 0)
                arguments = ctypes.c_void_p(place), size(len)
                say(f"{what} recv {place is None} {len}", lambda: c("recv", number, *arguments, flags))
                say(f"{what} recv, peeked {place is None} {len}", lambda: c("recv", number, *arguments, wait | socket.MSG_PEEK))
                say(f"{what} recv, cut {place is None} {len}", lambda: c("recv", number, *arguments, flags | socket.MSG_TRUNC))
            for count in (0, 1, 1024, 1025, -1):
                vectors = (ctypes.c_size_t * 2050)()
                for name in ("readv", "writev"):
                    say(f"{what} {name} of {count} empty", lambda: c(name, number, vectors, count))
                    if count != 1 or name == "writev":
                        say(f"{what} {name} of {count} nowhere", lambda: c(name, number, None, count))
                header = Header(None, 0, ctypes.addressof(vectors), count % 2**64)
                for name in ("sendmsg", "recvmsg"):
                    if name == "recvmsg" and has_some and kind.endswith("udp") or name == "sendmsg" and kind == "connected udp":
                        continue
                    say(f"{what} {name} of {count} empty", lambda: c(name, number, ctypes.byref(header), wait))
            for name in ("sendmsg", "recvmsg"):
                say(f"{what} {name} of nothing", lambda: c(name, number, None, wait))
            for name in ("sendmmsg", "recvmmsg"):
                more = (None,) if name == "recvmmsg" else ()
                for count in (0, 1):
                    say(f"{what} {name} of {count} nowhere", lambda: c(name, number, None, count, wait, *more))
            for len in (0, 5):
                say(f"{what} send nowhere {len}", lambda: c("send", number, None, size(len), wait | socket.MSG_NOSIGNAL))
            if kind == "connection":
                say(f"{what} read huge", lambda: c("read", number, here, size(-1)))
                say(f"{what} write huge", lambda: c("write", number, here, size(-1)))
            for name in ("read", "write"):
                say(f"{what} {name} nothing", lambda: c(name, number, None, size(0)))
            for name in ("pread", "pwrite"):
                say(f"{what} {name}", lambda: c(name, number, here, size(1), size(0)))
            for name in ("preadv", "pwritev"):
                vector = (ctypes.c_size_t * 2)(here, 1)
                say(f"{what} {name}", lambda: c(name, number, vector, 1, size(0)))
            if kind.endswith("udp") and has_some:
                say(f"{what} left", it.recv, 100, wait)


def names(connection, tell):
    """Addresses that are too short, too long, null or of another family."""
    for kind, it in kinds(connection, tell):
        number = it.fileno()
        for name in ("getsockname", "getpeername"):
            for room in (0, 1, 2, 8, 15, 16, 17, 128, -1):
                value, len = ctypes.create_string_buffer(b"\xee" * 130), ctypes.c_int(room)
                got = c(name, number, value, ctypes.byref(len))
                family, port = value.raw[:2].hex(), value.raw[2:4].hex() if name == "getsockname" else ""
                print(f"{kind} {name} {room}: {got} {len.value} {family} {port} {value.raw[8:].count(0xee)}")
            say(f"{kind} {name} nowhere", lambda: c(name, number, None, ctypes.byref(ctypes.c_int(16))))
            say(f"{kind} {name} nowhere, 0", lambda: c(name, number, None, ctypes.byref(ctypes.c_int(0))))
            say(f"{kind} {name} without a length", lambda: c(name, number, value, None))
        if kind == "listener":
            accepts(it, tell)
            continue
        far = struct.pack("!HH4s8x", 0, 9, socket.inet_aton("10.9.0.2"))
        of = lambda family, rest=far[2:]: struct.pack("H", family) + rest
        if kind.endswith("udp"):
            for what, address, len in (
                ("null", None, 16), ("null, 0", None, 0), ("short", of(2), 15), ("empty", of(2), 0), ("one byte", of(2), 1),
                ("two bytes", of(2), 2), ("long", of(2) + bytes(112), 128), ("longer", of(2) + bytes(113), 129),
                ("unspecified", of(0), 16), ("unspecified, short", of(0), 8), ("IPv6", of(10, bytes(26)), 28),
                ("local", of(1), 16), ("unknown", of(77), 16), ("negative", of(2), -1),
                ("port 0", of(2, bytes(2) + far[4:]), 16), ("broadcast", of(2, b"\0\x09\xff\xff\xff\xff" + bytes(8)), 16),
                ("net's broadcast", of(2, b"\0\x09\x0a\x09\0\xff" + bytes(8)), 16),
                ("no route", of(2, b"\0\x09\xc0\0\x02\x01" + bytes(8)), 16), ("all zero", of(2, bytes(14)), 16),
            ):
                if kind == "udp" or what != "unspecified":
                    say(f"{kind} sendto {what}", lambda: c("sendto", number, b"abc", size(3), 0, address, len))
                say(f"{kind} connect {what}", lambda: c("connect", number, address, len))
                say(f"{kind} names", lambda: (it.getsockname(), it.getpeername()))
                say(f"{kind} disconnect", lambda: c("connect", number, of(0), 16))
                if kind == "connected udp":
                    it.connect(FAR)
        for what, room in (("none", None), ("negative", -1), ("0", 0), ("5", 5), ("16", 16), ("100", 100)):
            if kind.endswith("udp"):
                tell("datagram 4")
                await_bytes(it, 4)
            else:
                tell("send 4")
                await_bytes(it, 4)
            value, len = ctypes.create_string_buffer(b"\xee" * 130), ctypes.c_int(room or 0)
            reference = None if room is None else ctypes.byref(len)
            bytes_ = ctypes.create_string_buffer(10)
            say(f"{kind} recvfrom, {what}", lambda: c("recvfrom", number, bytes_, size(4), socket.MSG_DONTWAIT, value, reference))
            print(f"{kind} {len.value} {value.raw.count(0xee)}")
            say(f"{kind} then", it.recv, 10, socket.MSG_DONTWAIT)


def accepts(it, tell):
    """accept with each kind of room for an address, of which some lose the connection."""
    number, value = it.fileno(), ctypes.create_string_buffer(130)
    for what, flags in (("unknown flag", 1), ("O_APPEND", os.O_APPEND), ("negative", -1)):
        say(f"accept4, {what}", lambda: c("accept4", number, None, None, flags))
    it.setblocking(False)
    for room in (None, -1, 0, 3, 16, 100):
        tell("connect")
        await_event(it, select.POLLIN)
        len = ctypes.c_int(room or 0)
        reference = None if room is None else ctypes.byref(len)
        got = c("accept4", number, value, reference, socket.SOCK_NONBLOCK)
        print(f"accept, room {room}:", got if isinstance(got, str) else "accepted", len.value)
        if not isinstance(got, str):
            accepted = socket.socket(fileno=got)
            say("flags", lambda: (fcntl.fcntl(got, fcntl.F_GETFL), fcntl.fcntl(got, fcntl.F_GETFD)))
            accepted.close()
        say("no more", os_accept, it)
        tell("close")
    tell("connect")
    await_event(it, select.POLLIN)
    got = c("accept", number, None, ctypes.byref(ctypes.c_int(-5)))
    print("accept without an address:", isinstance(got, int))
    os.close(got)
    tell("close")
    it.setblocking(True)

class Header(ctypes.Structure):
    """struct msghdr, in a struct mmsghdr."""
    _fields_ = [("name", ctypes.c_void_p), ("name_len", ctypes.c_int), ("vectors", ctypes.c_void_p),
                ("count", ctypes.c_size_t), ("control", ctypes.c_void_p), ("control_len", ctypes.c_size_t),
                ("flags", ctypes.c_int), ("padding", ctypes.c_int), ("len", ctypes.c_uint)]


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
    of_no_family = lambda ip: struct.pack("H", 0) + struct.pack("!H4s8x", 7, socket.inet_aton(ip))
    for kind in (socket.AF_INET6, socket.AF_INET):
        it = socket.socket(kind, socket.SOCK_DGRAM)
        it.settimeout(WAIT_MS / 1000)
        for ip, length in (("10.9.0.1", 16), ("0.0.0.0", 15), ("0.0.0.0", 16)):
            say(f"bind without a family {kind} {ip} {length}", c, "bind", it.fileno(), of_no_family(ip), length)
        if kind == socket.AF_INET:
            tell("datagram 10")
            say("the datagram", it.recv, 100)
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
    until(lambda: has_no_peer(it))
    say("shutdown of an ended one", it.shutdown, socket.SHUT_RDWR)
    it.close()


def has_no_peer(it):
    """True once both ends have come, of which poll does not tell those of the peer."""
    try:
        return not it.getpeername()
    except OSError as error:
        return error.errno == errno.ENOTCONN

# Options whose values are not the same in two runs, or are listed as others: of a cookie, of the peer's port, of the congestion control that the
# host has chosen, of sizes that the stacks choose, of clocks, of a CPU, and of the path's and of multicast of connections.
OTHERS = {
    (socket.SOL_SOCKET, 7), (socket.SOL_SOCKET, 49), (socket.SOL_SOCKET, 55), (socket.SOL_SOCKET, 57), (socket.SOL_SOCKET, 71),
    (socket.SOL_SOCKET, 26), (socket.SOL_SOCKET, 28), (socket.IPPROTO_TCP, 10), (socket.IPPROTO_TCP, 11), (socket.IPPROTO_TCP, 13), (socket.IPPROTO_TCP, 24),
    (socket.IPPROTO_TCP, 26), (socket.IPPROTO_IP, 33), (socket.IPPROTO_IP, 52), (socket.IPPROTO_IPV6, 17), (socket.IPPROTO_IPV6, 18),
    (socket.IPPROTO_IPV6, 61),
}
RANGES = (
    (socket.SOL_SOCKET, range(1, 84)), (socket.IPPROTO_TCP, range(1, 48)), (socket.IPPROTO_IP, range(1, 56)),
    (socket.IPPROTO_IPV6, range(1, 84)), (socket.IPPROTO_UDP, (1, 10, 100, 101, 102, 103, 104, 105)), (1041, (1,)), (-1, (1,)),
)
OF_ALL = [(socket.SOL_SOCKET, name) for name in (1, 2, 5, 6, 9, 10, 12, 15)] + [(socket.IPPROTO_IP, name) for name in (1, 2, 10, 15, 21, 24)]
OF_V6 = [(socket.IPPROTO_IPV6, name) for name in (16, 23, 26, 62, 67, 73, 78)]
OF_UDP = [(socket.IPPROTO_UDP, name) for name in (103, 104)] + [(socket.IPPROTO_IP, name) for name in (8, 12, 13, 20)]
OF_TCP = [(socket.IPPROTO_TCP, name) for name in (1, 3, 4, 5, 6, 8, 9, 18, 23, 25, 34)]


def of_all_kinds(connection, tell):
    """Sockets of each kind and family."""
    yield from kinds(connection, tell)
    udp = of_v6(socket.SOCK_DGRAM, BINDS["any"][0], None)
    yield "udp v6", udp
    udp.connect(FAR_V6)
    yield "connected udp v6", udp
    udp.close()
    listener = of_v6(socket.SOCK_STREAM, BINDS["any"][0], None)
    listener.listen()
    polled(listener)  # serves from here on
    yield "listener v6", listener
    for address in ("fd09::1", "10.9.0.1"):
        tell(f"connect to {address} 17")
        it = listener.accept()[0]
        yield f"connection to {address}", it
        it.close()
        tell("close")
    listener.close()


def value_of(number, level, name, room):
    value, len = ctypes.create_string_buffer(b"\xee" * 264), ctypes.c_int(room)
    got = c("getsockopt", number, level, name, value, ctypes.byref(len))
    return got, len.value, value.raw[:max(min(len.value, 16), 0)].hex()


def refusals(connection, tell):
    """Flags, names, lengths and options that are refused before anything is done."""
    COMPAT, FASTOPEN, room = -(2**31), 0x20000000, ctypes.create_string_buffer(100)
    vector = (ctypes.c_size_t * 2)(ctypes.addressof(room), 1)
    for kind, it in of_all_kinds(connection, tell):
        number, wait = it.fileno(), socket.MSG_DONTWAIT
        header = Header(None, 0, ctypes.addressof(vector), 1)
        for name in ("sendmsg", "recvmsg"):
            print(f"{kind} {name}:", c(name, number, ctypes.byref(header), COMPAT | wait))
        for name in ("sendmmsg", "recvmmsg"):
            for count in (0, 1):
                print(f"{kind} {name} {count}:", c(name, number, ctypes.byref(header), count, COMPAT | wait, None))
        if "connection" in kind:
            for place, length in ((8, 16), (ctypes.addressof(room), 1), (None, 16)):
                header = Header(place, length, ctypes.addressof(vector), 1)
                print(f"{kind} sendmsg to {length} bytes at {place and place < 9}:", c("sendmsg", number, ctypes.byref(header), wait))
            print(f"{kind} opened:", c("send", number, room, size(1), FASTOPEN | wait))
        for level, name in ((socket.SOL_SOCKET, 3), (socket.SOL_SOCKET, 4), (socket.SOL_SOCKET, 9999), (socket.IPPROTO_TCP, 11), (socket.IPPROTO_TCP, 30), (socket.IPPROTO_TCP, 35)):
            for length in (0, 1, 3):
                print(f"{kind} {level} {name}, {length} bytes:", c("setsockopt", number, level, name, bytes(8), length))


def settings(connection, tell):
    """Options by their numbers: told with each room, set with each length, and told again."""
    for kind, it in of_all_kinds(connection, tell):
        number = it.fileno()
        for level, names in RANGES:
            for name in names:
                if (level, name) not in OTHERS:
                    told = [value_of(number, level, name, room) for room in (-1, 0, 1, 3, 4, 5, 8, 16, 100)]
                    print(f"{kind} {level} {name}: {told}", c("getsockopt", number, level, name, None, ctypes.byref(ctypes.c_int(4))))
        for level, names in RANGES:
            for name in names:
                print(f"{kind} {level} {name}, a negative length:", [c("setsockopt", number, level, name, value, -1) for value in (None, bytes(8))])
                # Those of IPv6 take a null pointer for 0, and those of the last two nothing for no rule.
                if level != socket.IPPROTO_IPV6 and (level, name) not in ((socket.IPPROTO_IP, 16), (socket.IPPROTO_IP, 17)):
                    print(f"{kind} {level} {name} from nowhere:", [c("setsockopt", number, level, name, None, len) for len in (0, 4)])
        of_kind = OF_ALL + (OF_V6 if "v6" in kind or "to" in kind else []) + (OF_UDP if "udp" in kind else OF_TCP)
        for level, name in of_kind:
            for value in (0, 1, 2, 3, -1, 100, 255, 256, 70_000, 2**31 - 1):
                set = c("setsockopt", number, level, name, struct.pack("i", value) + bytes(12), 4)
                print(f"{kind} {level} {name} = {value}: {set}, then {value_of(number, level, name, 4)}")
            for len in (0, 1, 2, 3, 5, 8, 16):
                set = c("setsockopt", number, level, name, struct.pack("i", 1) + bytes(12), len)
                print(f"{kind} {level} {name}, {len} bytes: {set}, then {value_of(number, level, name, 4)}")
            c("setsockopt", number, level, name, bytes(16), 4)
        c("setsockopt", number, socket.SOL_SOCKET, socket.SO_REUSEADDR, struct.pack("i", 1), 4)  # its port is bound again below

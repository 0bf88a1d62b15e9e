def vectors(connection, tell):
    """Buffers of calls that take several: none, empty ones, without memory, too many and too long."""
    room = ctypes.create_string_buffer(2048)
    here = ctypes.addressof(room)
    cases = {
        "one": ((here, 4),), "none": (), "empty without an address": ((0, 0), (here, 4)), "empty between": ((here, 2), (0, 0), (here + 2, 2)),
        "no memory first": ((0, 3), (here, 4)), "no memory second": ((here, 2), (0, 3)), "the kernel's": ((2**64 - 4096, 4),),
        "empty, the kernel's": ((2**64 - 4096, 0), (here, 3)), "first page": ((8, 3),), "empty ones": ((here, 0), (here, 0)),
        "negative": ((here, -1),), "negative second": ((here, 2), (here, -1)), "beyond all memory": ((here, 2), (here, 2**63 - 1)),
        "beyond, first": ((here, 2**62), (here, 2)), "at most": tuple((here + at, 1) for at in range(1024)),
        "too many": tuple((here + at, 1) for at in range(1025)),
    }

    def made(pairs):
        vectors = (ctypes.c_size_t * (2 * max(len(pairs), 1)))()
        for at, (place, length) in enumerate(pairs):
            vectors[2 * at], vectors[2 * at + 1] = place % 2**64, length % 2**64
        return vectors

    def call(name, it, pairs, flags):
        vectors = made(pairs)
        header = Header(None, 0, ctypes.addressof(vectors), len(pairs))
        if name in ("sendmsg", "recvmsg"):
            return c(name, it.fileno(), ctypes.byref(header), flags), header.flags
        if name in ("sendmmsg", "recvmmsg"):
            return c(name, it.fileno(), ctypes.byref(header), 1, flags, *(None,) * (name == "recvmmsg")), header.len
        rest = {"preadv2": (ctypes.c_long(-1), 0), "pwritev2": (ctypes.c_long(-1), 0), "preadv": (ctypes.c_long(0),), "pwritev": (ctypes.c_long(0),)}
        return c(name, it.fileno(), vectors, len(pairs), *rest.get(name, ())), 0

    wait = socket.MSG_DONTWAIT
    for near, far in ((NEAR, FAR), (NEAR_V6, FAR_V6)):
        udp = socket.socket(socket.AF_INET6 if ":" in near[0] else socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind(near)
        udp.connect(far)
        udp.setblocking(False)
        tcp = connection()
        tell("nodelay")
        tcp.setblocking(False)
        for kind, it in (("udp " + near[0], udp), ("tcp", tcp)):
            for case, pairs in cases.items():
                for name in ("sendmsg", "sendmmsg", "writev", "pwritev2", "pwritev"):
                    got = call(name, it, pairs, wait)
                    sent = got[1] if name == "sendmmsg" and got[0] == 1 else got[0]
                    print(f"{kind} {name} {case}: {got}")
                    if kind == "tcp" and sent and isinstance(sent, int):
                        say("arrived", tell, f"read {sent}")
                    if kind != "tcp" and isinstance(got[0], int) and not (name.startswith(("w", "p")) and sent == 0):
                        say("heard", tell, "hear" if far == FAR else "hear v6")
                for name in ("recvmsg", "recvmmsg", "readv", "preadv2", "preadv"):
                    for flags in (0, socket.MSG_PEEK, socket.MSG_TRUNC, socket.MSG_PEEK | socket.MSG_TRUNC, socket.MSG_WAITALL):
                        if flags and "msg" not in name:
                            continue
                        print(f"{kind} {name} {case}, {flags}, nothing: {call(name, it, pairs, flags | wait)}")
                        tell("send 4" if kind == "tcp" else f"ping {near[0]} {near[1]}")
                        await_bytes(it, 4)
                        print(f"{kind} {name} {case}, {flags}: {call(name, it, pairs, flags | wait)}")
                        say("left", lambda: len(it.recv(100, wait)))
        udp.close()
        tcp.close()
        tell("close")

def sockaddr_v4(ip, port):
    return struct.pack("H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(ip) + bytes(8)


def sockaddr_v6(ip, port, scope=0):
    address = socket.inet_pton(socket.AF_INET6, ip)
    return struct.pack("H", socket.AF_INET6) + struct.pack("!HI", port, 0) + address + struct.pack("I", scope)


# Addresses that a socket of IPv6 is bound to: with the families that it then receives.
BINDS = {
    "any": (sockaddr_v6("::", 17), ("4", "6")),
    "own": (sockaddr_v6("fd09::1", 17), ("6",)),
    "mapped": (sockaddr_v6("::ffff:10.9.0.1", 17), ("4",)),
    "mapped any": (sockaddr_v6("::ffff:0.0.0.0", 17), ("4",)),
}
DESTINATIONS = {
    "v4": sockaddr_v4("10.9.0.2", 9), "v6": sockaddr_v6("fd09::2", 9), "mapped": sockaddr_v6("::ffff:10.9.0.2", 9),
    "v6, port 0": sockaddr_v6("fd09::2", 0), "no mapped route": sockaddr_v6("::ffff:192.0.2.1", 9),
    "link without scope": sockaddr_v6("fe80::1", 9), "unknown": struct.pack("H", 77) + bytes(26), "local": struct.pack("H", 1) + b"/x" + bytes(24),
}
ROOMS = (0, 1, 2, 8, 16, 24, 27, 28, 29, 64, -1)


def name_of(function, it, room=64, port=True):
    """Address that a call tells, its length, and the bytes written; without the peer's port, which is any."""
    place, len = ctypes.create_string_buffer(b"\xee" * 64), ctypes.c_int(room)
    answer = c(function, it.fileno(), place, ctypes.byref(len))
    written = place.raw[:36].hex()
    return answer, len.value, written if port else written[:4] + written[8:]


def of_v6(kind, address, only):
    it = socket.socket(socket.AF_INET6, kind)
    it.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, kind == socket.SOCK_STREAM)
    if only is not None:
        it.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
    say(f"only {only} bind", c, "bind", it.fileno(), address, len(address))
    return it


def says_family(it):
    """Options that tell the family, of which one cannot be changed any more."""
    for option in (socket.IPV6_V6ONLY, 1):  # IPV6_ADDRFORM
        say(f"option {option}", it.getsockopt, socket.IPPROTO_IPV6, option)
    for value in (0, 1):
        say(f"only = {value}", it.setsockopt, socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, value)
    say("without a value", c, "setsockopt", it.fileno(), socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, bytes(4), 3)
    say("domain", it.getsockopt, socket.SOL_SOCKET, socket.SO_DOMAIN)


def families(connection, tell):
    """Sockets of IPv6, for both families or for one."""
    for only in (None, 0, 1):
        for bound, (address, received) in BINDS.items():
            print(f"datagrams {bound}, only {only}")
            it = of_v6(socket.SOCK_DGRAM, address, only)
            if name_of("getsockname", it)[2][4:8] == "0000":
                it.close()
                continue
            of_family(it, tell, received if only != 1 else tuple(set(received) & {"6"}))
            # Sockets at addresses of IPv4 are refused by us before a route of IPv6 is looked up (EAFNOSUPPORT).
            if not bound.startswith("mapped"):
                to = sockaddr_v6("2001:db8::1", 9)
                say("no route", lambda: c("sendto", it.fileno(), b"ping", size(4), 0, to, len(to)))
            it.close()
    for only in (None, 1):
        for bound in ("any", "own", "mapped"):
            print(f"connections {bound}, only {only}")
            it = of_v6(socket.SOCK_STREAM, BINDS[bound][0], only)
            if name_of("getsockname", it)[2][4:8] != "0000":
                it.listen()
                polled(it)  # serves from here on
                says_family(it)
                say("name", name_of, "getsockname", it)
                for family, word in (("4", "connect to 10.9.0.1"), ("6", "connect to fd09::1")):
                    if family in BINDS[bound][1] and (family == "6" or only != 1):
                        tell(word + " 17")
                        of_connection(it.accept()[0], tell)
                        tell("close")
            it.close()


def of_family(it, tell, received):
    say("name", name_of, "getsockname", it)
    says_family(it)
    for what, address in DESTINATIONS.items():
        lens = (len(address), 24, 16, 8, 2, 1, 0, 29, 128, 129, -1) if what in ("v4", "v6", "mapped") else (len(address),)
        for length in lens:
            place = ctypes.create_string_buffer(address, 130)
            sent = say(f"sendto {what}, {length}", lambda: c("sendto", it.fileno(), b"ping", size(4), 0, place, length))
            if sent == 4 and what in ("v4", "v6", "mapped"):
                say("heard", tell, "hear" if what in ("v4", "mapped") else "hear v6")
    for family in received:
        tell("ping 10.9.0.1 17" if family == "4" else "ping fd09::1 17")
        await_bytes(it, 4)
        for room in ROOMS:
            place, length = ctypes.create_string_buffer(b"\xee" * 64), ctypes.c_int(room)
            got = c("recvfrom", it.fileno(), ctypes.create_string_buffer(9), size(9), socket.MSG_PEEK, place, ctypes.byref(length))
            print(f"from {family}, room {room}: {got} {length.value} {place.raw[:32].hex()}")
        say("recvmsg", it.recvmsg, 9, 100)
    for what, address in DESTINATIONS.items():
        for length in (len(address), 24, 16, 8, 2, 1, 0, 129):
            place = ctypes.create_string_buffer(address, 130)
            say(f"connect {what}, {length}", lambda: c("connect", it.fileno(), place, length))
            say("name", name_of, "getsockname", it)
            say("peer", name_of, "getpeername", it)
        if what in ("v4", "v6", "mapped"):
            if say("send", it.send, b"sent") == 4:
                say("heard", tell, "hear" if "fd09" not in repr(it.getpeername()) else "hear v6")
            for other in ("v4", "mapped"):
                if say(f"sendto {other}", lambda: c("sendto", it.fileno(), b"other", size(5), 0, DESTINATIONS[other], len(DESTINATIONS[other]))) == 5:
                    say("heard", tell, "hear")
            for room in (0, 4, 16, 28, 29, -1):
                say(f"SO_PEERNAME, {room}", peer_name, it, room)
    say("disconnect", c, "connect", it.fileno(), bytes(16), 16)
    say("peer", name_of, "getpeername", it)
    say("no peer", peer_name, it, 28)


def peer_name(it, room, port=True):
    place, length = ctypes.create_string_buffer(b"\xee" * 64), ctypes.c_int(room)
    answer = c("getsockopt", it.fileno(), socket.SOL_SOCKET, 28, place, ctypes.byref(length))
    return answer, length.value, place.raw[:2].hex(), place.raw[4 - 2 * port:32].hex()


def of_connection(it, tell):
    for room in ROOMS:
        say(f"name, room {room}", name_of, "getsockname", it, room)
        say(f"peer, room {room}", name_of, "getpeername", it, room, False)
        say(f"SO_PEERNAME, room {room}", peer_name, it, room, False)
    say("nowhere", lambda: [c(function, it.fileno(), None, ctypes.byref(ctypes.c_int(room))) for function in ("getsockname", "getpeername") for room in (0, 16)])
    says_family(it)
    for what, address in DESTINATIONS.items():
        say(f"sendto {what}", lambda: c("sendto", it.fileno(), b"x", size(1), 0, address, len(address)))
        say("arrived", tell, "read 1")
        for length in (len(address), 2, 1, 0, 129):
            place = ctypes.create_string_buffer(address, 130)
            say(f"connect {what}, {length}", lambda: c("connect", it.fileno(), place, length))
    tell("send 4")
    await_bytes(it, 4)
    place, length = ctypes.create_string_buffer(b"\xee" * 64), ctypes.c_int(64)
    say("recvfrom", lambda: c("recvfrom", it.fileno(), ctypes.create_string_buffer(9), size(9), 0, place, ctypes.byref(length)))
    print(f"{length.value} {place.raw[:4].hex()}")
    it.close()

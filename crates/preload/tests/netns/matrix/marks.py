IP_MTU_DISCOVER, IPV6_MTU_DISCOVER, IP_MINTTL, IPV6_MINHOPCOUNT, IPV6_DONTFRAG, MSG_PROBE = 10, 23, 21, 73, 62, 0x10
OF_PACKETS = ((socket.IPPROTO_IP, socket.IP_TOS, 0x28), (socket.IPPROTO_IPV6, socket.IPV6_TCLASS, 0x48),
              (socket.IPPROTO_IP, socket.IP_TTL, 77), (socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS, 78))
OUTGOING = 4  # PACKET_OUTGOING


def watched():
    """Socket of the peer that sees packets."""
    watch = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3))
    watch.bind(("exb", 3))
    return watch


def seen(watch, kind):
    """Marks of the next packet from the near host: of a datagram, of a SYN-ACK, or of a segment with data."""
    protocol = 17 if kind == "udp" else 6
    while True:
        packet, address = watch.recvfrom(70_000)
        if address[2] == OUTGOING:
            continue
        if packet[0] >> 4 == 4 and packet[9] == protocol:
            # The kernel numbers some packets with DF, too.
            piece = "DF" if packet[6] & 0x40 else f"id {packet[4:6] != bytes(2)}"
            marks = f"v4 {packet[1]:#x} {packet[8]} {piece}"
            packet = packet[20:int.from_bytes(packet[2:4], "big")]
        elif packet[0] >> 4 == 6 and packet[6] == protocol:
            marks = f"v6 {packet[0] << 4 & 0xff | packet[1] >> 4:#x} {packet[7]}"
            packet = packet[40:]
        else:
            continue
        if kind != "udp" and int.from_bytes(packet[:2], "big") != 17:
            continue  # the test's own words
        if kind == "udp" or kind == "syn-ack" and packet[13] == 0x12 or kind == "data" and len(packet) > packet[12] >> 4 << 2:
            return marks


def marks(connection, tell):
    """Marks of packets by the options of both families."""
    marks_of_datagrams(tell)
    marks_of_connections(tell)
    least_ttls(tell)
    probes(tell)


def marks_of_datagrams(tell):
    of_v4 = bound_datagrams()
    it = of_v6(socket.SOCK_DGRAM, BINDS["any"][0], None)
    to = lambda name: ctypes.create_string_buffer(DESTINATIONS[name], 28)
    for socket_, names in ((of_v4, ("v4",)), (it, ("mapped", "v6"))):
        for level, option, values in ((socket.IPPROTO_IP, IP_MTU_DISCOVER, range(6)), (socket.IPPROTO_IPV6, IPV6_MTU_DISCOVER, range(6)),
                                      (socket.IPPROTO_IPV6, IPV6_DONTFRAG, (1, 0))):
            for value in values:
                set = c("setsockopt", socket_.fileno(), level, option, struct.pack("i", value), 4)
                for name in names:
                    for length in (100, 2000):
                        tell("watch")
                        sent = c("sendto", socket_.fileno(), bytes(length), size(length), 0, to(name), 16 if name == "v4" else 28)
                        print(f"{names} {level} {option} = {value}: {set}, {length} bytes to {name}: {sent}", end="")
                        # A fragment of IPv6 has another protocol.
                        print(",", tell("seen udp") if sent == 100 or sent == 2000 and name != "v6" else "", tell("hear v6" if name == "v6" else "hear") if sent == length else "")
            c("setsockopt", socket_.fileno(), level, option, struct.pack("i", 1 if values == range(6) else 0), 4)
    it.close()
    scope = socket.if_nametoindex("exa")
    for ip in ("fd09::1", "::"):
        it = of_v6(socket.SOCK_DGRAM, sockaddr_v6(ip, 17, scope), None)
        say("name of a socket bound with an interface", name_of, "getsockname", it)
        it.close()
    it = of_v6(socket.SOCK_DGRAM, BINDS["any"][0], None)
    with open("/proc/net/if_inet6") as lines:
        own = next(bytes.fromhex(line.split()[0]) for line in lines if line.split()[3] == "20" and line.split()[5] == "exa")
    info = [(socket.IPPROTO_IPV6, socket.IPV6_PKTINFO, own + bytes(4))]
    say("from a link-local address of no interface", it.sendmsg, [b"x"], info, 0, ("fd09::2", 9))
    it.close()
    of_v4.close()


def marks_of_connections(tell):
    def listening_with(*options):
        listener = of_v6(socket.SOCK_STREAM, BINDS["any"][0], None)
        for option in options:
            listener.setsockopt(*option)
        listener.listen()
        polled(listener)  # serves from here on
        return listener

    def connected(listener, address):
        tell("watch")
        tell(f"connect to {address} 17")
        print(f"connection to {address}:", tell("seen syn-ack"))
        return listener.accept()[0]

    def sent(it):
        tell("watch")
        it.send(b"x")
        return tell("seen data"), tell("read 1")

    for options in ([option] for option in OF_PACKETS):
        listener = listening_with(*options)
        for address in ("10.9.0.1", "fd09::1"):
            it = connected(listener, address)
            print(f"inherited {options}:", sent(it), [it.getsockopt(*option[:2]) for option in OF_PACKETS])
            it.close()
            tell("close")
        listener.close()
    listener = listening_with(*OF_PACKETS)
    for address in ("10.9.0.1", "fd09::1"):
        it = connected(listener, address)
        print("all inherited:", sent(it))
        for level, option, value in OF_PACKETS:
            it.setsockopt(level, option, value // 4 * 3 & ~3)
            print(f"set {level} {option}:", sent(it))
        it.close()
        tell("close")
    listener.close()


def least_ttls(tell):
    """Peers that are too far away, with a TTL of 64 (RFC 5082)."""
    for level, option in ((socket.IPPROTO_IP, IP_MINTTL), (socket.IPPROTO_IPV6, IPV6_MINHOPCOUNT)):
        for least in (64, 65):
            listener = of_v6(socket.SOCK_STREAM, BINDS["any"][0], None)
            listener.setsockopt(level, option, least)
            listener.listen()
            polled(listener)  # serves from here on
            for address in ("10.9.0.1", "fd09::1"):
                answer = say(f"from 64 hops, {level} {option} = {least}, to {address}", tell, f"knock {address} 17")
                if answer == "done":
                    it = listener.accept()[0]
                    print("inherited:", it.getsockopt(level, option))
                    it.setsockopt(level, option, 65)
                    tell("send 3")
                    time.sleep(0.1)  # nothing tells of bytes that are dropped
                    say("from too far", it.recv, 3, socket.MSG_DONTWAIT)
                    it.setsockopt(level, option, 0)
                    it.close()
                    tell("close")
            listener.close()


def probes(tell):
    """Datagrams that are checked and not sent."""
    it = bound_datagrams()
    for what, length, to in (("a byte", 1, FAR), ("above the MTU", 2000, FAR), ("too long", 70_000, FAR), ("port 0", 1, (FAR[0], 0)),
                             ("all", 1, ("255.255.255.255", 9))):
        say(f"probe, {what}", it.sendto, bytes(length), MSG_PROBE, to)
    say("probe, in parts", it.sendto, b"x", MSG_PROBE | socket.MSG_MORE, FAR)
    say("a part", it.sendto, b"part", socket.MSG_MORE, FAR)
    say("its end", it.sendto, b"x", MSG_PROBE, FAR)
    say("heard", tell, "hear")
    say("sent", it.sendto, b"whole", 0, FAR)
    say("heard", tell, "hear")
    it.close()

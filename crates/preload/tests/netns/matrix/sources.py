WHENCE_PORT, IP_RECVTTL, IPV6_MTU_DISCOVER, IPV6_RECVERR, PMTUDISC_DO = 19, 12, 23, 25, 2
OF_SOURCE = {"route": "0.0.0.0", "own": NEAR[0], "loopback": "127.0.0.1", "group": "239.9.9.9", "another's": "10.77.0.1"}


def sources(connection, tell):
    """Own addresses and TTLs of what leaves."""
    for bound in ("10.9.0.255", "255.255.255.255", GROUP, "0.0.0.0", NEAR[0]):
        it = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        it.bind((bound, 17))
        it.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(NEAR[0]))
        for to in ((FAR[0], WHENCE_PORT), (GROUP, WHENCE_PORT)):
            say(f"{bound} to {to}", it.sendto, b"whence", to)
            say("heard", tell, "whence")
        for what, own in OF_SOURCE.items():
            information = bytes(4) + socket.inet_aton(own) + bytes(4)
            if say(f"{bound} by {what}", it.sendmsg, [b"whence"], [(socket.IPPROTO_IP, IP_PKTINFO, information)], 0, (FAR[0], WHENCE_PORT)) == 6:
                say("heard", tell, "whence")
        it.close()
    it = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    it.bind(("::", 17))
    for what, own in OF_SOURCE.items():
        information = socket.inet_pton(socket.AF_INET6, "::ffff:" + own) + bytes(4)
        for to in ("::ffff:10.9.0.2", "fd09::2"):
            if say(f"{to} by {what}", it.sendmsg, [b"whence"], [(socket.IPPROTO_IPV6, socket.IPV6_PKTINFO, information)], 0, (to, WHENCE_PORT)) == 6:
                say("heard", tell, "whence")
    it.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(NEAR[0]))
    of_v4, of_v6 = (socket.IPPROTO_IP, socket.IP_MULTICAST_TTL), (socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS)
    for option, ttl in ((of_v6, 1), (of_v6, 7), (of_v4, 5), (of_v6, 9)):
        it.setsockopt(*option, ttl)
        for to in (GROUP, FAR[0]):
            it.sendto(b"whence", ("::ffff:" + to, WHENCE_PORT))
            say(f"{option} = {ttl}, to {to}", tell, "whence")
    it.close()
    index = bytes(8) + struct.pack("i", socket.if_nametoindex("exa"))
    for choice in (socket.inet_aton("10.9.0.3"), index, bytes(4) + socket.inet_aton("10.9.0.3") + index[8:]):
        for before in (True, False):
            it = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            for step in (0, 1):
                if before == (step == 0):
                    it.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, choice)
                else:
                    it.bind(("0.0.0.0", 17))
            it.sendto(b"whence", (GROUP, WHENCE_PORT))
            say(f"chosen {choice}, before {before}", tell, "whence")
            it.close()
    lengths_refused()


def lengths_refused():
    """Errors of datagrams that are too long: before that of the peer, and with the MTU in the queue."""
    it = bound_datagrams()
    it.setsockopt(socket.IPPROTO_IP, 10, PMTUDISC_DO)
    it.connect((FAR[0], 99))
    it.send(b"x")
    await_event(it, select.POLLIN)
    say("too long", it.send, bytes(3000))
    say("to many", it.sendto, b"x", ("10.9.0.255", 9))
    say("refused", it.send, b"x")
    it.close()
    for family, name, to in ((socket.AF_INET, NEAR, FAR), (socket.AF_INET6, ("::", 17), FAR_V6), (socket.AF_INET6, ("::", 17), ("::ffff:10.9.0.2", 9))):
        it = socket.socket(family, socket.SOCK_DGRAM)
        it.bind(name)
        of_v4 = [(socket.IPPROTO_IP, *option) for option in ((10, PMTUDISC_DO), (IP_RECVTTL, 1), (IP_PKTINFO, 1))]
        of_v6 = [(socket.IPPROTO_IPV6, *option) for option in ((IPV6_MTU_DISCOVER, PMTUDISC_DO), (socket.IPV6_RECVHOPLIMIT, 1), (socket.IPV6_RECVPKTINFO, 1))]
        for option in of_v4 + (of_v6 if family == socket.AF_INET6 else []):
            it.setsockopt(*option)
        for asked in (False, True):
            if asked:
                it.setsockopt(socket.IPPROTO_IP, 11, 1)
                if family == socket.AF_INET6:
                    it.setsockopt(socket.IPPROTO_IPV6, IPV6_RECVERR, 1)
            for length in (1453, 1473, 3000, 65_507, 65_508):
                say(f"{length} to {to}", it.sendto, bytes(length), to)
                say("told", told, it)
        it.sendto(b"lost", (to[0], 99))
        await_event(it, select.POLLIN)
        say("refused", told, it)
        it.close()


def refusals_in_order(connection, tell):
    """Order of the errors of a datagram, whole or in parts, after `shutdown` and with an error that waits."""
    more = socket.MSG_MORE
    ways = [(socket.AF_INET, NEAR, "10.9.0.2", "10.9.0.255", (0, 8, bytes(4) + socket.inet_aton("10.77.0.1") + bytes(4))),
            (socket.AF_INET6, ("::", 17), "fd09::2", "ff02::1", (41, 50, socket.inet_pton(socket.AF_INET6, "fd77::1") + bytes(4))),
            (socket.AF_INET6, ("::", 17), "::ffff:10.9.0.2", "::ffff:10.9.0.255", (41, 50, socket.inet_pton(socket.AF_INET6, "fd77::1") + bytes(4)))]
    for family, name, to, many, strange in ways:
        def bound(port=9):
            it = socket.socket(family, socket.SOCK_DGRAM)
            it.setsockopt(socket.IPPROTO_IP, 10, PMTUDISC_DO)
            if family == socket.AF_INET6:
                it.setsockopt(socket.IPPROTO_IPV6, IPV6_MTU_DISCOVER, PMTUDISC_DO)
            it.bind(name)
            if port is not None:
                it.connect((to, port))
            return it
        for ends in (False, True):
            it = bound()
            if ends:
                it.shutdown(socket.SHUT_WR)
            for length in (0, 1, 1453, 1473, 65_507, 65_508, 65_535, 65_536):
                what = f"{to} {ends} {length}"
                for segment in (0, 1, 9000):
                    say(f"{what} by {segment}", it.sendmsg, [bytes(length)], [(socket.IPPROTO_UDP, 103, struct.pack("H", segment))])
                say(f"{what} from elsewhere", it.sendmsg, [bytes(length)], [strange])
                say(f"{what} to many", it.sendto, bytes(length), (many, 9))
                say(f"{what} to no port", it.sendto, bytes(length), (to, 0))
                say(f"{what} as a part", it.send, bytes(length), more)
                say(f"{what} as another", it.send, bytes(length), more)
                say(f"{what} whole", it.send, b"")
            it.close()
        for how in (socket.SHUT_RD, socket.SHUT_WR):
            it = bound()
            say("begun", it.send, b"be", more)
            it.shutdown(how)
            say("went on", it.send, b"gun", more)
            say("ended", it.send, b"")
            say("after the end", it.send, b"x")
            it.close()
        tell("hear" if "." in to else "hear v6")
        for call in (lambda it: it.send(bytes(3000)), lambda it: it.sendto(b"x", (many, 9)), lambda it: it.send(b"x", more),
                     lambda it: (it.shutdown(socket.SHUT_WR), it.send(b"x")), lambda it: it.sendto(b"x", (to, 0))):
            it = bound(99)
            it.send(b"lost")
            await_event(it, select.POLLIN)
            say("beside an error", call, it)
            say("then", it.send, b"x")
            it.close()
        it = bound(0)
        say("no port", it.send, b"")
        say("too long", it.send, bytes(3000))
        it.close()
        it = bound(None)
        it.setsockopt(socket.IPPROTO_IP, 11, 1)
        if family == socket.AF_INET6:
            it.setsockopt(socket.IPPROTO_IPV6, IPV6_RECVERR, 1)
        for _ in range(9):
            say("too long", it.sendto, bytes(3000), (to, 9))
        for _ in range(10):
            say("told", told, it)
        for stamp in (63, 64, 29, 64, 35, 63):
            it.setsockopt(socket.SOL_SOCKET, stamp, 1)
            it.sendto(b"lost", (to, 99))
            await_event(it, select.POLLIN)
            say(f"told at the time of {stamp}", lambda: [kind[:2] for kind in it.recvmsg(4, 400, socket.MSG_ERRQUEUE)[1]])
        it.close()


def told(it):
    """Error in the queue, and what comes with it, without the interface."""
    interface = socket.if_nametoindex("exa").to_bytes(4, "little")
    data, messages, flags, source = it.recvmsg(4, 400, socket.MSG_ERRQUEUE)
    return data, [(*kind, value.replace(interface, b"index!")) for *kind, value in messages], flags, source

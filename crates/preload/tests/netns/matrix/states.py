ESTABLISHED, FIN_WAIT2, CLOSED, CLOSE_WAIT = 1, 5, 7, 8


def state(it):
    return it.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


def settled(it, *states):
    """Waits until the peer has acknowledged an end."""
    until(lambda: state(it) in states)


def every_call(what, it, tell):
    """Results of the calls that do not wait, in one state of a connection or a listener."""
    number_, wait = it.fileno(), socket.MSG_DONTWAIT

    def ask(name, call, *arguments):
        say(f"{what}: {name}", call, *arguments)

    ask("events", bits, it)
    ask("select", lambda: select_(it, select.EPOLLIN)(0) + select_(it, select.EPOLLOUT)(0))
    told = select.epoll()
    told.register(it, 0x2005 | select.EPOLLET)
    ask("epoll", lambda: [named(mask) for _, mask in told.poll(0)])
    for request in ("FIONREAD", "SIOCOUTQ", "SIOCOUTQNSD", "SIOCATMARK"):
        ask(request, number, it, globals()[request])
    ask("name", it.getsockname)
    ask("has a peer", lambda: it.getpeername()[0])
    ask("peek", it.recv, 3, wait | socket.MSG_PEEK)
    ask("recv of nothing", it.recv, 0, wait)
    ask("recv", it.recv, 2, wait)
    ask("recvmsg", lambda: it.recvmsg(2, 64, wait)[:3])
    ask("urgent", it.recv, 1, socket.MSG_OOB | wait)
    ask("errors", it.recv, 1, socket.MSG_ERRQUEUE)
    ask("discard", lambda: it.recv_into(bytearray(2), 2, wait | socket.MSG_TRUNC))
    ask("send nothing", it.send, b"", socket.MSG_NOSIGNAL)
    ask("events", bits, it)
    ask("send", it.send, b"x", socket.MSG_NOSIGNAL | wait)
    ask("wrong shutdown", it.shutdown, 3)
    ask("listen", lambda: it.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) or it.listen())
    it.setblocking(False)
    ask("accept", os_accept, it)
    it.setblocking(True)
    ask("connect", c, "connect", number_, DESTINATIONS["v4"], 16)
    ask("sizes", lambda: [it.getsockopt(socket.SOL_SOCKET, name) for name in (socket.SO_TYPE, socket.SO_ACCEPTCONN)])
    told.close()


def states(connection, tell):
    """A connection in each state that its ends can bring it into."""
    def arrived(it):
        tell("send 5")
        await_bytes(it, 5)

    def peers_end(it):
        tell("shut")
        await_event(it, select.POLLRDHUP)

    def reset(it):
        tell("reset")
        await_event(it, select.POLLERR)

    def ended(how):
        def end(it):
            say("shutdown", it.shutdown, how)
            if how != socket.SHUT_RD and state(it) not in (CLOSED,):
                settled(it, FIN_WAIT2, CLOSED)
        return end

    steps = {"bytes": arrived, "peer's end": peers_end, "reset": reset}
    steps |= {f"shutdown {how}": ended(how) for how in (socket.SHUT_RD, socket.SHUT_WR, socket.SHUT_RDWR)}
    ways = [(), ("bytes",), ("peer's end",), ("bytes", "peer's end"), ("reset",), ("bytes", "reset"), ("peer's end", "reset")]
    for end in list(steps)[3:]:
        ways += [(end,), ("bytes", end), ("peer's end", end), ("bytes", "peer's end", end), ("reset", end), ("bytes", "reset", end)]
        ways += [(end, other) for other in list(steps)[3:]]
    with_v6 = of_v6(socket.SOCK_STREAM, BINDS["any"][0], None)
    with_v6.listen()
    polled(with_v6)  # serves from here on
    for listener, word in ((LISTENER[0], "connect"), (with_v6, "connect to fd09::1 17"), (with_v6, "connect to 10.9.0.1 17")):
        for way in ways:
            tell(word)
            it = listener.accept()[0]
            for step in way:
                steps[step](it)
            every_call(f"{word[8:]} {', '.join(way) or 'new'}", it, tell)
            it.close()
            tell("close")
    with_v6.close()


def datagram_states(connection, tell):
    """A UDP socket, connected or not, after each shutdown."""
    wait = socket.MSG_DONTWAIT
    for near, far in ((NEAR, FAR), (NEAR_V6, FAR_V6)):
        for is_connected in (False, True):
            for ends in ((), (0,), (1,), (2,), (0, 1), (1, 0), (0, 0)):
                for has_some in (False, True):
                    it = socket.socket(socket.AF_INET6 if ":" in near[0] else socket.AF_INET, socket.SOCK_DGRAM)
                    it.bind(near)
                    what = f"{near[0]} {is_connected} {ends} {has_some}"
                    if has_some:
                        tell(f"ping {near[0]} {near[1]}")
                        await_bytes(it, 4)
                    if is_connected:
                        it.connect(far)
                    for how in ends:
                        say(f"{what}: shutdown {how}", it.shutdown, how)
                    say(f"{what}: events", bits, it)
                    say(f"{what}: waiting", number, it, FIONREAD)
                    for name, call in (("peek", lambda: it.recv(2, wait | socket.MSG_PEEK)), ("recv", lambda: it.recvfrom(2, wait)),
                                       ("recv again", lambda: it.recv(2, wait)), ("send nothing", lambda: it.send(b"", wait)),
                                       ("send", lambda: it.sendto(b"sent", wait, far))):
                        say(f"{what}: {name}", call)
                    if is_connected and not ends:
                        say("heard nothing", tell, "hear" if far == FAR else "hear v6")
                    if not {1, 2} & set(ends):
                        say("heard", tell, "hear" if far == FAR else "hear v6")
                    say(f"{what}: disconnect", c, "connect", it.fileno(), bytes(16), 16)
                    say(f"{what}: peer", it.getpeername)
                    say(f"{what}: shutdown", it.shutdown, 2)
                    say(f"{what}: events", bits, it)
                    it.close()
    # An error of the path stays beside the length of a datagram.
    for near, far in ((NEAR, FAR), (NEAR_V6, FAR_V6)):
        it = socket.socket(socket.AF_INET6 if ":" in near[0] else socket.AF_INET, socket.SOCK_DGRAM)
        it.bind(near)
        tell(f"ping {near[0]} {near[1]}")
        await_bytes(it, 4)
        it.connect((far[0], 99))
        say("send", it.send, b"x")
        until(lambda: has_error(it))
        it.close()


def has_error(it):
    """True once an error was told, which the length of a datagram does not take."""
    if number(it, FIONREAD) != 4:
        sys.exit("the length is lost")
    try:
        it.recv(4, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        return False
    except ConnectionRefusedError:
        return True

def datagrams(tell):
    print("# datagrams")
    it = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    it.bind(NEAR)
    dont_wait = socket.MSG_DONTWAIT
    for wait in WAITS:
        name = wait.__name__
        say(f"{name} new", wait(it, select.EPOLLIN | select.EPOLLOUT), WAIT_MS)
        waiter = wait(it, select.EPOLLIN)
        say(f"{name} nothing", waiter, 0)
        tell("datagram 10")
        await_event(it, select.POLLIN)
        say(f"{name} datagram", waiter, WAIT_MS)
        say(f"{name} again", waiter, 0)
        say(f"{name} peek", it.recvfrom, 4, socket.MSG_PEEK)
        say(f"{name} part", it.recvfrom, 4)
        say(f"{name} all read", waiter, 0)
    for flags in (0, dont_wait, socket.MSG_TRUNC, socket.MSG_PEEK, socket.MSG_PEEK | socket.MSG_TRUNC,
                  socket.MSG_WAITALL):
        tell("datagram 9")
        await_event(it, select.POLLIN)
        say(f"flags {flags}", it.recv_into, bytearray(4), 4, flags)
        say(f"recvmsg, flags {flags}", it.recvmsg, 4, 100, flags | dont_wait)
        say("left", it.recv, 10, dont_wait)
    tell("datagram 0")
    await_event(it, select.POLLIN)
    say("waiting", number, it, FIONREAD)
    say("empty", it.recvfrom, 10)
    tell("datagram 7")
    await_event(it, select.POLLIN)
    say("too many buffers", it.recvmsg_into, [bytearray(1)] * 1025)
    say("left", it.recv, 10, dont_wait)
    say("sent from too many", it.sendmsg, [b"x"] * 1025, [], 0, FAR)
    tell("datagram 8")
    await_event(it, select.POLLIN)
    say("waiting", number, it, FIONREAD)
    say("no room", it.recvmsg, 0, 0)
    say("nothing", it.recv, 1, dont_wait)
    say("error queue", it.recv, 10, socket.MSG_ERRQUEUE)
    say("out of band", it.recv, 1, socket.MSG_OOB | dont_wait)
    say("listen", it.listen, 1)
    say("accept", lambda: os_accept(it))
    say("shutdown", it.shutdown, socket.SHUT_WR)
    it.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 30_000))
    say("until the time-out", it.recv, 10)
    second = it.dup()
    it.close()
    tell("datagram 3")
    it = second
    await_event(it, select.POLLIN)
    say("duplicate", it.recv, 10)
    got = []
    it.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
    readers = [threading.Thread(target=lambda: got.append(it.recv(9))) for _ in range(3)]
    for reader in readers:
        reader.start()
    for _ in readers:
        tell("datagram 2")
    for reader in readers:
        reader.join()
    print("read by threads:", got)
    it.close()
    ancillary_data(tell)
    parts(tell)
    peers(tell)


def bound_datagrams():
    it = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    it.bind(NEAR)
    return it


SO_RXQ_OVFL, SO_TIMESTAMPS = 40, (29, 35, 37, 63, 64, 65)
IP_ORIGDSTADDR, UDP_CORK = 20, 1


def ancillary_data(tell):
    """Control messages of a datagram that stays, and of the same that is taken."""
    print("# ancillary_data")
    it = bound_datagrams()

    def received(what, room=400):
        tell("datagram 3")
        await_event(it, select.POLLIN)
        for flags in (socket.MSG_PEEK, 0):
            data, messages, flags, source = it.recvmsg(2, room, flags)
            # Times are none of the answers.
            shown = [(*kind, len(value) if kind[1] in SO_TIMESTAMPS else value.hex()) for *kind, value in messages]
            print(f"{what}: {data} {shown} {flags} {source}")

    for option in SO_TIMESTAMPS:
        say(f"option {option}", it.setsockopt, socket.SOL_SOCKET, option, 0x18 if option in (37, 65) else 1)
        say(f"option {option}", it.getsockopt, socket.SOL_SOCKET, option)
        received(f"times by {option}")
    for room in (0, 16, 20, 36, 40):
        received(f"times, {room} bytes", room)
    for option in SO_TIMESTAMPS:
        it.setsockopt(socket.SOL_SOCKET, option, 0)
    received("no times")
    say("overflow", it.setsockopt, socket.SOL_SOCKET, SO_RXQ_OVFL, 1)
    received("no overflow")
    for option in (socket.IP_RECVTOS, 12, 8, IP_ORIGDSTADDR):
        say(f"option {option}", it.setsockopt, socket.IPPROTO_IP, option, 1)
    interface = socket.if_nametoindex("exa").to_bytes(4, "little")
    tell("datagram 3")
    await_event(it, select.POLLIN)
    for flags in (socket.MSG_PEEK, 0):
        messages = it.recvmsg(2, 400, flags)[1]
        say("addresses", lambda: [(*kind, value.replace(interface, b"index!")) for *kind, value in messages])
    say("errors", it.setsockopt, socket.IPPROTO_IP, 11, 1)
    say("error queue", it.recvmsg, 10, 100, socket.MSG_ERRQUEUE)
    # What the queue of errors told is told once.
    say("to nobody", it.sendto, b"lost", ("10.9.0.2", 99))
    await_event(it, select.POLLIN)
    for _ in range(2):
        say("error queue", lambda: it.recvmsg(10, 0, socket.MSG_ERRQUEUE)[0])
    say("nothing more", it.recv, 10, socket.MSG_DONTWAIT)
    say("no error", it.getsockopt, socket.SOL_SOCKET, socket.SO_ERROR)
    it.close()


def parts(tell):
    """Datagrams of several calls."""
    print("# parts")
    it, more = bound_datagrams(), socket.MSG_MORE
    say("first", it.sendto, b"ab", more, FAR)
    say("second", it.send, b"cd", more)
    say("last, elsewhere", it.sendto, b"e", ("10.9.0.2", 99))
    say("heard", tell, "hear")
    say("nobody", it.send, b"x", more)
    say("cork", it.setsockopt, socket.IPPROTO_UDP, UDP_CORK, 1)
    for part in (b"1", b"", b"2"):
        say("part", it.sendto, part, FAR)
    say("uncork", it.setsockopt, socket.IPPROTO_UDP, UDP_CORK, 0)
    say("heard", tell, "hear")
    say("long", it.sendto, bytes(60_000), more, FAR)
    say("too long", it.sendto, bytes(6_000), more, FAR)
    say("whole", it.sendto, b"whole", FAR)
    say("heard", tell, "hear")
    it.close()


def peers(tell):
    """Peers that come, go and refuse, and ends."""
    print("# peers")
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name, *arguments):
        result = getattr(libc, name)(*arguments)
        return result if result >= 0 else ERRNO[ctypes.get_errno()]

    it = bound_datagrams()
    say("connect", it.connect, ("10.9.0.2", 99))
    say("refused", it.send, b"x")
    await_event(it, select.POLLIN)
    say("SO_ERROR", it.getsockopt, socket.SOL_SOCKET, socket.SO_ERROR)
    say("SO_ERROR", it.getsockopt, socket.SOL_SOCKET, socket.SO_ERROR)
    say("refused", it.send, b"x")
    await_event(it, select.POLLIN)
    say("recv", it.recv, 10)
    say("recv", it.recv, 10, socket.MSG_DONTWAIT)
    say("disconnect", call, "connect", it.fileno(), bytes(16), 16)
    say("names", lambda: (it.getsockname(), say("peer", it.getpeername)))
    tell("datagram 4")
    await_event(it, select.POLLIN)
    say("from anybody", it.recvfrom, 10)
    say("shut, wrong", it.shutdown, 3)
    say("shut, unconnected", it.shutdown, socket.SHUT_WR)
    say("send", it.sendto, b"x", FAR)
    say("events", polled, it)
    it.close()
    it = bound_datagrams()
    it.connect(FAR)
    late = threading.Timer(0.1, it.shutdown, [socket.SHUT_RD])
    late.start()
    say("recv until the end", it.recvfrom, 10)
    late.join()
    say("recvmsg", it.recvmsg, 10, 100)
    say("without waiting", it.recv, 10, socket.MSG_DONTWAIT)
    say("events", polled, it)
    tell("datagram 4")
    say("after the end", lambda: (time.sleep(0.1), it.recvfrom(10)))
    say("shut", it.shutdown, socket.SHUT_RDWR)
    say("send", it.send, b"x")
    say("events", polled, it)
    say("null", call, "recv", it.fileno(), None, 10, socket.MSG_DONTWAIT)
    for name in ("send", "recv"):
        kernels = ctypes.c_void_p(2**64 - 4096)
        say(f"{name}, the kernel's memory", call, name, it.fileno(), kernels, 10, socket.MSG_DONTWAIT)
    it.close()

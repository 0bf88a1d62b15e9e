def interrupted(connection, tell, signals):
    """A signal interrupts a read: without SA_RESTART, as Python installs handlers, Python reads again."""
    print("# interrupted")
    it = connection()
    late = threading.Timer(0.2, tell, ["send 2"])
    late.start()
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    say("recv", it.recv, 2)
    late.join()
    print("signals", signals)
    signals.clear()
    calls_of_c(it, tell, signals)
    print("signals", signals)
    it.close()
    tell("close")


def send_without_room(it, tell, call, room, signals):
    """Sends 1,000 bytes while there is no room; after 0.3 s the peer reads all that was sent before. A peer that takes more
    late, when it is probed, makes room before that: then once more, as if the alarm had not been set before."""
    sent, before = 0, len(signals)
    while True:
        sent += fill(it)
        has_asked = threading.Event()

        def ask():
            has_asked.set()
            tell(f"read {sent}")

        late = threading.Timer(0.3, ask)
        late.start()
        answer = call("send", room, 1000, 0)
        had_room = answer == 1000 and not has_asked.is_set()
        if had_room:
            late.cancel()
        late.join()
        if not had_room or has_asked.is_set():
            return answer
        signal.setitimer(signal.ITIMER_REAL, 0)
        del signals[before:]
        sent += 1000


def calls_of_c(it, tell, signals):
    """The same by the C library's functions, which Python does not call again."""
    libc = ctypes.CDLL(None, use_errno=True)
    room = ctypes.create_string_buffer(100_000)

    def call(name, *arguments, on=it):
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        result = getattr(libc, name)(on.fileno(), *arguments)
        return result if result >= 0 else ERRNO[ctypes.get_errno()]

    def all_restart(restart):
        for number in (signal.SIGALRM, signal.SIGPIPE, signal.SIGINT):
            signal.siginterrupt(number, not restart)

    for restart in (False, True):
        all_restart(restart)
        for micros in (0, 9_000_000):
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                it.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", micros // 1_000_000, 0))
            late = threading.Timer(0.3, tell, ["send 2"])
            late.start()
            answer = say(f"recv of C, {restart}, {micros}", call, "recv", room, 2, 0)
            late.join()
            if answer != 2:
                await_bytes(it, 2)
            say("left", it.recv, 2, socket.MSG_DONTWAIT)
            answer = say(f"send of C, {restart}, {micros}", send_without_room, it, tell, call, room, signals)
            if answer == 1000:
                tell("read 1000")
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            it.setsockopt(socket.SOL_SOCKET, option, bytes(16))
        parts_received(it, tell, call, room, restart)
    all_restart(False)


def parts_received(it, tell, call, room, restart):
    """A signal ends a call that has received a part in any case."""
    for flags in (socket.MSG_WAITALL, socket.MSG_WAITALL | socket.MSG_TRUNC, socket.MSG_WAITALL | socket.MSG_PEEK):
        tell("send 3")
        await_bytes(it, 3)
        late = threading.Timer(0.3, tell, ["send 3"])
        late.start()
        answer = say(f"recv of C, {restart}, flags {flags}", call, "recv", room, 6, flags)
        late.join()
        left = 6 if flags & socket.MSG_PEEK else 6 - answer
        await_bytes(it, left)
        say("left", it.recv, left or 1, socket.MSG_DONTWAIT)
    for udp in (bound_datagrams(), it):
        tell("datagram 3" if udp is not it else "send 3")
        await_event(udp, select.POLLIN)
        late = threading.Timer(0.3, tell, ["datagram 3" if udp is not it else "send 3"])
        late.start()
        many = messages([3, 3])
        say(f"recvmmsg of C, {restart}", lambda: call("recvmmsg", many, 2, 0, None, on=udp))
        late.join()
        got = sum(header.len for header in many)
        print("received:", got)
        udp.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)  # the kernel keeps the signal as an error
        if udp is not it:
            udp.close()
        elif got < 6:
            await_bytes(it, 6 - got)
            it.recv(6 - got)

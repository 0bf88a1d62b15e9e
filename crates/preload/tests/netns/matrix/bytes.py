def waits(connection, tell):
    for wait in WAITS:
        it, name = connection(), wait.__name__
        both = select.EPOLLIN | select.EPOLLOUT
        say(f"{name} new", wait(it, both), WAIT_MS)
        waiter = wait(it, select.EPOLLIN)
        say(f"{name} nothing", waiter, 0)
        tell("send 10")
        await_bytes(it, 10)
        say(f"{name} bytes", waiter, WAIT_MS)
        say(f"{name} again", waiter, 0)
        say(f"{name} part", it.recv, 4)
        say(f"{name} rest", waiter, 0)
        say(f"{name} read", it.recv, 100)
        say(f"{name} all read", waiter, 0)
        tell("send 5")
        await_bytes(it, 5)
        say(f"{name} bytes again", waiter, 300)
        it.close()
        tell("close")


def reads(connection, tell):
    for blocks in (True, False):
        it = connection()
        it.setblocking(blocks)
        dont_wait = socket.MSG_DONTWAIT
        say("nothing", it.recv, 10, dont_wait)
        say("no room, nothing", it.recvmsg, 0, 0, dont_wait)
        say("read without room", os.read, it.fileno(), 0)
        tell("send 100")
        await_bytes(it, 100)
        say("waiting", number, it, FIONREAD)
        say("no room", it.recvmsg, 0, 0)
        say("peek", lambda: len(it.recv(7, socket.MSG_PEEK)))
        say("peek all", lambda: len(it.recv(1000, socket.MSG_PEEK)))
        say("cut", lambda: len(it.recv(10)))
        say("trunc", lambda: it.recv_into(bytearray(10), 10, socket.MSG_TRUNC))
        say("waiting", number, it, FIONREAD)
        say("read", lambda: len(os.read(it.fileno(), 10)))
        say("readv", lambda: os.readv(it.fileno(), [bytearray(3), bytearray(0), bytearray(9)]))
        say("recvfrom", lambda: (lambda got: (len(got[0]), got[1]))(it.recvfrom(8)))
        say("recvmsg", lambda: (lambda got: (len(got[0]),) + got[1:])(it.recvmsg(10, 100)))
        say("recvmsg peek", lambda: (lambda got: (len(got[0]),) + got[1:])(it.recvmsg(10, 0, socket.MSG_PEEK)))
        for rooms in (1, 2, 3):
            say("peek in parts", lambda: peeked(it, [bytearray(2) for _ in range(rooms)]))
        say("recvmsg_into", lambda: it.recvmsg_into([bytearray(5), bytearray(5)])[0])
        say("pread", os.pread, it.fileno(), 4, 0)
        say("error queue", it.recv, 10, socket.MSG_ERRQUEUE)
        say("out of band", it.recv, 1, socket.MSG_OOB)
        say("wait all, there", lambda: len(it.recv(20, socket.MSG_WAITALL)))
        say("rest", lambda: len(it.recv(1000)))
        say("nothing more", it.recv, 10, dont_wait)
        if blocks:
            late = threading.Timer(0.05, tell, ["send 30"])
            tell("send 20")
            late.start()
            say("wait all, later", lambda: len(it.recv(50, socket.MSG_WAITALL)))
            late.join()
            it.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 30_000))
            say("time-out", it.getsockopt, socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)
            say("until the time-out", it.recv, 10)
            tell("send 3")
            await_bytes(it, 3)
            say("wait all until the time-out", it.recv, 10, socket.MSG_WAITALL)
            say("readv of too many", os.readv, it.fileno(), [bytearray(1)] * 1025)
        tell("urgent")
        say("urgent, peeked", urgent, it, socket.MSG_PEEK)
        say("urgent, peeked and cut", lambda: it.recv(1, socket.MSG_OOB | socket.MSG_PEEK | socket.MSG_TRUNC)[1:])
        say("urgent", urgent, it)
        say("urgent again", it.recv, 1, socket.MSG_OOB)
        it.close()
        tell("close")


def urgent(it, flags=0):
    """The urgent byte, once it is there."""
    while True:
        try:
            return it.recv(1, socket.MSG_OOB | flags)
        except OSError as error:
            assert error.errno in (errno.EINVAL, errno.EAGAIN), error


def writes(connection, tell):
    it = connection()
    say("send nothing", it.send, b"")
    say("write nothing", os.write, it.fileno(), b"")
    say("send", it.send, b"a" * 10)
    say("more", it.send, b"b" * 10, socket.MSG_MORE)
    say("writev", os.writev, it.fileno(), [b"c" * 5, b"", b"d" * 5])
    say("sendmsg", it.sendmsg, [b"e" * 7, b"f" * 3], [], socket.MSG_NOSIGNAL)
    say("sendto", it.sendto, b"g" * 10, FAR)
    say("arrived", tell, "read 50")
    say("unacknowledged", lambda: until(lambda: number(it, SIOCOUTQ) == 0))
    it.setblocking(False)
    sent = 0
    # Buffers grow while there is room in those of the peer.
    while polled(it, select.POLLOUT, 500) == "OUT":
        try:
            while True:
                sent += it.send(bytes(65_536))
        except OSError as error:
            assert error.errno == errno.EAGAIN, error
    # Not writable says that there is little room; the last ACKs may have made some.
    sent += fill(it)
    print("full:", sent > 65_536)
    say("not writable", polled, it, select.POLLOUT)
    say("don't wait", it.send, b"x", socket.MSG_DONTWAIT)
    it.setblocking(True)
    it.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 30_000))
    say("until the time-out", it.send, b"x")
    say("writev of too many", os.writev, it.fileno(), [b"x"] * 1025)
    it.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 0))
    say("taken", tell, f"read {sent}")
    say("writable", polled, it, select.POLLOUT, WAIT_MS)
    reader = threading.Thread(target=lambda: say("large, arrived", tell, "read 3000000"))
    reader.start()
    sent = it.send(b"y" * 3_000_000)
    reader.join()
    print("large:", sent)
    it.close()
    tell("close")


def files(connection, tell):
    it = connection()
    with open("/proc/self/exe", "rb") as file:
        expected = sum(file.read(10_000))
        file.seek(5)
        say("sendfile", os.sendfile, it.fileno(), file.fileno(), 0, 10_000)
        say("position", file.tell)
        say("arrived", lambda: int(tell("read 10000")) == expected)
        say("sendfile from its position", os.sendfile, it.fileno(), file.fileno(), None, 10)
        say("position", lambda: os.lseek(file.fileno(), 0, os.SEEK_CUR))
        say("arrived", tell, "read 10")
        say("sendfile of no file", os.sendfile, it.fileno(), -1, 0, 10)
        say("sendfile of no file", os.sendfile, it.fileno(), -1, None, 10)
        closed = os.dup(file.fileno())
        os.close(closed)
        for offset in (0, None):
            say("sendfile of a closed file", os.sendfile, it.fileno(), closed, offset, 10)
        for to in (it, LISTENER[0]):
            say("sendfile, offset nowhere", c, "sendfile", to.fileno(), file.fileno(), ctypes.c_void_p(8), size(10))
        say("sendfile beyond the end", os.sendfile, it.fileno(), file.fileno(), 1 << 40, 10)
    splices(it, tell)
    it.close()
    tell("close")


def peeked(it, rooms):
    """Length of what is there, and whether it stays and is the same."""
    count = it.recvmsg_into(rooms, 0, socket.MSG_PEEK)[0]
    return count, b"".join(rooms)[:count] == it.recv(count, socket.MSG_PEEK)


def splices(it, tell):
    """Between a connection and a pipe, which has room for 16 pages."""
    out, into = os.pipe()
    number, dont_wait = it.fileno(), 2
    say("nothing in the pipe", os.splice, out, number, 10, None, None, dont_wait)
    say("to no pipe", os.splice, number, -1, 10)
    say("from no pipe", os.splice, -1, number, 10)
    later = threading.Timer(0.1, os.write, (into, b"late"))
    later.start()
    say("waits for the pipe", os.splice, out, number, 10)
    later.join()
    say("arrived", tell, "read 4")
    os.write(into, b"a" * 20_000)
    say("to connection", os.splice, out, number, 30_000)
    say("arrived", tell, "read 20000")
    os.write(into, b"b" * 10)
    say("a part, and more follows", os.splice, out, number, 4, None, None, 4)
    say("the rest", os.splice, out, number, 100)
    say("arrived", tell, "read 10")
    tell("send 9")
    await_bytes(it, 9)
    say("from connection", os.splice, number, into, 5)
    say("from connection", os.splice, number, into, 5, None, None, dont_wait)
    say("in the pipe", os.read, out, 100)
    it.setblocking(False)
    say("nothing there", os.splice, number, into, 5)
    it.setblocking(True)
    os.write(into, b"c" * 65_536)
    tell("send 5")
    await_bytes(it, 5)
    say("no room", os.splice, number, into, 5, None, None, dont_wait)
    say("it stays", it.recv, 10)
    say("nothing asked for", os.splice, number, into, 0)
    say("wrong flag", os.splice, number, into, 5, None, None, 64)
    say("offset of the pipe", os.splice, number, into, 5, None, 0)
    say("offset of the connection", os.splice, number, into, 5, 0)
    say("to itself", os.splice, number, number, 5)
    os.close(into)
    say("all of it", os.splice, out, number, 100_000)
    say("arrived", tell, "read 65536")
    say("end of the pipe", os.splice, out, number, 5)
    os.close(out)
    out, into = os.pipe()
    os.close(out)
    tell("send 5")
    await_bytes(it, 5)
    say("no reader", os.splice, number, into, 5)
    say("it stays", it.recv, 10)
    os.close(into)


def peeks(connection, tell):
    """Looks at bytes that have not all come."""
    it, all = connection(), socket.MSG_PEEK | socket.MSG_WAITALL
    look = lambda flags=all: len(it.recv(50, flags))
    late = threading.Timer(0.05, tell, ["send 30"])
    tell("send 20")
    late.start()
    say("peek all, later", look)
    late.join()
    say("peek all in parts", lambda: it.recvmsg_into([bytearray(20), bytearray(30)], 0, all)[0])
    say("still there", lambda: len(it.recv(100)))
    tell("send 3")
    await_bytes(it, 3)
    say("peek what is there", look, all | socket.MSG_DONTWAIT)
    # Again and again: the first may come before the call.
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    say("peek all until a signal", look)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    it.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 50_000))
    say("peek all until the time-out", look)
    it.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
    late = threading.Timer(0.05, tell, ["shut"])
    late.start()
    say("peek all until the end", look)
    late.join()
    say("read", lambda: len(it.recv(100)))
    say("peek the end", look)
    it.close()
    tell("close")
    it = connection()
    for inline in (0, 1):
        it.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, inline)
        for part in ("send 3", "urgent", "send 2"):
            tell(part)
        say("received", until, lambda: info(it, "Q", BYTES_RECEIVED) == 6 + 6 * inline)
        say("peek all until the urgent byte", look)
        say("read up to it", it.recv, 10)
        say("peek behind it", look, all | socket.MSG_DONTWAIT)
        say("read behind it", it.recv, 10)
        say("read the rest", it.recv, 10, socket.MSG_DONTWAIT)
    it.close()
    tell("close")

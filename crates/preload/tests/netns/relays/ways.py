import threading
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
signal.signal(signal.SIGPIPE, signal.SIG_IGN)

def said(call, *arguments):
    try:
        return call(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno]

def all_of(connection):
    data = b''
    while part := connection.recv(65536):
        data += part
    return data

def say(*words):
    print(*words, flush=True)

def in_child(act, connection, waits=True):
    child = os.fork()
    if child == 0:
        try:
            act(connection)
        except BaseException as error:
            say(repr(error))
        os._exit(0)
    if waits:
        connection.close()
        os.waitpid(child, 0)
    return child

def exits(connection):
    say(connection.recv(100))

def answers_after_end(connection):
    say(len(all_of(connection)))
    connection.sendall(b'a' * 1000000)

def ends_first(connection):
    connection.shutdown(socket.SHUT_WR)
    say(len(all_of(connection)))

def ended_before(connection):
    waits = select.poll()
    waits.register(connection, select.POLLRDHUP)
    waits.poll()
    in_child(answers_after_end, connection)

def names(connection):
    say(connection.getpeername()[0], connection.getsockname(), connection.getpeername() == connection_peer)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    say(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    say(connection.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN) == socket.AF_INET)
    say(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL))
    say(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[0])
    say(said(connection.setsockopt, socket.IPPROTO_TCP, 12345, 1))
    say(connection.recvfrom(100))

def names_of_another_program(connection):
    os.dup2(connection.fileno(), 0)
    asks = 'import socket; it = socket.socket(fileno=0); print(it.family.name, it.getsockname(), it.getpeername()[0])'
    os.execvp(sys.executable, [sys.executable, '-c', asks])

def waited_for(wait):
    def act(connection):
        say(wait(connection), connection.recv(100))
        connection.sendall(b'answer')
    return act

def polls(connection):
    waits = select.poll()
    waits.register(connection, select.POLLIN)
    return waits.poll()[0][1]

def epolls(connection):
    waits = select.epoll()
    waits.register(connection, select.EPOLLIN)
    return waits.poll()[0][1]

def selects(connection):
    return [len(ready) for ready in select.select([connection], [], [])]

def epolled_before(connection):
    waits = select.epoll()
    waits.register(connection, select.EPOLLIN)
    def act(connection):
        connection.sendall(b'go')
        say(len(waits.poll()), connection.recv(100))
    in_child(act, connection)

def nonblocking(connection):
    connection.setblocking(False)
    def act(connection):
        say(connection.getblocking(), said(connection.recv, 100))
        connection.setblocking(True)
        connection.sendall(b'go')
        say(connection.recv(100))
    in_child(act, connection)

def used_by_both(connection):
    say(connection.recv(5))
    child = in_child(lambda connection: connection.sendall(connection.recv(5)), connection, False)
    os.waitpid(child, 0)
    say(connection.recv(5))
    connection.sendall(b'both')
    connection.close()

def parent_waits(connection):
    seen = []
    reads = threading.Thread(target=lambda: seen.append(connection.recv(100)))
    reads.start()
    child = in_child(lambda connection: connection.sendall(b'go'), connection, False)
    reads.join()
    os.waitpid(child, 0)
    say(seen)
    connection.close()

def leaves_unread(connection):
    polls(connection)
    connection.sendall(b'go')

def closed_by_both(connection):
    def act(connection):
        connection.close()
        time.sleep(0.2)
    connection.recv(1)
    child = in_child(act, connection, False)
    connection.close()
    os.waitpid(child, 0)

def closed_late_by_child(connection):
    def act(connection):
        time.sleep(0.2)
        connection.sendall(b'late')
    in_child(act, connection)

def grandchild(connection):
    def act(connection):
        in_child(lambda connection: connection.sendall(connection.recv(100)), connection)
    in_child(act, connection)

def stream_of_c(connection):
    import ctypes
    c = ctypes.CDLL(None)
    c.fdopen.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(c.fdopen(connection.fileno(), b'r+'))
    room = ctypes.create_string_buffer(100)
    c.fgets(room, 100, stream)
    say(room.value)
    c.fputs(b'answer\n', stream)
    c.fflush(stream)

def shut_in_parent(connection):
    begin = os.pipe()
    def act(connection):
        os.read(begin[0], 1)
        say(connection.recv(100), said(connection.send, b'x'))
    child = in_child(act, connection, False)
    connection.shutdown(socket.SHUT_RDWR)
    os.write(begin[1], b'x')
    os.waitpid(child, 0)
    connection.close()

def used_late(act):
    def way(connection):
        begin = os.pipe()
        def late(connection):
            os.read(begin[0], 1)
            say(said(connection.recv, 100) in (b'', 'ECONNRESET'))
        child = in_child(late, connection, False)
        act(connection)
        connection.close()
        os.write(begin[1], b'x')
        os.waitpid(child, 0)
    return way

def see_reset(connection):
    connection.sendall(b'go')
    waits = select.poll()
    waits.register(connection, select.POLLRDHUP)
    waits.poll()

shut = lambda connection: connection.shutdown(socket.SHUT_RDWR)
forks = lambda act: lambda connection: in_child(act, connection)
ways = [forks(exits), forks(answers_after_end), forks(ends_first), ended_before, forks(names),
    forks(names_of_another_program), forks(waited_for(polls)), forks(waited_for(epolls)),
    forks(waited_for(selects)), epolled_before, nonblocking, used_by_both, parent_waits, forks(leaves_unread),
    closed_by_both, closed_late_by_child, grandchild, forks(stream_of_c), stream_of_c, shut_in_parent,
    used_late(see_reset), used_late(shut)]
for way in ways:
    connection, connection_peer = listener.accept()
    way(connection)
    connection.close()

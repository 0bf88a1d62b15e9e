import errno, socket, struct, time

def ends(connection):
    data = b''
    try:
        while part := connection.recv(65536):
            data += part
        end = 'end'
    except OSError as error:
        end = errno.errorcode[error.errno]
    print(len(data), data[:10], end, flush=True)

def says(connection, what=b'hello'):
    connection.sendall(what)

def many_and_end(connection):
    connection.sendall(b'm' * 1000000)
    connection.shutdown(socket.SHUT_WR)

def few_and_end(connection):
    connection.sendall(b'f' * 20000)
    connection.shutdown(socket.SHUT_WR)

def after_end(connection):
    ends(connection)
    many_and_end(connection)

def after_go(connection):
    connection.recv(2)
    says(connection)

def thrice(connection):
    for word in (b'first', b'secon'):
        says(connection, word)
    print(connection.recv(5), flush=True)
    says(connection, b'third')

def resets(connection):
    connection.recv(2)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
    connection.close()

nothing = lambda connection: None
line = lambda connection: says(connection, b'line\n')
for way in [says, many_and_end, after_end, few_and_end, says, nothing, says, says, says, after_go, after_go, thrice, after_go,
        says, says, nothing, says, line, line, nothing, resets, nothing]:
    while True:
        try:
            connection = socket.create_connection(('10.9.0.1', 7), 60)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    way(connection)
    ends(connection)
    connection.close()

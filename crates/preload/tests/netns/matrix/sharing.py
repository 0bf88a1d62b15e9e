# Addresses of port 17 that UDP sockets are bound to, one after the other.
SHARED = ("0.0.0.0", "10.9.0.1", "127.0.0.1", "::", "fd09::1")


def sharing(connection, tell):
    """UDP sockets that share a port by SO_REUSEADDR, by SO_REUSEPORT or by both."""
    options = (socket.SO_REUSEADDR,), (socket.SO_REUSEPORT,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT), ()
    for first in SHARED:
        for second in SHARED:
            for of_first in options:
                for of_second in options:
                    share(tell, (first, of_first), (second, of_second))
    all = [(address, options[0]) for address in SHARED]
    share(tell, *all)
    share(tell, *reversed(all), *all)
    reuse_later()


def share(tell, *planned):
    bound = []
    for address, options in planned:
        it = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
        it.setblocking(False)
        for option in options:
            it.setsockopt(socket.SOL_SOCKET, option, 1)
        say(f"bind {address} by {options} after {len(bound)}", it.bind, (address, 17))
        bound.append(it)
    # A hash that nobody knows chooses among those of a group.
    if len(bound) > 2 or not any(socket.SO_REUSEPORT in options for _, options in planned):
        for to in ("10.9.0.1", "fd09::1"):
            tell(f"ping {to} 17")
            served = select.select(bound, (), (), 0.1)[0]
            print(f"to {to}:", [bound.index(it) for it in served])
            for it in served:
                it.recv(4)
    for it in bound:
        it.close()


def reuse_later():
    """SO_REUSEADDR set and cleared after bind, as NTP servers do: it counts when others are bound."""
    for set, asks in ((False, True), (True, True), (True, False)):
        first, second, third = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(3))
        first.bind(("0.0.0.0", 17))
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, set)
        second.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, asks)
        say(f"bind beside {set} by {asks}", second.bind, ("10.9.0.1", 17))
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        third.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        say("bind after that", third.bind, ("127.0.0.1", 17))
        for it in (first, second, third):
            it.close()

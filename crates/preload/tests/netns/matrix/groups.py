GROUP, GROUP_V6 = "239.1.2.3", "ff15::123"
JOIN, LEAVE, MCAST_JOIN, MCAST_LEAVE, IP_PKTINFO = socket.IP_ADD_MEMBERSHIP, socket.IP_DROP_MEMBERSHIP, 42, 45, 8


def groups(connection, tell):
    """Multicast groups, joined before and after bind, by each way to name the interface."""
    index = next(index for index, name in socket.if_nameindex() if name != "lo")
    group, own, any = socket.inet_aton(GROUP), socket.inet_aton(NEAR[0]), bytes(4)
    number = struct.pack("i", index)
    requests = {
        "any": group + any, "own": group + own, "index": group + any + number, "both": group + own + number,
        "another's": group + socket.inet_aton("192.0.2.9"), "no group": own + own, "gone": group + any + struct.pack("i", 9999),
        "short": group + own[:3], "long": group + own + number + bytes(20),
    }
    for what, request in requests.items():
        join_and_leave(tell, f"v4 {what}", socket.IPPROTO_IP, (JOIN, LEAVE), request)
    storage = lambda address: address + bytes(128 - len(address))
    asked = struct.pack("ii", index, 0) + storage(sockaddr_v4(GROUP, 0))
    for what, request in {"index": asked, "short": asked[:-1], "any": bytes(8) + asked[8:], "v6": asked[:8] + storage(sockaddr_v6(GROUP_V6, 0))}.items():
        join_and_leave(tell, f"group_req {what}", socket.IPPROTO_IP, (MCAST_JOIN, MCAST_LEAVE), request)
    group = socket.inet_pton(socket.AF_INET6, GROUP_V6)
    for what, request in {"index": group + number, "short": group + number[:3], "gone": group + struct.pack("i", 9999)}.items():
        join_and_leave(tell, f"v6 {what}", socket.IPPROTO_IPV6, (socket.IPV6_JOIN_GROUP, socket.IPV6_LEAVE_GROUP), request)
    sends_to_group(tell)


def join_and_leave(tell, what, level, options, request):
    of_v6 = level == socket.IPPROTO_IPV6
    group, own, address = (GROUP_V6, NEAR_V6[0], "::") if of_v6 else (GROUP, NEAR[0], "0.0.0.0")
    for before in (False, True):
        it = socket.socket(socket.AF_INET6 if of_v6 else socket.AF_INET, socket.SOCK_DGRAM)
        if before:
            say(f"{what}, joined before", it.setsockopt, level, options[0], request)
        it.bind((address, 17))
        it.setsockopt(level, socket.IPV6_RECVPKTINFO if of_v6 else IP_PKTINFO, 1)
        if not before:
            say(f"{what}, joined", it.setsockopt, level, options[0], request)
        print("heard", heard(it, tell, group, own))
        say("joined again", it.setsockopt, level, options[0], request)
        say("left", it.setsockopt, level, options[1], request)
        print("heard", heard(it, tell, group, own))
        say("left again", it.setsockopt, level, options[1], request)
        it.close()


def heard(it, tell, group, own):
    """Destinations of what comes, of IPv4 with this host's addresses, up to a datagram to the host itself."""
    tell(f"ping {group} 17")
    if ":" not in own:
        tell("ping 10.9.0.255 17")
    tell(f"ping {own} 17")
    found = []
    while own not in [told[0] for told in found]:
        await_event(it, select.POLLIN)
        control = it.recvmsg(9, 100)[1]
        told = control[0][2]
        found.append([socket.inet_ntop(socket.AF_INET6, told[:16])] if ":" in own else [socket.inet_ntoa(told[at:at + 4]) for at in (8, 4)])
    return found


def sends_to_group(tell):
    it = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    it.bind(("0.0.0.0", 17))
    tell(f"join {GROUP}")
    for option, values in ((socket.IP_MULTICAST_TTL, (0, 1, 5, 255, 256, -1)), (socket.IP_MULTICAST_LOOP, (0, 1, 2, -1))):
        for value in values:
            say(f"{option} = {value}", it.setsockopt, socket.IPPROTO_IP, option, value)
            say("told", it.getsockopt, socket.IPPROTO_IP, option)
            say("byte", it.setsockopt, socket.IPPROTO_IP, option, bytes([value & 255]))
            say("told", it.getsockopt, socket.IPPROTO_IP, option)
    for interface in (socket.inet_aton(NEAR[0]), socket.inet_aton("192.0.2.9"), bytes(3)):
        say(f"by {interface}", it.setsockopt, socket.IPPROTO_IP, socket.IP_MULTICAST_IF, interface)
        say("told", it.getsockopt, socket.IPPROTO_IP, socket.IP_MULTICAST_IF, 4)
    it.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 3)
    say("sent", it.sendto, b"to the group", (GROUP, 9))
    say("heard", tell, "hear")
    tell(f"leave {GROUP}")
    it.close()

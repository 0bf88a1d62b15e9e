def main():
    control = socket.create_connection(CONTROL).makefile("rwb")

    def tell(command):
        control.write(command.encode() + b"\n")
        control.flush()
        return control.readline().decode().strip() or sys.exit(f"the peer has ended before it answers {command}")

    signals = SIGNALS
    signal.signal(signal.SIGPIPE, lambda *_: signals.append("SIGPIPE"))
    signal.signal(signal.SIGALRM, lambda *_: signals.append("SIGALRM"))
    datagrams(tell)
    listener = listening(tell)
    LISTENER.append(listener)
    connection = lambda: accepted(listener, tell)
    for part in (waits, reads, writes, ends, resets, slow_peers, shutdowns, queues, duplicates, threads,
                 options, quick_acks, files, misuse, peeks, bounds, option_lengths, buffers, names, more_waits, event_bits,
                 edges, listener_edges, woken, many_sent, many_received, by_number, signals_sent, copies, all_waited, kinds_of_files, families, sharing, groups, sources, states,
                 datagram_states, vectors, settings, refusals, refusals_in_order, marks):
        print("#", part.__name__)
        part(connection, tell)
        print("signals", signals)
        signals.clear()
    interrupted(connection, tell, signals)
    again(listener, connection, tell)
    print("kernel", kernels("Tcp", "PassiveOpens") + kernels("Udp", "InDatagrams"))


peer() if sys.argv[1:] == ["peer"] else main()

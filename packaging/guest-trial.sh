#!/bin/bash
# Runs inside the guest of guest-test.sh: the book's commands, and the unit under systemd.
set -uo pipefail
cd /root
export LC_ALL=C DEBIAN_FRONTEND=noninteractive HOME=/root

fail() {
    echo "FAILED: $*"
    journalctl --no-pager -o short-monotonic | grep -E "forebay|avc|audit" | tail -n 40
    for unit in forebay@eth1 forebay@eth2 prometheus; do
        systemctl status --no-pager --lines 0 "$unit"
    done
    exit 1
}

# Waits until a command succeeds, for a minute.
wait_until() {
    local tries
    for ((tries = 0; tries < 240; tries++)); do
        ! eval "$1" >/dev/null 2>&1 || return 0
        sleep 0.25
    done
    fail "waited in vain until $1"
}

# Interface $1 with the address 10.$2.0.2, and a sender at 10.$2.0.1 in the namespace of the same name.
add_interface() {
    ip netns add "$1"
    ip link add "$1" type veth peer name peer netns "$1"
    ip link set "$1" up
    ip -n "$1" link set lo up
    ip -n "$1" link set peer up
    ip -n "$1" address add "10.$2.0.1/24" dev peer
    ip -n "$1" neigh add "10.$2.0.2" lladdr "$(cat "/sys/class/net/$1/address")" dev peer
}

# Sends UDP datagrams to port 53 for some seconds, or $3 of them.
send() {
    ip netns exec "$1" perl -MIO::Socket::INET -e '
        my ($to, $count, $seconds) = @ARGV;
        my @flows = map { IO::Socket::INET->new(PeerAddr => $to, PeerPort => 53, Proto => "udp") or die $! } 1 .. 8;
        my $end = time + $seconds;
        for (my $sent = 0; $sent < $count && time < $end; $sent++) { $flows[$sent % 8]->send("x" x 18) }
        ' "10.$2.0.2" "$3" "$4"
}

property() {
    systemctl show --property "$2" --value "$1"
}

add_interface eth1 7
add_interface eth2 8

echo "== the book's commands"
while IFS= read -r line; do
    echo "\$ $line"
    # A Prometheus that was just started does not answer yet.
    [[ $line != promtool* ]] || wait_until "$line"
    echo y | bash -c "$line" # apt asks
    code=$?
    case "$line" in
    "forebay doctor"*) ((code <= 1)) || fail "$line: exit code $code" ;;
    *) ((code == 0)) || fail "$line: exit code $code" ;;
    esac
done <commands
[[ $(property forebay@eth1 ActiveState) == active ]] || fail "it is not active"

echo "== a scrape has what was sent"
send eth1 7 1000 10
received='promtool query instant http://localhost:9090 "forebay_packets_received_total{device=\"eth1\"} == 1000"'
wait_until "$received | grep -q 1000"
promtool query instant http://localhost:9090 forebay_packets_received_total
wait_until "promtool query instant http://localhost:9090 'rate(forebay_packets_received_total[1m])' | grep -q eth1"
while IFS= read -r expression; do
    answer=$(promtool query instant http://localhost:9090 "$expression" 2>&1) || fail "$expression: $answer"
    [[ -n $answer ]] && echo "answered: $expression" || echo "empty: $expression"
done <expressions

echo "== reload"
sed -i 's/^# netdev_max_backlog.*/netdev_max_backlog = 2000/' /etc/forebay/eth1.toml
systemctl reload forebay@eth1 || fail "systemctl reload"
wait_until "forebay get netdev_max_backlog --name eth1 | grep -q 2000"
wait_until "journalctl -u forebay@eth1 | grep -q 'read again'"
journalctl --no-pager -o cat -u forebay@eth1 | tail -n 3

echo "== exposure"
systemd-analyze security --no-pager forebay@eth1 | grep -v '✓'
status=/proc/$(property forebay@eth1 MainPID)/status
grep -E '^(Uid|Cap(Prm|Eff|Bnd)|NoNewPrivs|Seccomp):' "$status"

echo "== an upgrade"
dpkg-deb -R forebay.deb newer
sed -i 's/^Version: .*/&+newer/' newer/DEBIAN/control
echo "# newer" >>newer/usr/lib/systemd/system/forebay@.service
dpkg-deb -b newer newer.deb >/dev/null
pid=$(property forebay@eth1 MainPID)
apt-get install -y ./newer.deb >/dev/null || fail "apt-get install ./newer.deb"
[[ $(property forebay@eth1 MainPID) == "$pid" ]] || fail "an upgrade has ended the service"
[[ $(property forebay@eth1 NeedDaemonReload) == no ]] || fail "systemd has the unit of before"

echo "== a busy run is spared"
printf '[run]\ndevices = ["eth2"]\ntake = "udp:53"\nspin = "always"\ncpus = "1"\nto = ["pcap:/var/lib/forebay/eth2"]\n' >/etc/forebay/eth2.toml
systemctl start forebay@eth2 || fail "systemctl start forebay@eth2"
send eth2 8 100000000 25
[[ $(property forebay@eth2 NRestarts) == 0 ]] || fail "a busy run was restarted"
metrics=$(forebay top --once --name eth2 2>&1) || true
echo "$metrics" | head -n 5

echo "== a hanging run is restarted"
systemctl restart forebay@eth2 || fail "systemctl restart forebay@eth2"
pid=$(property forebay@eth2 MainPID)
rm -f /var/lib/forebay/eth2/cpu0.pcap
mkfifo /var/lib/forebay/eth2/cpu0.pcap
send eth2 8 1 10
wait_until "[[ \$(property forebay@eth2 NRestarts) == 1 && \$(property forebay@eth2 ActiveState) == active ]]"
[[ $(property forebay@eth2 MainPID) != "$pid" ]] || fail "it has the same process"
journalctl --no-pager -o short-monotonic -u forebay@eth2 | grep -E 'atchdog|Scheduled|Started' | tail -n 6
send eth2 8 100 10
wait_until "forebay get proc/net/softnet_stat --name eth2 | grep -q 00000064"

echo "== stop and removal"
systemctl disable --now forebay@eth1 forebay@eth2 || fail "systemctl disable"
[[ $(property forebay@eth1 Result) == success ]] || fail "it did not end well"
[[ -z $(find /run/forebay -name '*.sock') ]] || fail "a control socket is left"
apt-get purge -y forebay >/dev/null || fail "apt-get purge"
ls -la /etc/forebay /var/lib/forebay 2>&1
[[ ! -e /run/forebay ]] || fail "/run/forebay is left"
systemctl --failed --no-legend
echo "SUCCEEDED in $(cut -d ' ' -f 1 /proc/uptime) s"

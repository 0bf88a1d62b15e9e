#!/usr/bin/env bash
# Runs guest-trial.sh in a virtual machine with Debian and systemd: the book's first service, the unit's
# reload, watchdog and hardening. By hand: it downloads some 250 MB, and takes five minutes without KVM.
# usage: guest-test.sh FILE.deb [tcg|kvm]
set -euo pipefail

here=$(realpath "$(dirname "$0")")
deb=$(realpath "$1")
accel=${2:-tcg}
work=$(mktemp -d /var/tmp/forebay-guest.XXXXXX)
trap 'rm -rf --one-file-system "$work"' EXIT
root=$work/root

for tool in mmdebstrap mke2fs qemu-system-x86_64 python3; do
    command -v "$tool" >/dev/null || { echo "guest-test: install $tool" >&2; exit 1; }
done

mmdebstrap --quiet --variant=minbase --include=systemd-sysv,dbus,procps,iproute2,prometheus,linux-image-amd64 \
    bookworm "$root" "${MIRROR:-http://deb.debian.org/debian}"
cp "$root"/boot/vmlinuz-* "$work/vmlinuz"
cp "$root"/boot/initrd.img-* "$work/initrd"
rm -rf "$root"/boot/* "$root"/usr/share/{doc,javascript,locale,man}/*

printf '127.0.0.1 localhost\n' >"$root/etc/hosts"
rm -f "$root/etc/resolv.conf"
cp "$deb" "$root/root/forebay.deb"
cp "$here/guest-trial.sh" "$root/root/trial"
sed -n '/^```sh/,/^```/{/^```/d;p}' "$here/../docs/src/guide/first-service.md" >"$root/root/commands"
# Queries of the dashboard, with its variables set.
python3 - "$here/../contrib/grafana/forebay.json" >"$root/root/expressions" <<'END'
import json, re, sys
for expression in re.findall(r'"expr": ("(?:[^"\\]|\\.)*")', open(sys.argv[1]).read()):
    query = json.loads(expression).replace("$__rate_interval", "1m").replace("$instance", ".*")
    print(" ".join(query.split()))
END
cat >"$root/etc/systemd/system/trial.service" <<'END'
[Unit]
After=basic.target prometheus.service

[Service]
Type=oneshot
ExecStart=/bin/bash /root/trial
StandardOutput=file:/dev/ttyS1
StandardError=inherit
ExecStopPost=/bin/sh -c "sync; echo o >/proc/sysrq-trigger; sleep 9"
END
mkdir -p "$root/etc/systemd/system/default.target.wants"
ln -s ../trial.service "$root/etc/systemd/system/default.target.wants/trial.service"

mke2fs -q -t ext4 -O ^has_journal -d "$root" "$work/disk" 2G
cpu=$([[ $accel == kvm ]] && echo host,-arch-capabilities || echo max)
timeout 900 qemu-system-x86_64 -accel "$accel" -cpu "$cpu" -smp 2 -m 1024 -nodefaults -no-reboot -display none \
    -kernel "$work/vmlinuz" -initrd "$work/initrd" -append "root=/dev/vda rw console=ttyS0 quiet panic=-1" \
    -drive "file=$work/disk,if=virtio,format=raw,cache=unsafe" -device virtio-rng-pci \
    -serial "file:$work/console" -serial "file:$work/told" </dev/null || true
cat "$work/told"
grep -q '^SUCCEEDED' "$work/told" || { tail "$work/console" >&2; exit 1; }

#!/usr/bin/env bash
# Installs the package in a clean Debian, uses it, removes it, and sees that nothing is left.
# usage: chroot-test.sh FILE.deb
set -euo pipefail

deb=$(realpath "$1")
suite=$(. /etc/os-release && echo "${VERSION_CODENAME:?}")
root=$(mktemp -d /var/tmp/forebay-chroot.XXXXXX)
chmod 755 "$root" # for apt's user
trap 'umount -q "$root/proc" "$root/sys" || true; rm -rf --one-file-system "$root"' EXIT

fail() {
    echo "chroot-test: $*" >&2
    exit 1
}

# Files of the system, but for what apt, dpkg and systemd note of their own work.
files() {
    (cd "$root" && find . -xdev \( -path ./proc -o -path ./sys -o -path ./run -o -path ./var/cache -o -path ./var/lib/apt \
        -o -path ./var/lib/dpkg -o -path ./var/log -o -path ./tmp \) -prune -o -print | sort)
}

inside() {
    chroot "$root" env DEBIAN_FRONTEND=noninteractive LC_ALL=C PATH=/usr/sbin:/usr/bin:/sbin:/bin "$@"
}

debootstrap --variant=minbase --include=systemd "$suite" "$root" "${MIRROR:-http://deb.debian.org/debian}" >"$root.log" 2>&1 ||
    { tail "$root.log" >&2; fail "debootstrap failed, see $root.log"; }
rm "$root.log"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
cp "$deb" "$root/tmp/forebay.deb"
before=$(files)

inside apt-get install -y --no-install-recommends /tmp/forebay.deb >/dev/null
inside forebay --version
inside forebay replay | tail -n 1
inside forebay doctor lo >/dev/null || (($? <= 2)) || fail "forebay doctor does not run"
for file in /usr/share/man/man1/forebay.1.gz /usr/share/man/man1/forebay-run.1.gz /etc/forebay/example.toml \
    /usr/share/bash-completion/completions/forebay /usr/share/zsh/vendor-completions/_forebay \
    /usr/share/fish/vendor_completions.d/forebay.fish /usr/lib/systemd/system/forebay@.service \
    /usr/lib/forebay/libforebay_preload.so /usr/share/forebay/forebay.grafana.json \
    /usr/share/doc/forebay/copyright; do
    [[ -s $root$file ]] || fail "$file is not installed"
done
inside systemd-analyze verify --man=no forebay@example.service || fail "the unit is not valid"

echo "# a change of the operator's" >>"$root/etc/forebay/example.toml"
inside apt-get remove -y forebay >/dev/null
[[ ! -e $root/usr/bin/forebay ]] || fail "/usr/bin/forebay is left"
[[ -e $root/etc/forebay/example.toml ]] || fail "a changed config file was removed"
inside apt-get purge -y forebay >/dev/null
diff <(echo "$before") <(files) || fail "the files above are left, or gone"
echo "chroot-test: installed, used, removed and purged on $suite"

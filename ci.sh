#!/usr/bin/env bash
# Every check of the project, one verb each. A check whose tool is missing is skipped, and says so.
set -euo pipefail
cd "$(dirname "$0")"

NIGHTLY=${NIGHTLY:-nightly}
FUZZ_SECS=${FUZZ_SECS:-20} # for each target

verbs="quick pr fmt lint msrv deny typos semver test loom miri fuzz counts bench mutants deb contrib promises all"
skipped=()

usage() {
    cat >&2 <<'END'
usage: ./ci.sh VERB...
       ./ci.sh quick [CRATE...]
  quick  what was changed, or these crates: formatting, clippy, unit and offline tests
  pr     what needs neither root nor peers: lint, loom, 5 s of each fuzz target, tests
  fmt    is everything formatted?
  lint   clippy and rustdoc, without a warning; SPECIFICATION.md names tests that exist; no crate
         uses one above it; doc comments open well, tests have names of six words at most; each
         feature builds by itself; all build for aarch64, and for 32 bits they say that they cannot
  msrv   the oldest Rust that Cargo.toml promises builds all
  deny   licences and sources of dependencies (cargo-deny), by hand
  typos  spelling (typos, by typos.toml), by hand
  semver what the face has changed since the last release (cargo-semver-checks), by hand
  test   documentation, unit and integration tests
  loom   every interleaving of the models of memory, of the drain rule and of a socket's queue
  miri   the memory's tests, checked for undefined behaviour
  fuzz   every fuzz target for FUZZ_SECS seconds (20), one on each CPU at a time
  counts instructions of the hottest functions, under crates/rx/benches/counts.limits (valgrind)
  bench  every stage measured, one JSON line each, appended to a file in docs/src/benchmarks
  mutants  changes that no test of buf, rx and stack notices: in MUTATED (a glob of files; all,
         which takes a day), by hand. MUTANTS.md has what was found last
  deb    target/package/forebay.deb (cargo-deb), with the profile DEB_PROFILE (release); as root, with
         debootstrap, it is installed, used and removed in a clean chroot; by hand
  contrib  manifests of contrib/kubernetes, by the schemas of Kubernetes (kubernetes-validate), by hand
  promises  writes docs/src/reference/promises.md: each promise, its tests, their places
  all    all but bench, deb, contrib, deny, typos, semver, mutants and promises; the tests come last
NIGHTLY names the toolchain for miri and fuzz.
END
}

has() {
    "$@" >/dev/null 2>&1
}

skip() {
    echo "skipped: $1: $2" >&2
    skipped+=("$1")
}

fmt() {
    has cargo fmt --version || { skip fmt "rustfmt is not installed"; return; }
    cargo fmt --all --check
    cargo fmt --check --manifest-path fuzz/Cargo.toml
}

lint() {
    specification
    promises_current
    figures_current
    layers
    face
    openings
    test_names
    has cargo clippy --version || { skip lint "clippy is not installed"; return; }
    cargo clippy --workspace --all-targets --locked -- -D warnings
    # Written for whoever works here: links to private items are meant, and followed. The program
    # goes apart, because a library has its name.
    local -x RUSTDOCFLAGS="-D warnings -A rustdoc::private_intra_doc_links"
    cargo doc --workspace --lib --no-deps --document-private-items --locked
    cargo doc --workspace --bins --no-deps --document-private-items --locked
    features
    cross
}

# The storeys in packet order, and the crates that each may use. Dependencies of tests go where they like.
storeys="
forebay-buf:
forebay-rx: buf
forebay-sys: buf rx
forebay-device: buf rx sys
forebay-stack: buf rx
forebay-engine: buf rx sys device
forebay-control: buf rx sys device engine
forebay: buf rx sys device stack engine control
forebay-tokio: forebay
forebay-metrics: rx sys device stack engine control forebay
forebay-run: buf rx sys device engine control metrics
forebay-quinn: sys forebay tokio
forebay-preload: control device forebay metrics stack sys
forebay-sim: buf rx sys device stack engine
forebay-cli: buf rx sys device stack engine control metrics run forebay sim
forebay-testkit: buf rx stack"

layers() {
    local crate used allowed
    for crate in $(cargo tree --locked --workspace --depth 0 --prefix none | cut -d ' ' -f 1); do
        allowed=$(grep "^$crate:" <<<"$storeys") ||
            { echo "$crate has no place among the storeys of ci.sh" >&2; return 1; }
        for used in $(cargo tree --locked --package "$crate" --depth 1 --edges normal --prefix none |
            tail -n +2 | cut -d ' ' -f 1 | grep '^forebay'); do
            [[ " ${allowed#*:} " == *" ${used#forebay-} "* ]] ||
                { echo "$crate uses $used, which lies above it or beside it" >&2; return 1; }
        done
    done
}

# Each feature of the face builds by itself, and none is needed.
features() {
    local feature
    for feature in "" af-xdp tun vhost-user control-mount; do
        cargo check --quiet --package forebay --locked --no-default-features --features "$feature"
    done
}

# Public names of the face: those of its root, and those one level below.
face() {
    local count
    count=$(awk '
        /^pub (struct|enum|trait|type|fn|const|mod) / { print $3 }
        /^pub use /, /;/ { used = used $0; if (/;/) { sub(/.*::\{?/, "", used); print used; used = "" } }
        ' crates/forebay/src/lib.rs crates/forebay/src/net/mod.rs | grep -oE '^[A-Za-z]+|, *[A-Za-z]+|^ +[A-Za-z]+' | wc -l)
    ((count <= 60)) || { echo "forebay: $count public names, where 60 are the limit" >&2; return 1; }
    echo "forebay: $count public names"
}

# Doc comments open with a noun phrase or a verb. Those of the programs' options are help texts.
openings() {
    local word='(What|Where|Whether|How|Who|Whom|Whose|Why|Which|It|They|This|These|That|Those|We|You|I|Its|Their|Our|(The|Does the) same|Same|As above)'
    if git ls-files 'crates/*.rs' 'fuzz/fuzz_targets/*.rs' | grep -vE '^crates/(cli/src|forebay/examples)/' |
        xargs awk -v word="^ *//[/!] $word[ .,:]" '
            FNR == 1 { inside = 0 }
            !inside && $0 ~ word { print FILENAME ":" FNR ": " $0 }
            { inside = $0 ~ /^ *\/\/[\/!] [^ ]/ }' | grep .; then
        echo "open with what the thing is, or with what the function does" >&2
        return 1
    fi
}

# Names of tests: an id of what is promised, if there is one, and at most six words.
test_names() {
    if git ls-files 'crates/*.rs' | xargs awk '
        function check(name) {
            sub(/^((promises?|rps|rfs|vio|lro|udp|flk|net|feat|init|stat|cfg|vq|rfc|met|cmp|doc|ins|svc|exe|tcp|plt|pag|top|ops)_[bcrst]?[0-9]+((_and)?_((rps|rfs)_)?[0-9]+)*|h[0-9]+)_/, "", name)
            if (split(name, words, "_") > 6) print FILENAME ":" FNR ": " name
        }
        /#\[test\]/ { is_test = 1 }
        is_test && match($0, /fn [a-z0-9_]+/) { check(substr($0, RSTART + 3, RLENGTH - 3)); is_test = 0 }
        FILENAME ~ /\/tests\// && match($0, /"[a-z][a-z0-9]*(_[a-z0-9]+)+"/) { check(substr($0, RSTART + 1, RLENGTH - 2)) }
        ' | grep .; then
        echo "name the subject, in at most six words" >&2
        return 1
    fi
}

# Nothing here is compiled by a C compiler for the target: checking takes Rust's library for it alone.
cross() {
    local target=aarch64-unknown-linux-gnu narrow=i686-unknown-linux-gnu said
    if has_target "$target"; then
        cargo check --workspace --locked --target "$target"
    else
        skip "lint for $target" "it is not installed: rustup target add $target"
    fi
    if has_target "$narrow"; then
        said=$(cargo check -p forebay-buf --locked --target "$narrow" 2>&1) && said=
        [[ $said == *"Forebay is for 64-bit targets"* ]] ||
            { echo "forebay-buf: it does not say that $narrow is not supported" >&2; return 1; }
    else
        skip "lint for $narrow" "it is not installed: rustup target add $narrow"
    fi
}

has_target() {
    [[ -d $(rustc --print target-libdir --target "$1") ]]
}

# The oldest Rust that Cargo.toml promises. Where it is the one at hand, the other checks have built with it.
msrv() {
    local promised
    promised=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
    [[ $(rustc --version) != "rustc $promised."* ]] || return 0
    has cargo "+$promised" --version || { skip msrv "the toolchain $promised is not installed"; return; }
    cargo "+$promised" check --workspace --all-targets --locked --target-dir target/msrv
}

# Licences, sources and doubles of dependencies; advisories need their database, which is fetched.
deny() {
    has cargo deny --version || { skip deny "install it: cargo install cargo-deny"; return; }
    cargo deny --locked check bans licenses sources
}

# Tests, one a line: name, file, line. A test is a function behind #[test] (those of proptest! and
# loom, too), or a string under tests/ that names a trial: the first element of a tuple whose second
# is code, or the argument of judge, trial or Trial::test.
tests_listed() {
    git ls-files 'crates/*.rs' | xargs awk '
        FNR == 1 { is_test = opened = 0; under_tests = FILENAME ~ /\/tests\// }
        /#\[test\]/ { is_test = 1 }
        is_test && match($0, /fn [a-z0-9_]+/) {
            print substr($0, RSTART + 3, RLENGTH - 3), FILENAME, FNR
            is_test = 0
        }
        under_tests && (match($0, /(^|[ \[]|judge|trial|trial_inside|Trial::test)\("[a-z0-9]+_[a-z0-9_]+", [a-zA-Z|{&(]/) ||
            match($0, /let name = "[a-z0-9]+_[a-z0-9_]+"/) || opened && match($0, /^ *"[a-z0-9]+_[a-z0-9_]+",$/)) {
            split(substr($0, RSTART, RLENGTH), part, "\"")
            print part[2], FILENAME, FNR
        }
        { opened = /(^|[ \[]|judge|trial|trial_inside|Trial::test)\($/ }'
}

# Of the names in SPECIFICATION.md, those of three words or more are tests, or strings of the program
# (knobs, reasons).
specification() {
    local tests name missing=0
    tests=$(tests_listed | cut -d ' ' -f 1)
    for name in $(grep -oE '`[a-z0-9]+(_[a-z0-9]+){2,}`' SPECIFICATION.md | tr -d '`' | sort -u); do
        [[ $name == *_max_* ]] || grep -qx "$name" <<<"$tests" || git grep -q "\"$name\"" -- 'crates/*/src/*.rs' ||
            { echo "SPECIFICATION.md: there is no test $name" >&2; missing=1; }
    done
    return $missing
}

typos() {
    command -v typos >/dev/null || { skip typos "install it: cargo install typos-cli"; return; }
    command typos .
}

semver() {
    has cargo semver-checks --version || { skip semver "install it: cargo install cargo-semver-checks"; return; }
    local released
    released=$(git tag --list 'v*' --sort=-version:refname | head -n 1)
    [[ -n $released ]] || { skip semver "there is no release (a tag v*) to compare with"; return; }
    cargo semver-checks --package forebay --baseline-rev "$released"
}

# The promises, each test with the file and the line that it stands at.
promises() {
    promises_table >docs/src/reference/promises.md
}

promises_table() {
    local here=https://github.com/forebay/forebay/blob/main
    echo "# Promises and their tests"
    echo
    echo "Written by \`./ci.sh promises\` from [SPECIFICATION.md]($here/SPECIFICATION.md)."
    awk -v here="$here" '
        NR == FNR { if (!($1 in file)) { file[$1] = $2; line[$1] = $3 }; next }
        /^\*\*/ { heading = $0; sub(/^\*\*/, "", heading); sub(/\.?\*\*.*/, "", heading) }
        /^## / { heading = substr($0, 4) }
        {
            for (rest = $0; match(rest, /`[a-z0-9]+_[a-z0-9]+_[a-z0-9_]+`/); rest = substr(rest, RSTART + RLENGTH)) {
                name = substr(rest, RSTART + 1, RLENGTH - 2)
                if (!(name in file)) continue
                if (heading != "") { printf "\n## %s\n\n", heading; heading = "" }
                printf "- [`%s`](%s/%s), line %s\n", name, here, file[name], line[name]
            }
        }' <(tests_listed) SPECIFICATION.md
}

# Lines move with every change; which test is where does not.
promises_current() {
    diff <(promises_table | sed 's/, line [0-9]*$//') <(sed 's/, line [0-9]*$//' docs/src/reference/promises.md) >&2 ||
        { echo "docs/src/reference/promises.md is of another day: ./ci.sh promises" >&2; return 1; }
}

# Drawings of the book are what docs/figures.py draws.
figures_current() {
    has python3 --version || { skip "lint of figures" "python3 is not installed"; return; }
    local drawn
    drawn=$(mktemp -d)
    docs/figures.py "$drawn"
    diff -r "$drawn" docs/src/figures >&2 ||
        { echo "docs/src/figures is of another day: docs/figures.py docs/src/figures" >&2; return 1; }
    rm -r "$drawn"
}

# Documentation first: the output closes with the summary of a runner that ran something.
test() {
    cargo test --workspace --locked --doc
    cargo test --workspace --locked --lib --bins --tests
}

loom() {
    local -x RUSTFLAGS="--cfg loom"
    # The models run for a minute: linking that optimizes the whole would take longer than it saves.
    local -x CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 CARGO_PROFILE_RELEASE_DEBUG=false
    cargo test -p forebay-buf --release --lib --locked --target-dir target/loom
    cargo test -p forebay-rx --release --test offline --locked --target-dir target/loom
    cargo test -p forebay-stack --release --lib socket::queue::models --locked --target-dir target/loom
}

miri() {
    has cargo "+$NIGHTLY" miri --version || { skip miri "$NIGHTLY has no miri"; return; }
    # A backtrace of an expected panic takes Miri seconds.
    MIRIFLAGS=-Zmiri-disable-isolation RUST_BACKTRACE=0 \
        cargo "+$NIGHTLY" miri test -p forebay-buf --locked --target-dir target/miri
}

fuzz() {
    has cargo "+$NIGHTLY" --version || { skip fuzz "$NIGHTLY is not installed"; return; }
    has cargo fuzz --version || { skip fuzz "cargo-fuzz is not installed"; return; }
    has c++ --version || { skip fuzz "a C++ compiler is not installed"; return; }
    cargo "+$NIGHTLY" fuzz build
    cargo fuzz list | NIGHTLY=$NIGHTLY FUZZ_SECS=$FUZZ_SECS xargs -n 1 -P "$(nproc)" \
        bash -euo pipefail -c "$(declare -f fuzz_target); fuzz_target \$1" fuzz
}

# One target, on one CPU. The end of its log says where a failing input is, and how to run it again.
fuzz_target() {
    local target=$1 log=fuzz/artifacts/$1.log
    mkdir -p fuzz/artifacts "fuzz/corpus/$target"
    if ! cargo "+$NIGHTLY" fuzz run "$target" "fuzz/corpus/$target" "fuzz/seeds/$target" -- \
        -max_total_time="$FUZZ_SECS" >"$log" 2>&1; then
        tail -n 60 "$log" >&2
        echo "fuzz $target: failed, see $log" >&2
        return 1
    fi
    echo "fuzz $target: $(tail -n 1 "$log")"
}

# Instructions that a further round of each case takes, held against its limit.
counts() {
    has valgrind --version || { skip counts "valgrind is not installed"; return; }
    local limits=crates/rx/benches/counts.limits program case limit took failed=0
    program=$(cargo bench --package forebay-rx --bench counts --no-run --locked \
        --message-format=json-render-diagnostics |
        sed -nE 's/.*"executable":"([^"]*counts-[^"]*)".*/\1/p' | tail -n 1)
    while read -r case limit; do
        took=$((($(instructions "$program" "$case" 1200) - $(instructions "$program" "$case" 200)) / 1000))
        # None: the case is not there, or it panics.
        if ((took <= 0 || took > limit)); then
            echo "counts $case: $took instructions, beside the $limit of $limits" >&2
            failed=1
        fi
        echo "counts $case: $took of $limit"
    done < <(grep -v '^#' "$limits")
    return $failed
}

# Instructions of a run. What the CPU can do that valgrind cannot, programs do not use under it.
instructions() {
    { valgrind --tool=callgrind --callgrind-out-file=/dev/null "$@" 2>&1 || true; } | sed -nE 's/.*Collected : ([0-9]+).*/\1/p'
}

# Figures of this machine, and the facts that they depend on, at the end of a file of the day's.
bench() {
    local machine record
    machine=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)
    record=docs/src/benchmarks/$(date +%F)-$(tr -cs '[:alnum:]' - <<<"$machine" | sed 's/-*$//').jsonl
    printf '{"commit":"%s","machine":"%s","cpus":%d,"kernel":"%s","at":"%s"}\n' \
        "$(git describe --always --dirty)" "$machine" "$(nproc)" "$(uname -r)" "$(date -u +%FT%TZ)" >>"$record"
    cargo run --release --locked --quiet -- bench all --json | tee -a "$record"
    echo "appended to $record" >&2
}

mutants() {
    has cargo mutants --version || { skip mutants "install it: cargo install cargo-mutants"; return; }
    # 2: some were missed, which the table tells.
    cargo mutants --package forebay-rx --package forebay-stack --package forebay-buf --file "${MUTATED:-crates/*/src/**/*.rs}" \
        --timeout 120 --output target -- --locked --lib --tests || (($? == 2))
    local file outcome
    echo "| file | caught | missed | timed out | not compiled |"
    echo "|---|---|---|---|---|"
    for file in $(cat target/mutants.out/{caught,missed,timeout,unviable}.txt | cut -d: -f1 | sort -u); do
        printf '| `%s` |' "$file"
        for outcome in caught missed timeout unviable; do
            printf ' %d |' "$(grep -c "^$file:" "target/mutants.out/$outcome.txt")"
        done
        echo
    done
    cat target/mutants.out/missed.txt
}

# The package, from a build without the feature that generates its man pages and completions.
deb() {
    has cargo deb --version || { skip deb "install it: cargo install cargo-deb"; return; }
    local package=target/package profile=${DEB_PROFILE:-release} kind version
    rm -rf "$package"
    for kind in man completions; do
        cargo run --locked --quiet --package forebay-cli --features generate -- generate "$kind" "$package/$kind"
    done
    cargo build --locked --package forebay-preload --profile "$profile"
    install -Dm 644 "target/${profile/#dev/debug}/libforebay_preload.so" -t "$package/lib"
    # cargo-deb strips what is the crate's own.
    strip --strip-unneeded "$package/lib/libforebay_preload.so"
    version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)
    printf 'forebay (%s-1) unstable; urgency=medium\n\n  * %s\n\n -- %s  %s\n' "$version" \
        "Changes are in /usr/share/doc/forebay/changelog.gz." \
        "The Forebay authors <forebay@example.org>" "$(git log -1 --format=%cD)" >"$package/changelog.Debian"
    cargo deb --locked --package forebay-cli --profile "$profile" --strip --output "$package/forebay.deb"
    if has lintian --version; then
        # Of packages in Debian itself.
        lintian --fail-on error,warning --suppress-tags initial-upload-closes-no-bugs "$package/forebay.deb"
    else
        skip "deb's lintian" "it is not installed"
    fi
    if ((EUID != 0)) || ! has debootstrap --version; then
        skip "deb in a chroot" "it takes root and debootstrap"
        return
    fi
    packaging/chroot-test.sh "$package/forebay.deb"
}

contrib() {
    has kubernetes-validate --version || { skip contrib "install it: pip install kubernetes-validate"; return; }
    kubernetes-validate --strict contrib/kubernetes/*.yaml
}

# For the hand that writes: the crates that were changed since main, or those named; nothing that needs
# root, a peer or time.
quick() {
    local crates=("$@") crate flags=() tests=()
    ((${#crates[@]} > 0)) || mapfile -t crates < <(
        { git diff --name-only HEAD; git diff --name-only '@{upstream}' 2>/dev/null || true; } |
            sed -nE 's#^crates/([^/]+)/.*#\1#p' | sort -u)
    fmt
    ((${#crates[@]} > 0)) || { echo "no crate was changed" >&2; return; }
    for crate in "${crates[@]}"; do
        flags+=(--package "$(sed -n 's/^name = "\(.*\)"/\1/p;T;q' "crates/$crate/Cargo.toml")")
        [[ ! -e crates/$crate/tests/offline/main.rs ]] || tests=(--test offline)
    done
    cargo clippy "${flags[@]}" --lib --bins --locked -- -D warnings
    cargo test "${flags[@]}" --lib --bins "${tests[@]}" --locked
}

# Before a pull request: all that runs without root and without peers, and a little of fuzzing.
pr() {
    fmt
    lint
    loom
    FUZZ_SECS=5 fuzz
    cargo test --workspace --locked --doc
    cargo test --workspace --locked --lib --bins --test offline
}

# Miri and the models keep one CPU busy for minutes: they run beside the checks that compile.
all() {
    fmt
    local log=target/beside.log beside
    mkdir -p target
    set -m # a process group of its own, to be ended as one
    (miri; loom) >"$log" 2>&1 &
    beside=$!
    set +m
    trap "kill -- -$beside 2>/dev/null || true" EXIT
    lint
    wait "$beside" || { cat "$log" >&2; echo "miri or loom: failed, as told above" >&2; return 1; }
    trap - EXIT
    cat "$log"
    ! grep -q '^skipped: miri' "$log" || skipped+=(miri)
    fuzz
    counts
    msrv
    echo "skipped steps: ${skipped[*]:-none}" >&2
    test
}

if (($# == 0)); then
    usage
    exit 2
fi
if [[ $1 == quick ]]; then
    shift
    quick "$@"
    exit
fi
for verb in "$@"; do
    [[ " $verbs " == *" $verb "* ]] || { usage; exit 2; }
done
# The background job of a script ignores SIGINT, and so would what the tests start and interrupt.
if [[ -z ${CI_SIGNALS:-} ]] && has env --default-signal=INT,QUIT true; then
    CI_SIGNALS=default exec env --default-signal=INT,QUIT "./${0##*/}" "$@"
fi
for verb in "$@"; do
    "$verb"
done

#!/bin/sh
# Prepares this checkout: finds a Python, makes .venv and installs kvferry into it, editable.
#
#     sh deploy/setup.sh run    what `kvferry` needs
#     sh deploy/setup.sh dev    the tools for tests and checks as well
#
# Safe to repeat, and quick when there is nothing to do. On Linux it also sees to two system packages: g++, because
# MLX's CPU back end compiles at run time, and OpenBLAS, because MLX is many times slower without it. As root or with
# a password-free sudo it installs them with apt; otherwise it says what to install. pip's own settings apply
# (PIP_INDEX_URL, pip.conf, ...). PYTHON=... chooses the interpreter.
set -eu

cd "$(dirname "$0")/.."
system=$(uname -s)

say() { printf 'kvferry set-up: %s\n' "$*" >&2; }
die() {
    say "$*"
    exit 1
}

# --- Python -----------------------------------------------------------------------------------------------------------

# Prints nothing if "$1" can make the environment, else why it cannot. Running it is the only sure test: a version
# manager's shim exists for versions that do not.
why_not() {
    "$1" - 2>/dev/null <<'PY' || echo "does not run"
import platform, sys
libc, libc_version = platform.libc_ver()
glibc = tuple(map(int, libc_version.split(".")[:2])) if libc == "glibc" else ()
if sys.version_info < (3, 11):
    print("is Python %d.%d" % sys.version_info[:2])
elif sys.platform == "darwin" and platform.machine() != "arm64":
    print("is built for %s, and MLX needs Apple silicon (arm64)" % platform.machine())
elif sys.platform == "darwin" and int(platform.mac_ver()[0].split(".")[0]) < 14:
    print("runs on macOS %s, and MLX needs macOS 14 or later" % platform.mac_ver()[0])
elif sys.platform == "linux" and glibc and glibc < (2, 35):
    print("runs on glibc %d.%d, and MLX needs glibc 2.35 or later" % glibc)
else:
    try:
        import ensurepip, venv
    except ImportError:
        print("has no venv module")
PY
}

candidates() {
    if [ -n "${PYTHON:-}" ]; then
        echo "$PYTHON"
        return
    fi
    printf '%s\n' python3.13 python3.12 python3.11 python3
    # Where Homebrew and python.org put theirs, in case PATH does not say so.
    [ "$system" = Darwin ] || return 0
    for version in 3.13 3.12 3.11; do
        echo "/opt/homebrew/bin/python$version"
        echo "/Library/Frameworks/Python.framework/Versions/$version/bin/python3"
    done
}

# Sets $python, or leaves it empty and lists in $rejected what was tried.
find_python() {
    python='' rejected=''
    for candidate in $(candidates); do
        if command -v "$candidate" >/dev/null 2>&1; then
            reason=$(why_not "$candidate")
        elif [ -n "${PYTHON:-}" ]; then
            reason="is not there"
        else
            continue
        fi
        if [ -z "$reason" ]; then
            python=$(command -v "$candidate")
            return
        fi
        rejected="$rejected
  $candidate $reason"
    done
}

no_python() {
    case $system in
        Darwin) hint="Install one with 'brew install python@3.13' or from python.org." ;;
        *) hint="On Debian or Ubuntu: apt-get install python3 python3-venv" ;;
    esac
    die "kvferry needs Python 3.11 or later with its venv module.${rejected:+ Tried:$rejected}
$hint"
}

# --- System packages (Linux) ------------------------------------------------------------------------------------------

has_compiler() { command -v g++ >/dev/null 2>&1; }
has_openblas() { "$python" -c 'import ctypes; ctypes.CDLL("libopenblas.so.0")' >/dev/null 2>&1; }

# Runs apt-get with the right to install, or fails. It is quiet unless something is wrong.
apt_get() {
    if [ "$(id -u)" -eq 0 ]; then
        DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0 "$@"
    else
        sudo -n env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0 "$@"
    fi </dev/null
}

# Installs Debian packages if it may; the caller looks whether that helped.
try_install() {
    command -v apt-get >/dev/null 2>&1 || return 0
    if [ "$(id -u)" -ne 0 ] && ! sudo -n true 2>/dev/null; then
        return 0
    fi
    say "installing system packages: $*"
    apt_get update || true # an old list may do
    output=$(apt_get install -y --no-install-recommends "$@" 2>&1) || printf '%s\n' "$output" >&2
}

ensure_linux_packages() {
    missing=''
    has_compiler || missing="g++"
    has_openblas || missing="${missing:+$missing }libopenblas0-pthread"
    [ -n "$missing" ] || return 0
    # shellcheck disable=SC2086 # two words are two packages
    try_install $missing
    has_compiler || die "g++ is missing, and MLX's CPU back end cannot work without it.
On Debian or Ubuntu: sudo apt-get install $missing
Elsewhere: install the C++ compiler g++ and OpenBLAS (libopenblas.so.0)."
    has_openblas || say "warning: OpenBLAS (libopenblas.so.0) is missing. Everything works, but many times slower.
On Debian or Ubuntu: sudo apt-get install libopenblas0-pthread"
}

# --- The environment --------------------------------------------------------------------------------------------------

# What the environment depends on. The folder is part of it, because an environment does not survive a move.
fingerprint() { printf '%s\n' "$PWD" && cksum pyproject.toml deploy/setup.sh; }

# True if the environment has what "$1" asks for. Fails if its Python has gone, as after an upgrade of Python.
is_ready() {
    [ -f ".venv/.ready-$1" ] && [ "$(cat ".venv/.ready-$1")" = "$(fingerprint)" ] && .venv/bin/python -c '' 2>/dev/null
}

install() {
    made_in=$(cat .venv/.made-in 2>/dev/null || true)
    if [ "$made_in" != "$PWD" ] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        say "making .venv with $python ($("$python" -c 'import platform; print(platform.python_version())'))"
        rm -rf .venv
        "$python" -m venv .venv
        printf '%s\n' "$PWD" >.venv/.made-in
    fi
    say "installing kvferry and what it needs into .venv (once; a few hundred megabytes)"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[$1]"
}

main() {
    case ${1:-} in
        run) extras=models stamps=run ;;
        dev) extras=models,dev stamps="run dev" ;;
        *) die "usage: sh deploy/setup.sh run|dev" ;;
    esac
    if is_ready "$1"; then
        return
    fi

    find_python
    if [ -z "$python" ] && [ -z "${PYTHON:-}" ] && [ "$system" = Linux ]; then
        try_install python3 python3-venv
        find_python
    fi
    [ -n "$python" ] || no_python
    if [ "$system" = Linux ]; then
        ensure_linux_packages
    fi

    install "$extras"
    for stamp in $stamps; do
        fingerprint >".venv/.ready-$stamp"
    done
}

main "$@"

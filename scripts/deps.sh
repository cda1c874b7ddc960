#!/bin/sh
# Installs the Debian packages that Muster needs. Quiet when they are already there.
#   scripts/deps.sh build    to build the library and the command, and for the demo
#   scripts/deps.sh check    and for all tests (PyTorch is the oracle; Open MPI and MPICH); the default
#   scripts/deps.sh bench    and for make bench
#   scripts/deps.sh ci       (check's) and for .ci/run (clang)
set -eu

build="gcc libc6-dev make cmake ninja-build pkg-config libdnnl-dev zlib1g-dev libdeflate-dev libturbojpeg0-dev libspng-dev
       libjansson-dev dataset-fashion-mnist"
# Without the MPIs their plug-ins are not built, and their tests are skipped; SimGrid simulates one (bench/scale.py).
mpi="libopenmpi-dev openmpi-bin libmpich-dev mpich libsimgrid-dev"
check="libcmocka-dev g++ iproute2 binutils unzip ziptool python3 python3-numpy python3-torch python3-torchvision python3-pil $mpi"
# Without OpenBLAS, PyTorch has the reference BLAS, which is no peer.
bench="python3-venv libopenblas0-pthread"
ci="clang"

case "${1:-check}" in
build) want="$build" ;;
check) want="$build $check" ;;
bench) want="$build $check $bench" ;;
ci) want="$build $check $ci" ;;
*)
    echo "usage: scripts/deps.sh [build|check|bench|ci]" >&2
    exit 2
    ;;
esac

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
    echo "deps.sh: no apt-get here. Muster's packages are Debian's; install their like by hand:" $want >&2
    exit 1
fi

missing=""
for p in $want; do
    # A package may be there under another name that provides it (pkgconf for pkg-config).
    if [ "$(dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null)" != installed ]; then
        case "$p" in
        pkg-config) command -v pkg-config >/dev/null && continue ;;
        esac
        missing="$missing $p"
    fi
done
[ -n "$missing" ] || exit 0

sudo=""
if [ "$(id -u)" != 0 ]; then
    if ! command -v sudo >/dev/null; then
        echo "deps.sh: not root and no sudo; as root run: apt-get install --no-install-recommends$missing" >&2
        exit 1
    fi
    sudo=sudo
fi

log="$(mktemp)"
trap 'rm -f "$log"' EXIT
install() {
    # shellcheck disable=SC2086
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get -o Acquire::Retries=2 -o Dpkg::Use-Pty=0 -q -y \
        install --no-install-recommends $missing >"$log" 2>&1
}
echo "installing:$missing"
# The package lists of a fresh machine are empty or old: fetch them only when the first try fails.
if ! install; then
    if ! $sudo apt-get -q update >"$log" 2>&1 || ! install; then
        tail -n 15 "$log" >&2
        echo "deps.sh: apt-get could not install:$missing" >&2
        echo "deps.sh: without network, install these packages by other means and run this again" >&2
        exit 1
    fi
fi

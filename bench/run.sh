#!/bin/sh
# `make bench`: images/s of `muster train` against the same loop in PyTorch, ResNet-20 on Fashion-MNIST, batch 64 on
# each of two ranks, one thread each. Interleaved rounds in one run, so that a busy machine is busy for all; the
# ratios of medians count, the absolute numbers are this machine's.
#   ROUNDS=3 STEPS=60 bench/run.sh
set -eu
here=$(dirname "$0")
exec /usr/bin/python3 "$here/compare.py" --muster "${MUSTER:-build/muster}" --rounds "${ROUNDS:-3}" \
    --steps "${STEPS:-60}" --data "${DATA:-idx:/usr/share/datasets/fashion-mnist}"

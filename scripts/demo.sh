#!/bin/sh
# The demo: train a network on seven classes of Fashion-MNIST, then tune that checkpoint, with a new head, on all ten.
# Two ranks. DEMO=short runs a few dozen steps of the same: for CI, its accuracy means little.
set -eu
muster=${MUSTER:-build/muster}
data=${DATA:-idx:/usr/share/datasets/fashion-mnist}
out=${OUT:-demo-out}
case $muster in /*) ;; *) muster=$PWD/$muster ;; esac
first="--epochs 1"
second="--epochs 2"
if [ "${DEMO:-}" = short ]; then
    first="--steps 60"
    second="--steps 60"
fi
mkdir -p "$out"
say() { printf '\n$ muster'; printf ' %s' "$@"; printf '\n'; }
run() {
    say "$@"
    "$muster" "$@"
}

echo "Part 1: ResNet-20 on the first seven classes, two ranks"
# shellcheck disable=SC2086
run train --model resnet20 --data "$data" --classes 7 --ranks 2 $first --lr 0.1 --warmup 30 --crop 2 \
    --save "$out/seven.pth"

printf '\nPart 2: that checkpoint, a new head for all ten classes, two ranks\n'
# shellcheck disable=SC2086
run train --model resnet20 --data "$data" --from "$out/seven.pth" --head 10 --ranks 2 $second --lr 0.1 --warmup 30 \
    --crop 2 --save "$out/ten.pth"

printf '\nThe checkpoint, as any PyTorch user has it:\n'
run eval --model resnet20 --data "$data" --from "$out/ten.pth" --ranks 2

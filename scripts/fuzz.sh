#!/bin/bash
# Searches every fuzz target of a build with -DMUSTER_FUZZ=ON, as many at a time as there are cores (or JOBS), and prints
# a table: inputs tried, edges reached, inputs kept. What breaks a target is left in BUILD/fuzz/found and ends in exit 1.
#   scripts/fuzz.sh BUILD SECONDS [TARGET...]     each target for SECONDS; the corpus is kept in BUILD/fuzz/corpus
set -eu
cd "$(dirname "$0")/.."
[ $# -ge 2 ] || { sed -n '2,4s/^# *//p' "$0"; exit 2; }
build=$1 seconds=$2
shift 2
folder=$build/fuzz
python=/usr/bin/python3 # Debian's, which has Debian's PyTorch
[ -x "$python" ] || python=python3
mkdir -p "$folder/seeds" "$folder/corpus" "$folder/found"
"$folder/make_seeds" "$folder/seeds"
"$python" fuzz/make_checkpoint_seeds.py "$folder/seeds" ../shared/cases
if [ $# -gt 0 ]; then
    targets=("$@")
else
    targets=()
    for f in "$folder"/fuzz_*; do
        [ -f "$f" ] && [ -x "$f" ] && [[ $f != *_driver ]] && targets+=("$(basename "$f")")
    done
fi

one() { # target
    local kind=${1#fuzz_} log=$folder/$1.log
    mkdir -p "$folder/corpus/$kind" "$folder/seeds/$kind"
    # The limit of memory is that of all of AddressSanitizer too; no single allocation may be near it.
    if ! "$folder/$1" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=3000 -malloc_limit_mb=1024 -max_len=65536 \
        -detect_leaks=1 -print_final_stats=1 -artifact_prefix="$folder/found/$kind-" \
        "$folder/corpus/$kind" "$folder/seeds/$kind" >"$log" 2>&1; then
        printf '%-18s BROKEN\n' "$1"
        grep -E 'ERROR|SUMMARY|broken|runtime error|Test unit' "$log" | head -5
        return 1
    fi
    printf '%-18s %10s inputs %6s edges %6s kept %5s MB\n' "$1" \
        "$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")" \
        "$(grep -oE 'cov: [0-9]+' "$log" | tail -1 | cut -d' ' -f2)" \
        "$(grep -oE 'corp: [0-9]+' "$log" | tail -1 | cut -d' ' -f2)" \
        "$(sed -n 's/^stat::peak_rss_mb: *//p' "$log")"
}

status=0
running=0
for t in "${targets[@]}"; do
    one "$t" &
    running=$((running + 1))
    if [ "$running" -ge "${JOBS:-$(nproc)}" ]; then
        wait -n || status=1
        running=$((running - 1))
    fi
done
while [ "$running" -gt 0 ]; do
    wait -n || status=1
    running=$((running - 1))
done
exit "$status"

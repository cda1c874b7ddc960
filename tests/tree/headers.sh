#!/bin/sh
# headers.sh INCLUDE CC: every public header compiles alone, as C99, C11 and C++, without a warning, twice in a row.
set -eu
include=$1 cc=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
n=0
for h in "$include"/muster/*.h; do
    name=muster/$(basename "$h")
    printf '#include <%s>\n#include <%s>\nint main(void) { return 0; }\n' "$name" "$name" >"$work/one.c"
    cp "$work/one.c" "$work/one.cc"
    flags="-Wall -Wextra -Wpedantic -Wshadow -Werror -fsyntax-only -I$include"
    "$cc" -std=c99 $flags "$work/one.c"
    "$cc" -std=c11 -Wstrict-prototypes -Wvla $flags "$work/one.c"
    g++ -std=c++11 $flags "$work/one.cc"
    n=$((n + 1))
done
# The shape macro has a form of its own in C++.
printf '#include <muster/muster.h>\nint main() { mu_dims d = MU_DIMS(2, 3); return d.ndim - 2 + MU_SCALAR.ndim; }\n' \
    >"$work/dims.cc"
g++ -std=c++11 -Wall -Wextra -Werror -I"$include" "$work/dims.cc" -o "$work/dims"
"$work/dims"
[ "$n" -ge 10 ] || { echo "only $n headers in $include"; exit 1; }
echo "$n headers: C99, C11, C++11"

#!/bin/sh
# symbols.sh NM LIBRARY SONAME SOVERSION: the shared library exports mu_ names only, every function that the public
# headers declare, and carries the versioned name.
set -eu
nm=$1 library=$2 soname=$3 soversion=$4
here=$(cd "$(dirname "$0")/../.." && pwd)
exported=$("$nm" -D --defined-only "$library" | awk '{print $3}' | sed 's/@.*//' | sort -u)
bad=$(echo "$exported" | grep -v '^mu_' || true)
if [ -n "$bad" ]; then
    echo "exported but not mu_:"
    echo "$bad"
    exit 1
fi
[ "$(echo "$exported" | wc -l)" -ge 2 ] || { echo "nothing is exported"; exit 1; }
[ "$soname" = "libmuster.so.$soversion" ] || { echo "the library's name is $soname"; exit 1; }
# Declarations are "MU_API type name(": what is declared must exist, what exists must be declared.
declared=$(cat "$here"/include/muster/*.h | grep -o 'MU_API[^;(]*[ *]\(mu_[a-z0-9_]*\)(' |
    sed 's/.*[ *]\(mu_[a-z0-9_]*\)($/\1/' | sort -u)
missing=$(for d in $declared; do echo "$exported" | grep -qx "$d" || echo "$d"; done)
undeclared=$(for e in $exported; do echo "$declared" | grep -qx "$e" || echo "$e"; done)
if [ -n "$missing$undeclared" ]; then
    echo "declared, not exported:" $missing
    echo "exported, not declared:" $undeclared
    exit 1
fi
echo "$(echo "$exported" | wc -l) names, all mu_, all declared"

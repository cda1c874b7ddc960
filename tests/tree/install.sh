#!/bin/sh
# install.sh BUILD SOURCE LIBDIR: installs into a folder of its own and builds the examples against that, as a user
# does: with find_package and with pkg-config, shared and static; then runs one of each.
set -eu
build=$1 source=$2 libdir=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root prefix=/opt/muster
here=$root$prefix
DESTDIR=$root cmake --install "$build" --prefix $prefix >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
for f in bin/muster "$libdir/libmuster.so" "$libdir/libmuster.a" "$libdir/pkgconfig/muster.pc" \
    "$libdir/cmake/muster/muster-config.cmake" include/muster/muster.h share/man/man1/muster.1 \
    share/bash-completion/completions/muster; do
    [ -e "$here/$f" ] || { echo "not installed: $f"; find "$root"; exit 1; }
done
for plugin in "$build"/muster-plugins/*.so; do
    [ ! -e "$plugin" ] || [ -e "$here/$libdir/muster-plugins/${plugin##*/}" ] || { echo "not installed: $plugin"; exit 1; }
done
"$here/bin/muster" version
# Nothing of the build or source tree may leak into what is installed.
if grep -rlF -e "$source" "$here/$libdir/pkgconfig" "$here/$libdir/cmake"; then
    echo "a path of the source tree is in the installed package"
    exit 1
fi

cmake -S "$source/examples" -B "$work/cmake" -DCMAKE_PREFIX_PATH="$here" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
cmake --build "$work/cmake" -j 2 >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
ran=0
for program in "$work"/cmake/hello "$work"/cmake/hello_static; do
    "$program" || { echo "$program failed"; exit 1; }
    ran=$((ran + 1))
done

PKG_CONFIG_PATH=$here/$libdir/pkgconfig
export PKG_CONFIG_PATH PKG_CONFIG_SYSROOT_DIR=
# --define-prefix: the folder was moved from where it is meant to be.
config="pkg-config --define-prefix"
for example in "$source"/examples/*.c; do
    name=$(basename "$example" .c)
    cc -std=c11 -Wall -Wextra -Werror $($config --cflags muster) "$example" -o "$work/$name.shared" \
        $($config --libs muster) -lm -Wl,-rpath,"$here/$libdir"
    cc -std=c11 $($config --static --cflags muster) "$example" -o "$work/$name.static" \
        $($config --static --libs muster | sed 's/-lmuster\b/-l:libmuster.a/')
done
"$work/hello.shared"
"$work/hello.static"
ldd "$work/hello.shared" | grep -q 'libmuster\.so\.' || { echo "hello.shared does not use the shared library"; exit 1; }
if ldd "$work/hello.static" | grep -q libmuster; then
    echo "hello.static uses the shared library"
    exit 1
fi
echo "installed, $ran programs with find_package, shared and static with pkg-config"

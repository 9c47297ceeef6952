#!/bin/sh
# Installs into a temporary prefix and uses what is there as a stranger would: a program built with the flags of
# pkg-config, every header by itself as C11 and as C++, the installed mixtape. Reports as the cmocka programs do.
prefix=$(mktemp -d)
trap 'rm -rf "$prefix"' EXIT
passed=0 failed=0
check() { # name, command...
    name=$1
    shift
    if "$@" >"$prefix/log" 2>&1; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "$name:"
        sed 's/^/  /' "$prefix/log"
    fi
}

# A program cannot see the sources of this tree: it is compiled elsewhere.
build() {
    cp tests/install/moe.c "$prefix/moe.c"
    (cd "$prefix" &&
        ${CC:-cc} -std=c11 -Wall -Wextra -Wpedantic -Werror $(pkg-config --cflags mixtape) moe.c -o moe $(pkg-config --libs mixtape))
}
headers() {
    cd "$prefix" || return 1
    find include/mixtape -name '*.h' | sed 's|include/mixtape/||' >headers
    [ "$(wc -l <headers)" -ge 20 ] || return 1
    ! grep -E '_priv\.h|kernels/cpu/' headers || return 1
    while read -r h; do
        printf '#include "%s"\nextern int alone;\n' "$h" >one.c # a header of macros alone is no translation unit
        cp one.c one.cc
        ${CC:-cc} -std=c11 -Wall -Wextra -Wpedantic -Werror $(pkg-config --cflags mixtape) -fsyntax-only one.c || return 1
        ${CXX:-c++} $(pkg-config --cflags mixtape) -fsyntax-only one.cc || return 1
    done <headers
}
[ "$(wc -l <tests/install/moe.c)" -lt 80 ] || { echo "moe.c has 80 lines or more"; failed=1; }

check install "${MAKE:-make}" --no-print-directory install PREFIX="$prefix"
PKG_CONFIG_PATH=$prefix/lib/pkgconfig${PKG_CONFIG_PATH:+:$PKG_CONFIG_PATH}
export PKG_CONFIG_PATH
check "moe.c builds" build
check "moe.c agrees" "$prefix/moe"
check headers headers
check program "$prefix/bin/mixtape" --help
check version sh -c "$prefix/bin/mixtape --version | grep \"^mixtape \$(pkg-config --modversion mixtape), revision \""
echo "[  PASSED  ] $passed test(s)."
[ $failed -eq 0 ] && exit 0
echo "[  FAILED  ] $failed test(s)"
exit 1

#!/bin/sh
# The house rules that a machine can check. Usage: tests/lint.sh LIBRARY
# Prints each breach and exits non-zero when there is one.
library=$1
bad=0
breach() { echo "lint: $*"; bad=1; }

sources=$(git ls-files --cached --others --exclude-standard '*.c' '*.h' '*.cu' '*.cuh' | grep -v '/golden_') # generated tables are nobody's to format

# format
command -v clang-format >/dev/null || breach "clang-format is not installed (make deps)"
for f in $sources; do
    clang-format --dry-run -Werror "$f" >/dev/null 2>&1 || breach "$f: not as clang-format writes it"
done

# who may include whom: core <- kernels <- dist <- {layers, optim} <- train; tests see all
allowed() {
    case $1 in
    core) echo "core" ;;
    kernels) echo "core kernels" ;;
    dist) echo "core kernels dist" ;;
    layers) echo "core kernels dist layers" ;;
    optim) echo "core kernels dist optim" ;;
    train) echo "core kernels dist layers optim train" ;;
    tests) echo "core kernels dist layers optim train tests" ;;
    esac
}
for f in $sources; do
    room=${f%%/*}
    for header in $(sed -n 's/^#include "\([^"]*\)".*/\1/p' "$f"); do
        to=${header%%/*}
        case " $(allowed "$room") " in
        *" $to "*) ;;
        *) breach "$f includes $header: $room must not see $to" ;;
        esac
    done
done
for f in $(echo "$sources" | grep '^kernels/cpu/'); do
    grep -q '"kernels/cuda/' "$f" && breach "$f: the cpu backend must not see the cuda backend"
done
for f in $(echo "$sources" | grep '^kernels/cuda/'); do
    grep -q '"kernels/cpu/' "$f" && breach "$f: the cuda backend must not see the cpu backend"
done

# foreign headers have one door each
door() { # header pattern, allowed files pattern
    for f in $(echo "$sources" | grep -v '^tests/'); do
        echo "$f" | grep -qE "$2" && continue
        grep -qE "^#include <($1)" "$f" && breach "$f: <$1> has its door at $2"
    done
}
door 'hdf5' '^train/h5'
door 'mpi\.h' '^dist/comm_mpi\.c'
door 'nccl' '^dist/comm_nccl'
door 'cuda|cublas|curand|cudnn' '^(kernels/cuda/|dist/comm_nccl)'
door 'cblas|openblas|oneapi|dnnl' '^kernels/cpu/gemm'
door 'jansson|cyaml|yaml' '^train/'

# the library never prints, exits or aborts (core/status.c reports broken invariants)
for f in $(echo "$sources" | grep -E '^(core|kernels|dist|layers|optim)/' | grep -v '^core/status.c'); do
    grep -nE '[^a-z_](printf|puts|putchar|fprintf|perror|exit|_exit|abort)\(' "$f" |
        sed "s|^|lint: $f: forbidden call: |" | grep . && bad=1
done

# no unfinished work
grep -nE 'TODO|FIXME|XXX|#if 0' $sources && breach "unfinished work"

# every external symbol has the prefix
if [ -f "$library" ]; then
    strangers=$(nm -g --defined-only "$library" 2>/dev/null | awk 'NF==3 && $3 !~ /^(mt_|__odr_asan|_ZTS|_ZTI)/ {print $3}' | sort -u)
    for s in $strangers; do breach "symbol $s has no prefix mt_"; done
fi

# each header compiles alone, as C11 and as C++
for h in $(echo "$sources" | grep '\.h$'); do
    case $h in tests/* | kernels/cpu/*) variant="-DMT_ISA=portable -DMT_ELEM=f32" ;; *) variant= ;; esac
    # shellcheck disable=SC2086
    printf '#include "%s"\n' "$h" | ${CC:-cc} -std=c11 -D_GNU_SOURCE -I. $variant -fopenmp -fsyntax-only -x c - 2>/dev/null ||
        breach "$h does not compile alone as C11"
    case $h in kernels/cpu/* | tests/* | *_priv.h) continue ;; esac
    printf '#include "%s"\n' "$h" | ${CXX:-c++} -I. -fsyntax-only -x c++ - 2>/dev/null ||
        breach "$h does not compile alone as C++"
done

# names and sizes
for f in $sources; do
    n=$(wc -l <"$f")
    [ "$n" -gt 600 ] && breach "$f has $n lines: one concept, or several?"
done
for entry in $(git ls-files | sed 's|/.*||' | sort -u); do
    case $entry in
    Makefile | core | layers | kernels | optim | dist | train | tests | README.md | LICENSE | .*) ;;
    *) breach "$entry does not belong at the top level" ;;
    esac
done
[ $bad -eq 0 ] && echo "lint: clean"
exit $bad

#!/bin/sh
# Runs cmocka programs one after the other and adds up what they report. Usage: tests/run.sh [PREFIX...] -- PROGRAM...
# The words before -- are put in front of every program (valgrind and its options). A program that dies
# counts as one failure. The last line is "N passed, N failed".
prefix=""
while [ $# -gt 0 ] && [ "$1" != -- ]; do prefix="$prefix $1"; shift; done
shift
passed=0 failed=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for program in "$@"; do
    start=$(date +%s)
    # shellcheck disable=SC2086
    ASAN_OPTIONS="handle_segv=2:${ASAN_OPTIONS:-}" $prefix "$program" >"$log" 2>&1
    rc=$?
    p=$(sed -n 's/^\[  PASSED  \] \([0-9]*\) test.*/\1/p' "$log" | tail -n 1)
    f=$(sed -n 's/^\[  FAILED  \] \([0-9]*\) test.*/\1/p' "$log" | head -n 1)
    p=${p:-0} f=${f:-0}
    [ $rc -ne 0 ] && [ "$f" -eq 0 ] && f=1
    passed=$((passed + p)) failed=$((failed + f))
    name=${program#*tests/}
    printf '%-32s %4d passed %3d failed  %3ds\n' "$name" "$p" "$f" $(($(date +%s) - start))
    if [ "$f" -ne 0 ]; then
        grep -vE '^\[ (RUN|      OK)' "$log" | tail -n 40 | sed 's/^/    /'
    fi
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]

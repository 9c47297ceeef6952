#!/bin/sh
# Runs test programs one after the other and adds up what they report. Usage: tests/run.sh [PREFIX...] -- PROGRAM...
# The words before -- are put in front of every program (valgrind and its options). A program that dies, is missing
# or reports nothing counts as one failure. A libFuzzer target (fuzz_*) runs for FUZZ_SECONDS and counts as one test.
# What failed is said where it ran and once more at the end; the last line is "N passed, N failed".
prefix=""
while [ $# -gt 0 ] && [ "$1" != -- ]; do prefix="$prefix $1"; shift; done
shift
passed=0 failed=0
work=$(mktemp -d)
log=$work/log failures=$work/failures
trap 'rm -rf "$work"' EXIT
export ASAN_OPTIONS="handle_segv=2:${ASAN_OPTIONS:-}"
# Threads that spin for each other lose whole time slices where cores are few; the program sees to that by itself.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"

# Sum of the numbers in cmocka's lines of one kind: "[  PASSED  ] 7 test(s)."
total() { sed -n "s/^\[  $1 *\] \([0-9]*\) test.*/\1/p" "$log" | awk '{ n += $1 } END { print n + 0 }'; }

for program in "$@"; do
    start=$(date +%s)
    case ${program##*/} in
    fuzz_*) # what breaks it stays beside it: crash-..., timeout-...
        mkdir -p "$work/${program##*/}"
        "$program" -max_total_time="${FUZZ_SECONDS:-4}" -timeout=20 -rss_limit_mb=2048 -verbosity=0 \
            -artifact_prefix="$program." "$work/${program##*/}" >"$log" 2>&1
        rc=$?
        [ $rc -eq 0 ] && echo "[  PASSED  ] 1 test(s)." >>"$log"
        ;;
    *)
        # shellcheck disable=SC2086
        $prefix "$program" >"$log" 2>&1
        rc=$?
        ;;
    esac
    p=$(total PASSED) f=$(total FAILED) s=$(total SKIPPED)
    [ $rc -ne 0 ] && [ "$f" -eq 0 ] && f=1
    [ $rc -eq 0 ] && [ $((p + f + s)) -eq 0 ] && f=1
    passed=$((passed + p)) failed=$((failed + f))
    skipped=""
    [ "$s" -ne 0 ] && skipped=" ($s skipped)"
    printf '%-44s %4d passed %3d failed %4ds%s\n' "${program#build/}" "$p" "$f" $(($(date +%s) - start)) "$skipped"
    if [ "$f" -ne 0 ]; then
        echo "${program#build/}:" >>"$failures"
        grep -vE '^\[ (RUN|      OK)' "$log" | tail -n 40 | sed 's/^/    /' | tee -a "$failures"
    fi
done
[ -s "$failures" ] && cat "$failures"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]

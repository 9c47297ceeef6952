#!/bin/sh
# No kernel of wgmma (the GEMM, attention) keeps sums in local memory, and none has its wgmmas serialised: read from ptxas' reports,
# which a build with CUDA leaves beside the objects. Usage: tests/cuda/spills.sh [FOLDER WITH *.ptxas]
# Reports as the cmocka programs do; a build without CUDA has nothing to check.
reports=${1:-build/release/kernels/cuda}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Prints each breach in the reports given, then the number of kernels seen; fails where there is a breach or no kernel.
# A report has, for each kernel, its name, then "N bytes stack frame, N bytes spill stores, N bytes spill loads".
# Advisories: wgmma serialised (C7510, C7514, C7515, C7520, ...), setmaxnreg ignored (C7504, C7508).
check() {
    awk '
        FNR == 1 { kernel = "" }
        /Potential Performance Loss|serialized|.setmaxnreg. ignored/ && /wgmma|setmaxnreg/ { print FILENAME ": " $0; bad = 1 }
        /Compiling entry function/ { kernel = $7 }
        /bytes spill stores/ && kernel ~ /sm90_kernel/ {
            kernels++
            if ($5 + $9 > 0) { print FILENAME ": " kernel " spills " $5 " bytes, and reads " $9; bad = 1 }
            kernel = ""
        }
        END { print kernels + 0 " kernels"; exit bad || !kernels }' "$@"
}

passed=0 failed=0
ok() { passed=$((passed + 1)); }
fail() { echo "$*"; failed=$((failed + 1)); }

# the check itself
entry="ptxas info    : Compiling entry function '_Z16gemm_sm90_kernelI4sm90' for 'sm_90a'"
printf '%s\n    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n' "$entry" >"$work/clean"
printf '%s\n    8 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\n' "$entry" >"$work/spills"
printf '%s\n' "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ..." | cat "$work/clean" - >"$work/serial"
printf '%s\n' "ptxas info : (C7508) Potential Performance Loss: 'setmaxnreg' ignored to maintain minimum register requirements." | cat "$work/clean" - >"$work/setmaxnreg"
: >"$work/empty"
if check "$work/clean" >/dev/null; then ok; else fail "a clean report does not pass"; fi
for breach in spills serial setmaxnreg empty; do
    if check "$work/$breach" >/dev/null; then fail "a report with a breach passes: $breach"; else ok; fi
done

# the build
set -- "$reports"/*_sm90.cu.ptxas
if [ ! -e "$1" ]; then
    echo "[  SKIPPED ] 1 test(s)." # built without CUDA
elif check "$@" >"$work/log"; then
    cat "$work/log"
    ok
else
    cat "$work/log"
    fail "the wgmma kernels spill or wait"
fi
echo "[  PASSED  ] $passed test(s)."
[ $failed -eq 0 ] && exit 0
echo "[  FAILED  ] $failed test(s)"
exit 1

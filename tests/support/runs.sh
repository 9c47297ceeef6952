# For scripts that run the program in $work and look at what it left: what it printed in $work/log, RUN/ckpt.
passed=0 failed=0
is() { # what, command...
    what=$1
    shift
    if "$@"; then passed=$((passed + 1)); else
        failed=$((failed + 1))
        echo "FAILED: $what"
        tail -n 20 "$work/log"
    fi
}
says() { is "the log says '$1'" grep -q "$1" "$work/log"; }
saved() { (cd "$work/$1/ckpt" && find . -type f -exec cksum {} + | sort); }
# RUN has the files of another CHECKPOINT: same_files RUN OTHER CHECKPOINT
same_files() {
    for file in $(cd "$work/$2/ckpt/$3" && find . -type f | sort); do
        is "$1's $file is that of $2" cmp -s "$work/$2/ckpt/$3/$file" "$work/$1/ckpt/$3/$file"
    done
}

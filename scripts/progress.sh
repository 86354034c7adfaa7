# shellcheck shell=bash
# Sourced by scripts that run something long and quiet.

# run_logged LOG WHAT COMMAND...: the command with its output appended to LOG; on stderr, after 5 s
# and then every 25 s, one line with WHAT and how far Ninja is, so that a long silence is not taken
# for a hang. The command's exit status.
run_logged() {
    local log=$1 what=$2 status=0 ticker
    shift 2
    ( # its sleeps hold no pipe and no lock of ours when it is ended
        for pause in 5 25; do
            while sleep "$pause" >/dev/null 2>&1 9>&-; do
                kill -0 "$$" 2>/dev/null || exit
                step=$(tail -n 1 "$log" 2>/dev/null | sed -n 's|^\[\([0-9]*\)/\([0-9]*\)\].*|, step \1 of \2|p')
                echo "$what$step" >&2
                [ "$pause" = 25 ] || break
            done
        done
    ) &
    ticker=$!
    "$@" >>"$log" 2>&1 </dev/null || status=$?
    kill "$ticker" 2>/dev/null || true
    wait "$ticker" 2>/dev/null || true
    return "$status"
}

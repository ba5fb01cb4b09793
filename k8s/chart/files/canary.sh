# Keeps a canary beside the server: canary.sh KEY_FILE ARGUMENTS OF assay-smoke watch...
#
# The container itself stays up while the canary ends and begins, because a container that is not
# running makes the whole pod unready, and a canary's crash must not close a healthy server. The
# launcher writes a new key at each start, which the canary reads only at its own: so a new key ends it.
key=$1
shift
child=
ended() {
    [ -z "$child" ] || kill -TERM "$child" 2>/dev/null
    wait
    exit 0
}
trap ended TERM INT
nap() { # a sleep that a signal ends
    sleep "$1" &
    child=$!
    wait "$child"
    child=
}
while :; do
    until [ -s "$key" ]; do nap 1; done
    seen=$(cat "$key")
    assay-smoke watch "$@" --bypass-key-file "$key" &
    child=$! canary=$!
    while kill -0 "$canary" 2>/dev/null && [ "$(cat "$key" 2>/dev/null)" = "$seen" ]; do
        sleep 2 &
        wait $!
    done
    kill -TERM "$canary" 2>/dev/null
    wait "$canary"
    echo "canary ended with $?; the next begins in 5 s" >&2
    child=
    nap 5
done

# Holds a server's pod until the download has left its stamp: wait_for_weights.sh FOLDER SECONDS
folder=$1 left=$2
trap 'exit 143' TERM
until [ -e "$folder/assay-download.json" ]; do
    if [ "$left" -le 0 ]; then
        echo "weights: $folder is not complete after $2 s; see the weights Job" >&2
        exit 1
    fi
    sleep 5 &
    wait $!
    left=$((left - 5))
done

# Brings one revision of a checkpoint into a volume, once: weights.sh REPOSITORY REVISION FOLDER
#
# What was fetched is kept when this is killed, and taken up again. The mark is written last: without
# it no server starts from the folder.
set -eu
repository=$1 revision=$2 folder=$3
if [ -e "$folder/.complete" ]; then
    echo "weights: $folder is complete"
    exit 0
fi
[ ! -r /etc/assay/hub/token ] || HF_TOKEN=$(cat /etc/assay/hub/token)
[ -z "${HF_TOKEN:-}" ] || export HF_TOKEN
hf download "$repository" --revision "$revision" --local-dir "$folder"
hf cache verify "$repository" --revision "$revision" --local-dir "$folder" --fail-on-missing-files
assay-kernels audit "$folder"
: > "$folder/.complete.part"
mv "$folder/.complete.part" "$folder/.complete"
echo "weights: $repository at $revision is in $folder"

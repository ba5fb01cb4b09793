#!/usr/bin/env bash
# Keys for compose.yaml, each in a file that its owner alone can read; existing ones are kept.
#   docker/make_secrets.sh [FOLDER]       (./secrets)
# Writes no key to the terminal. The containers read them as the uid in ASSAY_UID, which this sets in .env.
set -euo pipefail
folder=${1:-secrets}
umask 077
mkdir -p "$folder"
for name in api_keys metrics_key grafana_password; do
    [[ -s $folder/$name ]] || head -c 32 /dev/urandom | base64 | tr -d '=+/\n' >"$folder/$name"
done
[[ -e $folder/hf_token ]] || : >"$folder/hf_token"
touch .env
grep -q '^ASSAY_UID=' .env || echo "ASSAY_UID=$(id -u)" >>.env
echo "$folder: api_keys, metrics_key, grafana_password, hf_token (empty unless you fill it)"

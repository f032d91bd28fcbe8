#!/usr/bin/env bash
# Runs on every host of a slice, from the root of the code: installs jaxlab once, then trains.
#
#   bash tpu/on_host.sh CONFIG [key=value …]
#
# jaxlab finds its last checkpoint in output_dir and goes on from there, so this script may be
# started again at any time. On a spot instance the notice of pre-emption arrives as SIGTERM: jaxlab
# saves and exits.
set -euo pipefail
cd "$(dirname "$0")/.."

[[ $# -ge 1 ]] || { echo "usage: $0 CONFIG [key=value …]" >&2; exit 2; }

# The TPU images carry Python 3.10; uv brings a newer one without touching it.
venv=${JAXLAB_VENV:-$HOME/jaxlab-venv}
if [[ ! -x $venv/bin/jaxlab ]]; then
  python3 -m pip install --quiet --user uv 2>/dev/null || python3 -m pip install --quiet uv
  python3 -m uv venv --python 3.12 "$venv"
fi
python3 -m uv pip install --quiet --python "$venv/bin/python" -e '.[tpu]'

# A run that lost its connection may still hold the chips: end it before starting another.
pid_file=$HOME/jaxlab.pid
if [[ -f $pid_file ]]; then
  old=$(<"$pid_file")
  if kill -TERM "$old" 2>/dev/null; then
    for _ in {1..60}; do kill -0 "$old" 2>/dev/null || break; sleep 1; done
    kill -KILL "$old" 2>/dev/null || true
  fi
fi

# --distributed: the hosts find each other through the TPU's metadata (jax.distributed.initialize).
"$venv/bin/jaxlab" train --distributed "$@" &
child=$!
echo "$child" >"$pid_file"
trap 'kill -TERM "$child" 2>/dev/null || true' TERM INT HUP
status=0
# `wait` returns early when a signal arrives; wait again until the child has saved and gone.
while kill -0 "$child" 2>/dev/null; do wait "$child" && status=0 || status=$?; done
rm -f "$pid_file"
exit "$status"

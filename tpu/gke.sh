#!/usr/bin/env bash
# Trains on GKE through XPK (https://github.com/AI-Hypercomputer/xpk), which restarts a workload that
# was pre-empted; jaxlab then resumes from its last checkpoint.
#
#   bash tpu/gke.sh [--dry-run] cluster                        make the cluster (once, ~20 minutes)
#   bash tpu/gke.sh [--dry-run] train CONFIG [key=value …]     start training on it
#   bash tpu/gke.sh [--dry-run] status                         the workloads and their states
#   bash tpu/gke.sh [--dry-run] stop                           end the workload
#   bash tpu/gke.sh [--dry-run] delete                         delete the cluster (it costs until then)
#
# Settings (PROJECT, ZONE, TPU_TYPE, BUCKET …): tpu/settings.sh. Needs `pip install xpk`, docker and
# kubectl; the cluster's service account must be able to write to the bucket (tpu/README.md).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")
dry_run=false
if [[ ${1:-} == --dry-run ]]; then dry_run=true; shift; fi
# shellcheck source=tpu/settings.sh
source "$here/settings.sh"
need xpk "pip install xpk"
: "${NUM_SLICES:=1}"
: "${MAX_RESTARTS:=100}" # how often the workload is started again before it counts as failed
: "${BASE_IMAGE:=python:3.12}"

place=(--project "$PROJECT" --zone "$ZONE")

case ${1:-} in
  cluster)
    options=()
    case $PROVISIONING in
      spot) options+=(--spot) ;;
      on-demand) options+=(--on-demand) ;;
      reserved) options+=(--reservation "${RESERVATION:?set RESERVATION to the name of yours}") ;;
      *) fail "PROVISIONING=$PROVISIONING is not spot, reserved or on-demand" 2 ;;
    esac
    run xpk cluster create --cluster "$NAME" "${place[@]}" --tpu-type "$TPU_TYPE" \
      --num-slices "$NUM_SLICES" "${options[@]}"
    ;;
  train)
    [[ -n ${2:-} ]] || fail "train needs a CONFIG, such as configs/llama3_8b_pretrain.yaml" 2
    [[ -f $root/$2 ]] || fail "there is no $2 in $root: give a path inside the checkout" 2
    run_name=$(basename "$2" .yaml)
    printf -v arguments '%q ' "$2" "output_dir=gs://$BUCKET/runs/$run_name" "${@:3}"
    # Workload names have no underscores.
    run xpk workload create --workload "$NAME-${run_name//_/-}" --cluster "$NAME" "${place[@]}" \
      --tpu-type "$TPU_TYPE" --num-slices "$NUM_SLICES" --max-restarts "$MAX_RESTARTS" \
      --base-docker-image "$BASE_IMAGE" --script-dir "$root" \
      --command "bash tpu/on_host.sh $arguments"
    ;;
  status) run xpk workload list --cluster "$NAME" "${place[@]}" ;;
  stop) run xpk workload delete --cluster "$NAME" "${place[@]}" ;;
  delete) run xpk cluster delete --cluster "$NAME" "${place[@]}" ;;
  *) sed -n '2,12s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac

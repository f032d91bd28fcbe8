#!/usr/bin/env bash
# Trains on a TPU slice of VMs, asked for as a queued resource, and comes back after pre-emption.
#
#   bash tpu/queued_resource.sh [--dry-run] train CONFIG [key=value …]
#        ask for the slice, wait for it, copy this checkout there, run `jaxlab train` on every host;
#        if the slice is taken away, ask for another and resume. Ends when training has ended.
#   bash tpu/queued_resource.sh [--dry-run] status    state of the request
#   bash tpu/queued_resource.sh [--dry-run] ssh CMD   run a command on every host
#   bash tpu/queued_resource.sh [--dry-run] delete    give the slice back (it costs until then)
#
# Settings (PROJECT, ZONE, TPU_TYPE, BUCKET …): tpu/settings.sh. Run it where it can stay up: a small
# VM or tmux. If it dies, start it again with the same arguments.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")
dry_run=false
if [[ ${1:-} == --dry-run ]]; then dry_run=true; shift; fi
# shellcheck source=tpu/settings.sh
source "$here/settings.sh"
need gcloud "https://cloud.google.com/sdk/docs/install"

place=(--project "$PROJECT" --zone "$ZONE")

# ACTIVE, PROVISIONING, WAITING_FOR_RESOURCES, SUSPENDED, FAILED …; ABSENT if there is none.
state() {
  gcloud compute tpus queued-resources describe "$NAME" "${place[@]}" \
    --format 'value(state.state)' 2>/dev/null || echo ABSENT
}

create() {
  local image options
  image=$(runtime_version) || exit 2
  options=(--node-id "$NAME" --accelerator-type "$TPU_TYPE" --runtime-version "$image")
  case $PROVISIONING in
    spot) options+=(--spot) ;;
    reserved) options+=(--reserved) ;;
    on-demand) ;;
    *) fail "PROVISIONING=$PROVISIONING is not spot, reserved or on-demand" 2 ;;
  esac
  [[ -z $SERVICE_ACCOUNT ]] || options+=(--service-account "$SERVICE_ACCOUNT")
  run gcloud compute tpus queued-resources create "$NAME" "${place[@]}" "${options[@]}"
}

delete() {
  run gcloud compute tpus queued-resources delete "$NAME" "${place[@]}" --force --quiet
}

# Returns when the slice is up, making or remaking it as needed.
ensure_active() {
  if [[ $dry_run == true ]]; then create; return; fi
  local now last=
  while true; do
    now=$(state)
    [[ $now == "$last" ]] || say "$(date +%T) queued resource $NAME: $now"
    last=$now
    case $now in
      ACTIVE) return ;;
      ABSENT) create ;;
      SUSPENDED | FAILED) delete ;; # taken away: the request must go before the next
    esac
    sleep "$POLL"
  done
}

on_every_host() {
  run gcloud compute tpus tpu-vm ssh "$NAME" "${place[@]}" --worker=all --command "$1"
}

copy_code() {
  local archive
  archive=$(mktemp -t jaxlab-XXXXXX.tar.gz)
  run git -C "$root" archive --format tar.gz --output "$archive" HEAD
  run gcloud compute tpus tpu-vm scp "$archive" "$NAME:jaxlab.tar.gz" "${place[@]}" --worker=all
  rm -f "$archive"
  on_every_host 'mkdir -p jaxlab && tar -xzf jaxlab.tar.gz -C jaxlab'
}

train() {
  [[ $# -ge 1 ]] || fail "train needs a CONFIG, such as configs/llama3_8b_pretrain.yaml" 2
  [[ -f $root/$1 ]] || fail "there is no $1 in $root: give a path inside the checkout" 2
  local run_name quick_failures=0 started arguments
  run_name=$(basename "$1" .yaml)
  # Before the user's own settings, which may say otherwise.
  printf -v arguments '%q ' "$1" "output_dir=gs://$BUCKET/runs/$run_name" "${@:2}"
  while true; do
    ensure_active
    started=$SECONDS
    if copy_code && on_every_host "bash jaxlab/tpu/on_host.sh $arguments"; then
      say "training has ended: gs://$BUCKET/runs/$run_name"
      say "give the slice back with: bash tpu/queued_resource.sh delete"
      return
    fi
    if ((SECONDS - started < QUICK)) && [[ $(state) == ACTIVE ]]; then
      ((++quick_failures < MAX_QUICK_FAILURES)) ||
        fail "training failed $quick_failures times within $QUICK s on a healthy slice; see above"
    else
      quick_failures=0
    fi
    say "$(date +%T) training was interrupted; resuming from the last checkpoint"
    sleep "$POLL"
  done
}

case ${1:-} in
  train) train "${@:2}" ;;
  status) run gcloud compute tpus queued-resources describe "$NAME" "${place[@]}" ;;
  ssh) [[ -n ${2:-} ]] || fail "ssh needs a command" 2; on_every_host "$2" ;;
  delete) delete ;;
  *) sed -n '2,13s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac

#!/usr/bin/env bash
# Makes the bucket for checkpoints and data, and copies data into it.
#
#   bash tpu/bucket.sh [--dry-run] create            make gs://$BUCKET where the TPUs are
#   bash tpu/bucket.sh [--dry-run] upload PATH       copy a file or folder to gs://$BUCKET/data/
#   bash tpu/bucket.sh [--dry-run] list              what runs and data are there
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dry_run=false
if [[ ${1:-} == --dry-run ]]; then dry_run=true; shift; fi
# shellcheck source=tpu/settings.sh
source "$here/settings.sh"
need gcloud "https://cloud.google.com/sdk/docs/install"

case ${1:-} in
  create)
    # In the TPUs' own region: reading across regions is slow and is charged for.
    run gcloud storage buckets create "gs://$BUCKET" --project "$PROJECT" \
      --location "${ZONE%-*}" --uniform-bucket-level-access
    ;;
  upload)
    [[ -n ${2:-} ]] || fail "upload needs a PATH" 2
    [[ $dry_run == true || -e $2 ]] || fail "$2 does not exist"
    run gcloud storage cp --recursive "$2" "gs://$BUCKET/data/"
    ;;
  list) run gcloud storage ls "gs://$BUCKET/runs/" "gs://$BUCKET/data/" ;;
  *) sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac

#!/bin/sh
# The checks of this folder on the card of this machine, without pytest or an installation:
#   tests/gpu/on_card.sh                 all of them
#   tests/gpu/on_card.sh towers_on_card  those of one file
#   PYTHONPATH=wheels tests/gpu/on_card.sh   (wheels: paceline's dependencies, where python3 lacks them)
set -eu
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
failed=0
for name in ${*:-towers_on_card ops_on_card one_card seam_on_card}; do
    "${PYTHON:-python3}" "tests/gpu/$name.py" || failed=1
done
exit $failed

#!/bin/sh
# The checks of one_card.py on the card of this machine, from the repository's root, without pytest or an installation:
#   PYTHONPATH=wheels tests/gpu/one_card.sh   (wheels: paceline's dependencies, where python3 lacks them)
set -eu
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
"$python" -c 'import sys, torch; print(sys.version.split()[0], torch.__version__, torch.cuda.get_device_name(0))'
exec "$python" tests/gpu/one_card.py

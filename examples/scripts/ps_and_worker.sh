#!/bin/sh
# Document 003, on the first host: the ps and worker 0, both writing into one file.
#
#   sh scripts/ps_and_worker.sh distributed.py        and on the second host:  sh scripts/worker.sh distributed.py
#
# The script finds the addresses in the settings.py beside it. Look at the two dates in log/1/output-0.

dir=./log/1

mkdir -p $dir
date > $dir/output-0
python $1 --job_name="ps" --task_index=0 >> $dir/output-0 &
python $1 --job_name="worker" --task_index=0 >> $dir/output-0
date >> $dir/output-0
wait

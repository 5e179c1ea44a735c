#!/bin/sh
# Document 003, on the second host: worker 1. See ps_and_worker.sh.

dir=./log/1

mkdir -p $dir
date > $dir/output-1
python $1 --job_name="worker" --task_index=1 >> $dir/output-1
date >> $dir/output-1

"""Document 000's tfdist_between_sync.py: the same training, but each update is the mean of all workers' gradients.

python tfdist_between_sync.py --job_name=ps --task_index=0
python tfdist_between_sync.py --job_name=worker --task_index=0
python tfdist_between_sync.py --job_name=worker --task_index=1
"""

from tfdist_between import main

if __name__ == "__main__":
    main("sync")

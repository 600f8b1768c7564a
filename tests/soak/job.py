"""What the job is, and by which numbers its workers are asked for a fault."""

SAMPLES, BATCH, LOGICAL = 6400, 8, 8
SAVE_EVERY, DIGEST_EVERY, KEEP_LAST = 20, 500, 3
EXCEPTION, EXIT, SEGFAULT, SLOW = range(1, 5)

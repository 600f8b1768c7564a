# Run:ai creates an elastic PyTorchJob from this command. Its pods have 30 seconds to end, the default
# of Kubernetes. That is too short only if SIGKILL does not end a process immediately.
runai training pytorch submit train --project team --image registry.example/team/train:1 \
  --no-master --workers 2 --min-replicas 1 --max-replicas 4 \
  --cpu-core-request 1 --cpu-memory-request 2G --large-shm \
  --existing-pvc claimname=checkpoints,path=/mnt/checkpoints \
  --environment PET_RDZV_ID=train --environment PET_MAX_RESTARTS=3 \
  --command -- elasticrun --nproc-per-node=1 \
  --checkpoint-grace=15 --shutdown-timeout=5 \
  --rdzv-conf=close_timeout=8,last_call_timeout=30 --log-dir=/mnt/checkpoints/logs \
  -m elasticlib.examples.train_text --checkpoint-dir=/mnt/checkpoints

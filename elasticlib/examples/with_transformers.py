"""A transformers Trainer that survives crashes, resizes and drains. It trains a tiny GPT-2.

Usage: `elasticrun --nproc-per-node 2 --max-restarts 3 --preload transformers.trainer
with_transformers.py [DIRECTORY]`, with a directory for checkpoints (default: checkpoints). The
batch size per device is the global batch size divided by the world size. So the Trainer, which
skips the steps that it has completed, resumes at the right sample at any world size that divides
the global batch size.
"""

from __future__ import annotations

import os
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from elasticlib.integrations.transformers import ElasticCallback, last_complete_checkpoint

CHECKPOINTS = sys.argv[1] if sys.argv[1:] else "checkpoints"
SAMPLES, GLOBAL_BATCH, EPOCHS, SAVE_EVERY = 80, 8, 3, 5

torch.manual_seed(0)
data = [{"input_ids": text, "labels": text} for text in torch.randint(64, (SAMPLES, 16))]
net = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2))
elastic = ElasticCallback()
settings = TrainingArguments(
    CHECKPOINTS,
    per_device_train_batch_size=GLOBAL_BATCH // int(os.environ["WORLD_SIZE"]),
    num_train_epochs=EPOCHS,
    save_steps=SAVE_EVERY,
    save_total_limit=3,
    disable_tqdm=True,
    report_to="none",
    use_cpu=not torch.cuda.is_available(),
)
trainer = Trainer(net, settings, train_dataset=data, callbacks=[elastic])
trainer.train(resume_from_checkpoint=last_complete_checkpoint(CHECKPOINTS))
if trainer.is_world_process_zero():
    result = f"stopped: {elastic.stop_request.reason}" if elastic.stop_request else "done"
    print(result, f"after {trainer.state.global_step} steps", flush=True)

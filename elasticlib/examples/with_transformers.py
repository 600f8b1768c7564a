"""A transformers Trainer that survives crashes, resizes and drains, on a tiny GPT-2 of no download.

`elasticrun --nproc-per-node 2 --max-restarts 3 --preload transformers.trainer
with_transformers.py`. The batch a device is what keeps the global batch: with it the Trainer's own
way of passing over the samples that it has trained on is right at any world size that divides it.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from elasticlib.examples.byte_transformer import sha256_of
from elasticlib.examples.trace import Trace
from elasticlib.integrations.transformers import ElasticCallback, newest_checkpoint


class TracingTrainer(Trainer):
    """A Trainer that writes down which samples it uses, for who wants to count them."""

    def __init__(self, *args: Any, trace: Trace, **rest: Any) -> None:
        super().__init__(*args, **rest)
        self.trace, self.told = trace, False

    def compute_loss(self, model: Any, inputs: dict[str, Any], **rest: Any) -> Any:
        step, world = self.state.global_step, self.args.world_size
        if not self.told:
            self.trace.resumed(step)
            self.told = True
        self.trace.step(step + 1, int(self.state.epoch), inputs.pop("number").tolist(), world)
        return super().compute_loss(model, inputs, **rest)


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    texts = torch.randint(64, (args.samples, 16))
    data = [{"input_ids": t, "labels": t, "number": n} for n, t in enumerate(texts)]
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    )
    elastic = ElasticCallback()
    settings = TrainingArguments(
        args.checkpoints,
        per_device_train_batch_size=args.global_batch // int(os.environ["WORLD_SIZE"]),
        num_train_epochs=args.epochs,
        save_steps=args.save_every,
        save_total_limit=3,
        remove_unused_columns=False,  # of the trace
        disable_tqdm=True,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = TracingTrainer(
        model,
        settings,
        train_dataset=data,
        callbacks=[elastic],
        trace=Trace.of_this_worker(args.trace),
    )
    trainer.train(resume_from_checkpoint=newest_checkpoint(args.checkpoints))
    if trainer.is_world_process_zero():
        what = f"stopped: {elastic.stopped.reason}" if elastic.stopped else "done"
        weights = f"weights sha256 {sha256_of(model.cpu())}"
        print(f"{what}, steps {trainer.state.global_step} {weights}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", default="checkpoints", help="a folder")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--global-batch", type=int, default=8, help="samples a step, of all ranks")
    parser.add_argument("--samples", type=int, default=80)
    parser.add_argument("--save-every", type=int, default=5, metavar="STEPS")
    parser.add_argument("--trace", metavar="PREFIX", help="write which samples each step used")
    main(parser.parse_args())

"""Shared by the peers: flags, model, optimizers, sequences, timing, and the JSON line of metrics."""

import argparse
import json
import os
import pathlib
import sys

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

import utils
from harness import base, data


def make_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", default="smollm3-3b", help="a preset, demo, or a folder with weights")
    parser.add_argument("--tokens", help="raw uint16 token ids, in train_fsdp.py's order [random tokens]")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16", help="of compute; weights are fp32")
    parser.add_argument("--sequence-length", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=1, help="sequences per rank")
    parser.add_argument("--num-steps", type=int, default=30)
    parser.add_argument("--perf-warmup-steps", type=int, default=10)
    parser.add_argument(
        "--optimizer", choices=["adamw", "muon"], default="adamw", help="muon: of matrices in the layers"
    )
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    return parser


def parse_args(description: str) -> argparse.Namespace:
    return make_parser(description).parse_args()


def device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cuda", torch.cuda.current_device())


def world_of_one() -> None:
    """Set torchrun's variables if it did not, so that libraries shard one process like several."""
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("MASTER_PORT", "0")


def build_model(args: argparse.Namespace, where: torch.device | None = None) -> torch.nn.Module:
    """Return a model with fp32 weights, random or from a folder, on this rank's device or on `where`."""
    kinds = {"attn_implementation": "sdpa", "dtype": torch.float32}
    if pathlib.Path(args.model).is_dir():
        model = AutoModelForCausalLM.from_pretrained(args.model, trust_remote_code=False, **kinds)
        model.config.use_cache = False
        return model.train().to(where or device())
    name = "demo/config" if args.model == "demo" else f"presets/{args.model}"
    config = AutoConfig.from_pretrained(ROOT / "assets" / f"{name}.json", use_cache=False)
    torch.manual_seed(42)
    with where or device():
        return AutoModelForCausalLM.from_config(config, **kinds)


def build_optimizers(args: argparse.Namespace, model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Return train_fsdp.py's optimizers: fused AdamW with weight decay on matrices. With Muon, torch's Muon has the
    matrices of decoder layers, with train_fsdp.py's default scale rule, and AdamW the rest."""
    vectors = [p for p in model.parameters() if p.dim() == 1]
    matrices = [p for p in model.parameters() if p.dim() > 1]
    optimizers = []
    if args.optimizer == "muon":
        matrices = [p for name, p in model.named_parameters() if p.dim() > 1 and ".layers." not in name]
        in_layers = [p for name, p in model.named_parameters() if p.dim() > 1 and ".layers." in name]
        optimizers.append(torch.optim.Muon(in_layers, lr=3e-4, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizers.append(torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True))
    return optimizers


def build_windows(args: argparse.Namespace, vocab_size: int) -> torch.utils.data.Dataset:
    return RandomTokens(args, vocab_size) if args.tokens is None else Corpus(args)


class RandomTokens(torch.utils.data.Dataset):
    """The sequences of `--dataset synthetic` for transformers' models: labels are the inputs."""

    def __init__(self, args: argparse.Namespace, vocab_size: int):
        world = int(os.environ.get("WORLD_SIZE", 1))
        windows = args.num_steps * args.batch_size * world
        self.windows = data.SyntheticDataset(vocab_size, args.sequence_length, seed=42, num_sequences=windows)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.from_numpy(self.windows[index][:-1].astype("int64"))
        return {"input_ids": tokens, "labels": tokens.clone()}


class Corpus(torch.utils.data.Dataset):
    """Sequences of a token file in train_fsdp.py's order (seed 42). transformers' loss does not shift `shift_labels`,
    so every program has the loss of the same tokens."""

    def __init__(self, args: argparse.Namespace):
        self.tokens = np.memmap(args.tokens, dtype=np.uint16, mode="r")
        self.length = args.sequence_length
        windows = (len(self.tokens) - 1) // self.length
        self.order = data.SequenceOrder(windows, seed=42)
        self.count = args.num_steps * args.batch_size * int(os.environ.get("WORLD_SIZE", 1))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = self.order.sequence_at(index) * self.length
        window = torch.from_numpy(self.tokens[start : start + self.length + 1].astype("int64"))
        return {"input_ids": window[:-1], "labels": window[1:], "shift_labels": window[1:]}


class Clock:
    """Times the steps with train_fsdp.py's tracker and prints its metrics under the same names."""

    def __init__(self, args: argparse.Namespace, model: torch.nn.Module):
        self.args, self.world = args, int(os.environ.get("WORLD_SIZE", 1))
        self.tokens = self.world * args.batch_size * args.sequence_length
        self.flops = utils.get_model_flops_per_token(model, args.sequence_length)
        self.tracker = utils.PerformanceTracker(args.perf_warmup_steps, self.world)
        self.steps = 0

    def step(self, loss: torch.Tensor, **fields: str | bool) -> None:
        """Count an optimizer step with this rank's loss; after the last step, print the JSON line with the mean loss of
        all ranks."""
        self.steps += 1
        last = self.steps == self.args.num_steps
        main = int(os.environ.get("RANK", 0)) == 0
        self.tracker.step(self.tokens, self.flops, synchronize=last)
        if self.steps == 1 and main:
            print(f"step 1/{self.args.num_steps}  loss {loss.item():.4f}", flush=True)
        if last:
            figures = self.tracker.summary() | base.memory_metrics() | fields
            if self.world > 1:
                loss = loss.clone()
                dist.all_reduce(loss)
                loss /= self.world
            figures["loss"] = loss.item()
            if main:
                print(json.dumps(figures), flush=True)


def leave() -> None:
    """Destroy the process groups after a barrier: a gloo rank that exits early can abort the others."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()

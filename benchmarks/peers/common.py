"""What the peers share: flags, the model from this project's preset, random tokens, the clock, the line of figures."""

import argparse
import json
import os
import pathlib
import sys

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

import utils
from harness import report, samples


def parse_args(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", default="smollm3-3b", help="one of this project's presets, or demo")
    parser.add_argument("--sequence-length", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=1, help="sequences per rank")
    parser.add_argument("--num-steps", type=int, default=30)
    parser.add_argument("--perf-warmup-steps", type=int, default=10)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


def device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cuda", torch.cuda.current_device())


def world_of_one() -> None:
    """Without torchrun: the variables that it would set, so that a library shards one process as it does many."""
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("MASTER_PORT", "0")


def build_model(args: argparse.Namespace, where: torch.device | None = None) -> torch.nn.Module:
    """Random fp32 weights, on this rank's device or on `where`."""
    name = "demo/config" if args.model == "demo" else f"presets/{args.model}"
    config = AutoConfig.from_pretrained(ROOT / "assets" / f"{name}.json", use_cache=False)
    torch.manual_seed(42)
    with where or device():
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)


class RandomTokens(torch.utils.data.Dataset):
    """The windows of `--dataset synthetic`, as transformers' models want them: labels are the inputs."""

    def __init__(self, args: argparse.Namespace, vocab_size: int):
        world = int(os.environ.get("WORLD_SIZE", 1))
        windows = args.num_steps * args.batch_size * world
        self.windows = samples.SyntheticDataset(vocab_size, args.sequence_length, seed=42, windows=windows)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.from_numpy(self.windows[index][:-1].astype("int64"))
        return {"input_ids": tokens, "labels": tokens.clone()}


class Clock:
    """Times the steps as train_fsdp.py does, with its tracker, and prints its figures under the same names."""

    def __init__(self, args: argparse.Namespace, model: torch.nn.Module):
        self.args, self.world = args, int(os.environ.get("WORLD_SIZE", 1))
        self.tokens = self.world * args.batch_size * args.sequence_length
        self.flops = utils.get_model_flops_per_token(model, args.sequence_length)
        self.tracker = utils.PerformanceTracker(args.perf_warmup_steps, self.world)
        self.steps = 0

    def step(self, loss: torch.Tensor, **told: str) -> None:
        """After each optimizer step, with this rank's loss; after the last one it prints the JSON line."""
        self.steps += 1
        last = self.steps == self.args.num_steps
        self.tracker.step(self.tokens, self.flops, synchronize=last)
        main = int(os.environ.get("RANK", 0)) == 0
        if self.steps == 1 and main:
            print(f"step 1/{self.args.num_steps}  loss {loss.item():.4f}", flush=True)
        if last:
            figures = self.tracker.summary() | {"loss": loss.item()} | report.memory_figures(device()) | told
            if main:
                print(json.dumps(figures), flush=True)


def leave() -> None:
    """A gloo rank that leaves before the others are done can abort them, hence the barrier."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()

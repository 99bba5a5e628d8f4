"""Muon in many worlds beside plain references in one process, for tests/model/test_muon.py.

A reference holds every matrix whole, as a tensor of its own, and gives it to torch.optim.Muon. With fp32
iterations both sides leave out the cast to bf16.
"""

import contextlib
import functools
import json
import pathlib
from unittest import mock

import torch
import torch.distributed as dist
from multirank import resolved
from torch.optim import _muon as torchs
from transformers import AutoConfig

import train_fsdp
import utils
from harness import model as models
from harness.flags.parser import parse_args
from harness.job.signals import StopRequest
from harness.job.world import start_processes, stop_processes
from harness.model import newton_schulz

STEPS, SEQUENCES, TOKENS, LR, ADAMW_LR = 20, 24, 32, 2e-3, 1e-3
SIZES = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 12}
GPT2 = {"vocab_size": 128, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64}
INTERLEAVED = SIZES | {"head_dim": 12, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 16}
MODELS = {
    "llama": ("llama", SIZES),
    # of its key projections with 10 rows five of eight ranks have two rows each, and the last three none
    "uneven": (
        "llama",
        SIZES
        | {"hidden_size": 33, "intermediate_size": 37}
        | {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10},
    ),
    "fused": ("phi3", SIZES),
    "experts": ("qwen3_moe", SIZES | EXPERTS),
    "interleaved": ("gpt_oss", INTERLEAVED),
    "transposed": ("gpt2", GPT2 | {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}),
}
# Where a parameter is several matrices: sizes along the dimension of the outputs, or a stride.
PARTS = {"fused": {"qkv_proj": [48, 24, 24], "gate_up_proj": [56, 56]}, "experts": {"gate_up_proj": [32, 32]}}
PARTS |= {"interleaved": {"gate_up_proj": 2}, "transposed": {"c_attn": [48, 48, 48]}}
OUTPUTS_LAST = ("interleaved", "transposed")  # experts and linears that are stored input by output


def case(
    model: str, layout: str, flags: str = "--optimizer muon", iteration: str = "fp32", frozen: str = ""
) -> dict[str, str]:
    """One run: a model of MODELS, the flags of its sharding and of its optimizer, the dtype of the iterations, and what
    the names of its frozen parameters contain."""
    return {"model": model, "layout": layout, "flags": flags, "iteration": iteration, "frozen": frozen}


# ---- References ------------------------------------------------------------------------------------------------------


def zeropower(matrix: torch.Tensor, coefficients, steps: int, eps: float) -> torch.Tensor:
    """torch's function without its cast to bf16."""
    x = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    x = x / x.norm().clamp(min=eps)
    a, b, c = coefficients
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.size(0) > matrix.size(1) else x


class Reference:
    """What `train_step` needs of an optimizer, over the whole parameters of one process."""

    def __init__(self, settings, model, name: str):
        self.param_groups = [{"params": [p for p in model.parameters() if p.requires_grad]}]
        self.views = []  # (parameter, how to view it, the view as a parameter of its own)
        matrices, decayed, rest = [], [], []
        for full_name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            for view in views_of(name, full_name, parameter):
                plain = torch.nn.Parameter(view(parameter.to_local().detach()))
                self.views.append((parameter, view, plain))
                is_matrix = ".layers." in full_name or ".h." in full_name
                of_matrices = is_matrix and plain.dim() == 2 and "bias" not in full_name and "norm" not in full_name
                is_decayed = plain.dim() >= 2 and "bias" not in full_name
                (matrices if of_matrices else decayed if is_decayed else rest).append(plain)
        options = {"lr": settings.lr, "weight_decay": settings.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
        self.parts = [torch.optim.Muon(matrices, **options)] if matrices else []
        self.parts += [
            torch.optim.AdamW(group, lr=settings.adamw_lr or settings.lr, betas=settings.betas, weight_decay=decay)
            for group, decay in ((decayed, settings.weight_decay), (rest, 0.0))
            if group
        ]

    def step(self) -> None:
        for parameter, view, plain in self.views:
            plain.grad = None if parameter.grad is None else view(parameter.grad.to_local())
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def views_of(name: str, full_name: str, parameter) -> list:
    """Functions that cut a parameter, or its gradient, into its matrices, each output by input; others stay whole."""
    in_layers = ".layers." in full_name or ".h." in full_name
    if not in_layers or parameter.dim() < 2 or "bias" in full_name:
        return [lambda tensor: tensor]
    projection = [word for word in full_name.split(".") if word != "weight"][-1]
    is_transposed = name in OUTPUTS_LAST and (parameter.dim() == 3 or name == "transposed")
    parts = PARTS.get(name, {}).get(projection, [parameter.shape[-1 if is_transposed else -2]])
    views = []
    for expert in range(parameter.shape[0]) if parameter.dim() == 3 else [None]:
        starts = range(parts) if isinstance(parts, int) else [sum(parts[:index]) for index in range(len(parts))]
        for index, start in enumerate(starts):
            outputs = slice(start, None, parts) if isinstance(parts, int) else slice(start, start + parts[index])
            views.append(functools.partial(cut, expert=expert, outputs=outputs, is_transposed=is_transposed))
    return views


def cut(tensor: torch.Tensor, expert: int | None, outputs: slice, is_transposed: bool) -> torch.Tensor:
    matrix = tensor if expert is None else tensor[expert]
    return (matrix.T if is_transposed else matrix)[outputs]


@contextlib.contextmanager
def iterating_in(dtype: str):
    """Inside, Muon and its reference iterate in that dtype."""
    with contextlib.ExitStack() as patches:
        if dtype == "fp32":
            patches.enter_context(mock.patch.object(newton_schulz, "DTYPE", torch.float32))
            patches.enter_context(mock.patch.object(torchs, "_zeropower_via_newtonschulz", zeropower))
        yield


# ---- Runs ------------------------------------------------------------------------------------------------------------


def write_models(folder: pathlib.Path) -> None:
    for name, (model_type, sizes) in MODELS.items():
        AutoConfig.for_model(model_type, **sizes).save_pretrained(folder / name)


def batches(microbatches: int, device):
    """This rank's sequences of each microbatch: four global batches, again and again."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 128, (4, SEQUENCES, TOKENS + 1), generator=generator)
    share, left_over = divmod(SEQUENCES, microbatches * dist.get_world_size())
    assert not left_over
    step = 0
    while True:
        for microbatch in tokens[step % 4].chunk(microbatches):
            own = microbatch[dist.get_rank() * share :][:share].to(device)
            yield {"input_ids": own[:, :-1].contiguous(), "labels": own[:, 1:].contiguous()}
        step += 1


def build(folder: pathlib.Path, run: dict, device, is_reference: bool = False):
    flags = f"--model {folder / run['model']} --precision fp32 --lr {LR} --adamw-lr {ADAMW_LR} --no-compile"
    settings, config = resolved(
        [*flags.split(), "--sequence-length", TOKENS, *run["layout"].split(), *run["flags"].split()]
    )
    model = train_fsdp.build_model(settings, config, train_fsdp.build_mesh(settings, device))
    for name, parameter in model.named_parameters():
        if run["frozen"] and run["frozen"] in name:
            parameter.requires_grad_(False)
    if is_reference:
        return settings, model, Reference(settings, model, run["model"])
    return settings, model, models.build_optimizer(settings, model)


def losses(folder: pathlib.Path, run: dict, device, is_reference: bool = False, steps: int = STEPS) -> list[float]:
    """Of each step, over all tokens of the global batch."""
    with iterating_in(run["iteration"]):
        settings, model, optimizer = build(folder, run, device, is_reference)
        data = batches(settings.gradient_accumulation_steps, device)
        tracker, values = utils.PerformanceTracker(0, dist.get_world_size()), []
        for _ in range(steps):
            loss = train_fsdp.train_step(settings, model, optimizer, data, tracker).loss
            dist.all_reduce(loss)
            values.append(loss.item() / dist.get_world_size())
    return values


def main(folder: pathlib.Path, runs: dict[str, dict], out: pathlib.Path, steps: int = STEPS) -> None:
    """One rank: all runs, one after the other; rank 0 writes their losses."""
    device = start_processes()
    result = {name: losses(folder, run, device, False, steps) for name, run in runs.items()}
    if dist.get_rank() == 0:
        out.write_text(json.dumps(result))
    stop_processes()


def train(flags: list[str]) -> None:
    """One rank of a whole run, with its checkpoints; with fp32 iterations, whose losses do not depend on the ranks."""
    device = start_processes()
    with iterating_in("fp32"):
        code = train_fsdp.train_or_evaluate(parse_args(flags), device, StopRequest())
    assert code == 0
    stop_processes()

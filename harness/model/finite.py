"""Finite: passes that change nothing and show if weights give a finite loss, for before a save and after a load."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from harness import job
from harness.model.configs import text_config
from harness.model.optimization import clip_grad_norm, mesh_of
from harness.model.sampling import evaluating

TOKENS = 16  # tokens of a pass without data


def loss_without_data(model: nn.Module) -> float:
    """The loss (nats per token, mean over ranks) on TOKENS tokens from all over the vocabulary. Every rank calls it."""
    job.enter_phase("check")
    device = mesh_of(model).device_type
    vocabulary = text_config(model).vocab_size
    tokens = (torch.arange(TOKENS, device=device) * vocabulary // TOKENS)[None]
    with evaluating(model), torch.compiler.set_stance("force_eager"):  # nothing is compiled for a shape that comes once
        logits = model(input_ids=tokens, use_cache=False).logits  # without labels: each rank has all of the tokens
    return mean_over_ranks(F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()))


def loss_and_norm(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict) -> tuple[float, float]:
    """(loss, gradient norm) of a microbatch of each rank, over all ranks. Every rank calls it after a step.

    A forward pass is not enough: if a hidden state overflows, RMSNorm divides it by infinity, the logits are all zero
    and the loss is finite, that of a guess; only the gradients are NaN. This is the pass that training runs: it takes
    no more memory, and nothing is compiled for it.
    """
    job.enter_phase("check")
    cuda = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=cuda):  # dropout draws from it
        loss = model(**batch, use_cache=False).loss
        loss.backward()
    norm = clip_grad_norm(optimizer, 0).item()
    optimizer.zero_grad()
    return mean_over_ranks(loss), norm


def mean_over_ranks(loss: torch.Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()

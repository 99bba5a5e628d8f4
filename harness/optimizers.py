"""Optimizers: what updates the weights, with which groups and states. Called by the script once a model is sharded, by
plans too. It does not know the loop, the schedule or how states are saved."""

from importlib.util import find_spec

import torch
from torch import nn

from harness.settings import Settings
from utils import UserError


def build_optimizer(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over the sharded parameters, weight decay on matrices only, its states made already."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices, others = [p for p in parameters if p.dim() >= 2], [p for p in parameters if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    options = {"lr": settings.lr, "betas": settings.betas}
    if settings.optimizer == "adamw":
        optimizer = torch.optim.AdamW(groups, **options, fused=True)
    else:
        if not find_spec("torchao"):
            raise UserError("--optimizer adamw8bit: needs the package torchao (pip install torchao)")
        from torchao.optim import AdamW8bit

        optimizer = AdamW8bit(groups, **options)

    def set_rate(rate: float) -> None:
        for group in optimizer.param_groups:  # torchao keeps it as a tensor
            group["lr"] = group["lr"].fill_(rate) if torch.is_tensor(group["lr"]) else rate

    # One step with zero gradients and zero learning rate makes the states, so that they can be checked, counted in
    # memory and loaded into before training; it changes no parameter.
    set_rate(0.0)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for state in optimizer.state.values():
        state["step"].zero_()
    set_rate(settings.lr)
    return optimizer

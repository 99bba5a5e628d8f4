"""Routing: the router loss of a mixture of experts, which evens out the numbers of tokens that experts get, and these
numbers, on this rank."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from harness.model import patches
from harness.model.context import ContextGroup


class Routing:
    """The routers of a model, one per layer, and their loss.

    After each forward pass of training, `read` returns the router loss of transformers' `load_balancing_loss_func`
    (Switch Transformer, arXiv 2101.03961, equations 4 to 6): experts x sum over experts of (assignments per token) x
    (mean probability), over all layers' tokens together, padding included. It is `top_k` if all experts get equal load.
    """

    def __init__(self, routers: list[tuple[Any, int]], top_k: int, coefficient: float, group: ContextGroup):
        """`routers` are (module, index of the logits in its output); `coefficient` multiplies the router loss that is
        added to the loss, 0 if none is; `group` shares each sequence."""
        self.routers, self.top_k, self.coefficient = [router for router, _ in routers], top_k, coefficient
        self.keeps, self.group = False, group
        for router, index in routers:
            router.kept = None
            router.register_forward_hook(self._keep(index))

    def _keep(self, index: int) -> Callable[[Any, tuple, Any], None]:
        def keep(router: Any, args: tuple, output: Any) -> None:
            if not self.keeps:  # the backward pass recomputes a layer
                return
            if torch.is_tensor(output):  # the logits of a linear: Jamba in transformers 5.17
                router.kept = output, output.topk(self.top_k).indices
            else:
                router.kept = output[index], output[2]  # logits, chosen experts

        return keep

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(the router loss of the last forward pass, a scalar; the number of this rank's tokens for each expert, fp32
        of shape (layers, experts)), on the device. Frees the logits.

        transformers' loss takes the experts of the highest probabilities. A router may choose others, for example by a
        correction bias.
        """
        loads, rows = [], 0
        likeliest: Any = 0.0
        probabilities: Any = 0.0
        for router in self.routers:
            (logits, chosen), router.kept = router.kept, None
            router_probs = logits.flatten(0, -2).softmax(-1, dtype=torch.float32)
            experts = router_probs.shape[1]
            loads.append(count_tokens(chosen, experts))
            likeliest = likeliest + count_tokens(router_probs.topk(self.top_k).indices, experts)
            probabilities = probabilities + router_probs.sum(0)
            rows += len(router_probs) * self.group.parts
        in_sequences, probabilities = self.group.sum(torch.stack([likeliest, probabilities]))
        loss = experts * (in_sequences / rows * (probabilities / rows)).sum()
        return loss, torch.stack(loads)


def count_tokens(chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """The number of times that each expert is in `chosen`, fp32 (experts,)."""
    ones = torch.ones_like(chosen.flatten(), dtype=torch.float32)
    return ones.new_zeros(experts).scatter_add_(0, chosen.flatten(), ones)


def watch_routers(model: Any, init: str, group: ContextGroup) -> None:
    """Set `model.routing`, None if the model has no router loss that is known here, and keep the model's forward from
    adding one. `group` shares each sequence. Comes before the layers are wrapped or compiled.

    The coefficient is the config's. Random weights always train with it, although most configs, made for inference,
    turn it off (`output_router_logits` is false). Pretrained weights follow their config.
    """
    model.routing = None
    if hasattr(model.config, "output_router_logits"):
        model.register_forward_pre_hook(leave_out_router_loss, with_kwargs=True)
    routers = find_routers(model)
    if not routers:
        return
    coefficient, top_k = (getattr(model, name, None) for name in ("router_aux_loss_coef", "num_experts_per_tok"))
    counts_keys = any(hasattr(router, "num_keys") for router, _ in routers)  # doge, whose router chooses product keys
    if coefficient is None or top_k is None or counts_keys:
        return
    if init != "random" and not getattr(model.config, "output_router_logits", False):
        coefficient = 0.0
    routing = model.routing = Routing(routers, top_k, coefficient, group)

    def begin(module: nn.Module, args: tuple, options: dict) -> None:
        routing.keeps = module.training and torch.is_grad_enabled()

    def end(module: nn.Module, args: tuple, output: object) -> None:
        routing.keeps = False

    model.register_forward_pre_hook(begin, with_kwargs=True)
    model.register_forward_hook(end)
    patches.compile_layers_that_set_attributes()


def find_routers(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """(module, index of the logits in its output) of each router of a mixture of experts, in the order of layers; none
    if a model has no routers, or several kinds."""
    routers = []
    for path, part in model.named_modules():
        recorded = recorded_router_logits(part)
        if not hasattr(recorded, "target_class"):
            continue
        for name, module in part.named_modules(prefix=path):
            layer_name = (recorded.layer_name or "").strip(".")
            found = recorded.target_class and isinstance(module, recorded.target_class)
            if found and (not layer_name or f".{layer_name}." in f".{name}."):
                routers.append((module, recorded.index))
    return list(dict.fromkeys(routers))


def recorded_router_logits(part: nn.Module) -> Any:
    """transformers' record of where a model's router logits are, a list if it has several kinds of routers; None
    without."""
    if not isinstance(part, transformers.PreTrainedModel):
        return None
    # private: the public way to routers' logits is by hooks that the compiler cannot trace
    return (part._can_record_outputs or {}).get("router_logits")


def leave_out_router_loss(model: nn.Module, args: tuple, options: dict) -> tuple[tuple, dict]:
    """A forward hook that keeps the router loss out of the model's loss."""
    if options.get("labels") is not None:
        options["output_router_logits"] = False
    return args, options


def describe_routing(model: Any) -> str:
    """The header's line about the routers of a model; empty without experts."""
    several_kinds = any(isinstance(recorded_router_logits(part), list) for part in model.modules())
    if not (several_kinds or find_routers(model)):
        return ""
    if model.routing is None:
        return f"{type(model).__name__.removeprefix('FSDP')} has no router loss here, so nothing balances its experts"
    coefficient = model.routing.coefficient
    if coefficient:
        return f"{coefficient:g} x the router loss is added to the loss that is trained (router_aux_loss_coef)"
    return "no router loss: router_aux_loss_coef is 0 or output_router_logits is false in config.json"

"""Context parallelism: --context-parallel N ranks share each sequence, by DeepSpeed's Ulysses (arXiv 2309.14509).

A rank computes its part of the tokens, with the parameters that FSDP gathers. Only attention needs the tokens of other
ranks: an all-to-all exchanges queries, keys and values so that each rank has all tokens of its share of the heads, and
another one exchanges the results back. Kernel, masks, windows and sinks stay those of transformers. Shapes:
    part of the tokens, all heads    (batch, seq_len / N, heads, dim)
    all tokens, share of the heads   (batch, seq_len, heads / N, dim)

Gradients are means over all ranks, so a rank differentiates N times its part of its group's loss.

The alternative is ring attention, as in torch's `context_parallel`: N may exceed the number of heads, but it is a
kernel of its own that knows causal masks only.
"""

import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as collectives  # private: others cannot be compiled
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from harness import base, flags, job
from harness.base import IGNORE_INDEX
from harness.model import patches
from harness.model.configs import attends_by_positions
from harness.model.weights import decoder_layers

KERNELS = dict(ALL_ATTENTION_FUNCTIONS)  # at import: what is registered below calls them
LAYER_TYPES = {"full_attention", "sliding_attention"}  # their tokens meet in attention only
LENGTH_DEPENDENT_ROPE = {"longrope", "dynamic"}  # their frequencies depend on the longest position that a rank sees


class ContextGroup:
    """The ranks that share each sequence with this rank; by default it is alone."""

    def __init__(self, size: int = 1):
        self.size, self.rank, self.group = size, 0, None
        if size > 1:
            self.rank = dist.get_rank() % size
            self.group, _ = dist.new_subgroups(size)
            job.lift_group_timeouts(self.group)
        self.parts = 1  # `size` if the last forward pass had a part of each sequence: if it had labels
        self.labels = torch.empty(0)  # of all parts of the last forward pass

    def __deepcopy__(self, memo: dict) -> "ContextGroup":
        return self  # in the copy of a model that peft makes

    def take_part(self, options: dict[str, Any]) -> dict[str, Any]:
        """The keyword arguments of a forward pass; if it has labels, with this rank's part of each sequence."""
        self.parts = 1 if options.get("labels") is None else self.size
        if self.parts == 1:
            return options
        tokens, self.labels = options["input_ids"], options["labels"]
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        inputs = {"input_ids": tokens, "labels": self.labels, "position_ids": options.get("position_ids", positions)}
        return options | {name: tensor.chunk(self.size, 1)[self.rank] for name, tensor in inputs.items()}

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of a group, each of which differentiates its own part `size` times."""
        if self.parts == 1:
            return tensor
        total = tensor.detach().clone()
        dist.all_reduce(total, group=self.group)
        part = tensor * self.size
        return total + (part - part.detach())

    def to_heads(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Exchange parts of the tokens for shares of the heads, all tensors in one collective."""
        shares = [tensor.unflatten(2, (self.size, -1)).permute(2, 0, 1, 3, 4) for tensor in tensors]
        received = self.exchange(torch.cat([share.flatten(3) for share in shares], -1)).transpose(0, 1).flatten(1, 2)
        sizes = [share.shape[3] * share.shape[4] for share in shares]
        return [one.unflatten(2, share.shape[3:]) for one, share in zip(received.split(sizes, -1), shares, strict=True)]

    def to_tokens(self, tensor: torch.Tensor) -> torch.Tensor:
        """Exchange a share of the heads for a part of the tokens."""
        received = self.exchange(tensor.unflatten(1, (self.size, -1)).transpose(0, 1))
        return received.permute(1, 2, 0, 3, 4).flatten(2, 3)

    def exchange(self, tensor: torch.Tensor) -> torch.Tensor:
        """Send row i to rank i of the group. Differentiable; the host does not wait."""
        return collectives.all_to_all_single_autograd(tensor.contiguous(), None, None, self.group)


class HeadShare:
    """An attention module as its kernel sees it, with a share of the heads."""

    def __init__(self, module: nn.Module, heads: slice, groups: int):
        self.module, self.heads, self.num_key_value_groups = module, heads, groups

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.module, name)
        return value[self.heads] if name == "sinks" and value is not None else value


def exchanging(name: str) -> Callable:
    """transformers' attention function of this name, for modules that may be of a model whose ranks share sequences."""

    def attention(module: Any, query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
        # eager attention is in the file of each family
        kernel = KERNELS.get(name) or sys.modules[type(module).__module__].eager_attention_forward
        group = getattr(module, "context_group", None)
        if group is None or group.parts == 1:
            return kernel(module, query, key, value, *args, **options)
        module.has_exchanged = True
        repeats = group.size // math.gcd(group.size, key.shape[1])  # the queries of several ranks need a key
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        tensors = group.to_heads(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        query, key, value = (tensor.transpose(1, 2) for tensor in tensors)
        heads = slice(group.rank * query.shape[1], (group.rank + 1) * query.shape[1])
        if options.get("s_aux") is not None:  # sinks
            options["s_aux"] = options["s_aux"][heads]
        options.pop("position_ids", None)  # of this part
        share = HeadShare(module, heads, query.shape[1] // key.shape[1])
        return group.to_tokens(kernel(share, query, key, value, *args, **options)[0]), None

    return attention


def share_sequences(model: Any, settings: flags.Settings) -> ContextGroup:
    """Make attention see the tokens of all ranks that share a sequence, and weight the loss of a part of its labels.
    Comes before the layers are compiled. The caller makes a forward pass `take_part`.

    Raises:
        UserError: in the first forward pass with labels, if a layer's attention is not one of transformers' functions.
    """
    group = ContextGroup(settings.context_parallel)
    if group.size == 1:
        return group
    layers, loss = decoder_layers(model), model.loss_function
    for module in model.modules():
        module.context_group = group
    name = model.config._attn_implementation  # private: in public it is only an argument of `from_config`
    AttentionInterface.register(name, exchanging(name))
    patches.compile_layers_that_set_attributes()

    def part_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        mean_loss = loss(logits, labels)
        if group.parts == 1:
            return mean_loss
        counts = [(counted != IGNORE_INDEX).sum().clamp(min=1) for counted in (labels, group.labels)]
        weight = group.size * counts[0] / counts[1]
        model.loss_terms = {term: mean * weight for term, mean in model.loss_terms.items()}
        return mean_loss * weight

    def check_exchanges(*_: object) -> None:
        if group.parts == 1:
            return
        handle.remove()
        if not all(any(hasattr(part, "has_exchanged") for part in layer.modules()) for layer in layers):
            problem = f"{settings.model} computes attention without transformers' functions"
            raise base.UserError(refusal(settings, problem))

    model.loss_function = part_loss
    handle = model.register_forward_hook(check_exchanges)
    return group


def most_ranks_per_sequence(settings: flags.Settings, config: PretrainedConfig, ranks: int) -> int:
    """The largest power of two as --context-parallel that divides `ranks` and the model's heads; 1 if its sequences
    cannot be shared."""
    heads, size = getattr(config.get_text_config(), "num_attention_heads", 1), 1
    while ranks % (2 * size) == 0 and heads % (2 * size) == 0:
        size *= 2
    try:
        check_context_parallel(dataclasses.replace(settings, context_parallel=size, sequence_length=size), config)
    except base.UserError:
        return 1
    return size


def refusal(settings: flags.Settings, problem: str) -> str:
    return f"--context-parallel {settings.context_parallel}: {problem}; leave it out"


def check_context_parallel(settings: flags.Settings, config: PretrainedConfig) -> None:
    """Check that ranks can share the sequences of a model.

    Raises:
        UserError: the number of ranks does not divide the sequence or the heads, or the tokens of a part depend on
            others elsewhere than in attention.
    """
    size, length, text = settings.context_parallel, settings.sequence_length, config.get_text_config()
    if size == 1:
        return
    if length % size:
        advice = f"give --sequence-length {length // size * size or size}"
        raise base.UserError(f"--context-parallel {size}: does not divide the sequence of {length:,} tokens; {advice}")
    family: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    # private: no public names for what a family supports
    uses_interface = family._supports_attention_backend and not family._is_stateful
    # masks of doge's tokens, and of Gemma 4's images, that the family makes of its part by itself
    makes_masks = hasattr(text, "keep_window_size") or (
        config is not text and getattr(text, "use_bidirectional_attention", None) == "vision"
    )
    if makes_masks or not (uses_interface and attends_by_positions(family, text, LAYER_TYPES)):
        problem = f"{settings.model} is more than attention over positions"
        raise base.UserError(refusal(settings, problem))
    if text.num_attention_heads % size:
        heads = text.num_attention_heads
        divisors = [str(number) for number in range(2, heads + 1) if heads % number == 0]
        advice = f"give one of {', '.join(divisors)}" if divisors else "leave it out"
        problem = f"does not divide the {heads} heads of {settings.model}"
        raise base.UserError(f"--context-parallel {size}: {problem}; {advice}")
    rope = getattr(text, "rope_parameters", None) or {}
    rope_types = {one.get("rope_type") for one in (rope, *rope.values()) if isinstance(one, dict)}
    if unsupported := rope_types & LENGTH_DEPENDENT_ROPE:
        problem = f"RoPE of type {unsupported.pop()} depends on the length of a part"
        raise base.UserError(refusal(settings, problem))

"""Models of a few layers, their optimizers and steps as a run has them, and a guard against reads of the device."""

import numpy as np
import torch
import torch.distributed as dist
from multirank import resolved
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import train_fsdp
from harness import model as models

SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 16}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
MODELS = {
    "smollm3": SIZES | {"no_rope_layers": [1, 1, 1, 0], "tie_word_embeddings": True, "pad_token_id": None},
    "llama": SIZES,
    "qwen3_sliding": SIZES | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    "qwen3_moe": SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
END = 0  # token that ends a document


def build(argv: list):
    """(settings, model, optimizer) of a command line, on CPU ranks."""
    settings, config = resolved(argv)
    device = torch.device("cpu")
    model = train_fsdp.build_model(settings, config, train_fsdp.build_mesh(settings, device), device)
    return settings, model, models.build_optimizer(settings, model)


def rank_share(batch: dict[str, torch.Tensor], microbatches: int = 1):
    """This rank's sequences of each microbatch of a global batch."""
    rows, left_over = divmod(len(batch["input_ids"]), microbatches * dist.get_world_size())
    assert not left_over
    for part in range(microbatches):
        start = (part * dist.get_world_size() + dist.get_rank()) * rows
        yield {name: tensor[start : start + rows] for name, tensor in batch.items()}


def take_steps(settings, model, optimizer, batches, steps: int) -> tuple[list[float], list[float]]:
    """(losses over all ranks' tokens, gradient norms) of so many steps."""
    losses, norms = [], []
    for _ in range(steps):
        result = train_fsdp.train_step(settings, model, optimizer, batches)
        dist.all_reduce(result.loss)
        losses.append(result.loss.item() / dist.get_world_size())
        norms.append(result.grad_norm.item())
    return losses, norms


class NoReadBack(TorchDispatchMode):
    """Raises where a GPU would have to finish all that it was given before the host can go on: a value is read, or the
    host sends numbers from memory that is not pinned. On a CPU the latter is seen by the calls: an index that is a list
    of numbers, a tensor that is made of numbers on a named device or moved to one."""

    def __enter__(self):
        self.sends = NoUnpinnedCopy()
        self.sends.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.sends.__exit__(*error)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.__name__.partition(".")[0]
        assert name not in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "unique", "masked_select"), name
        if name in ("index", "index_put", "index_put_"):
            assert not any(index is not None and index.dtype == torch.bool for index in args[1]), f"{name} by a mask"
        return op(*args, **kwargs or {})


class NoUnpinnedCopy(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.cpu_events: list[torch.Tensor] = []  # made of numbers in this step

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            assert not any(isinstance(part, list | np.ndarray) for part in index), f"{name} with a list of numbers"
        elif name in ("to", "cuda", "copy_") and any(tensor is host for host in self.cpu_events for tensor in args):
            assert kwargs.get("non_blocking"), f"Tensor.{name} of what the host made"
        result = func(*args, **kwargs)
        if name in ("tensor", "as_tensor", "from_numpy") and not isinstance(args[0], torch.Tensor):
            assert kwargs.get("device") is None, f"torch.{name} on a device"
            self.cpu_events.append(result)
        return result

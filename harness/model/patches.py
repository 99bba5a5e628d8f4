"""Patches: changes of libraries for the whole process, each with its reason. Temporary ones stand at their use."""

import math
import types
from typing import Any

import torch
import torch.utils.checkpoint
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import masking_utils
from transformers.integrations import moe, sdpa_attention
from transformers.models.auto import tokenization_auto

from harness import base

# A folder may name any class of transformers as its tokenizer's, and that class would ask on stdin whether to run the
# folder's code, even with trust_remote_code=False. private: with a timeout of 0 nobody is asked.
transformers.dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
# private: finds the class that tokenizer_config.json names; AutoTokenizer has no option to restrict it
any_class_from_name = tokenization_auto.tokenizer_class_from_name
# private: decides if torch's attention gets fewer key heads than query heads; there is no option
use_gqa_in_sdpa = sdpa_attention.use_gqa_in_sdpa
# private: decides if experts are computed by torch's grouped matmul or by a loop of transformers; there is no option
can_use_grouped_mm = moe._can_use_grouped_mm


def take_tokenizers_only() -> None:
    """Make AutoTokenizer refuse a class that is no tokenizer: a folder may name any class of transformers."""
    tokenization_auto.tokenizer_class_from_name = tokenizer_class_from_name


def tokenizer_class_from_name(class_name: str) -> type | None:
    """transformers' tokenizer of that name.

    Raises:
        ValueError: the class of that name is no tokenizer.
    """
    kind = any_class_from_name(class_name)
    is_tokenizer = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedTokenizerBase)
    if kind is None or is_tokenizer or getattr(kind, "is_dummy", False):  # a dummy raises the name of its package
        return kind
    raise ValueError(f"its tokenizer_class {class_name} is no tokenizer")


def repeat_shared_keys(repeats: bool) -> None:
    """Make transformers repeat keys for each head if `repeats`: on a GPU no fused kernel takes fp32 and shared keys,
    and torch would compute all scores of a layer at once."""
    sdpa_attention.use_gqa_in_sdpa = (lambda *_: False) if repeats else use_gqa_in_sdpa


def has_aligned_rows(weight: torch.Tensor) -> bool:
    """True if the rows of experts are multiples of 16 bytes, which torch's grouped matmul requires."""
    return all(size * weight.itemsize % 16 == 0 for size in weight.shape[1:])


def can_use_aligned_mm(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> bool:
    return has_aligned_rows(weight) and can_use_grouped_mm(input, weight, offs)


moe._can_use_grouped_mm = can_use_aligned_mm  # transformers loops over other experts


def add_backward_operator() -> None:
    """Make the backward of transformers' loop over experts an operator, as newer versions have it: neither the compiler
    nor a plan can run the loop itself, which reads the number of each expert's tokens."""
    # private: transformers has no public names for the loop
    differentiate = moe._grouped_mm_fallback_backward

    @torch.library.custom_op("transformers::grouped_mm_fallback_backward", mutates_args=())
    def backward(
        input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return differentiate(types.SimpleNamespace(saved_tensors=(input, weight), offs=offs), gradient)[:2]

    @backward.register_fake
    def shapes(
        input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(input), torch.empty_like(weight)

    def call_operator(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return *backward(*context.saved_tensors, context.offs, gradient), None

    torch.library.register_autograd(
        "transformers::grouped_mm_fallback", call_operator, setup_context=moe._grouped_mm_fallback_setup_context
    )


if not hasattr(torch.ops.transformers, "grouped_mm_fallback_backward"):  # transformers 5.17
    add_backward_operator()


def skip_packing_detection() -> None:
    """Keep transformers from reading positions back from the device to find documents: a sync in every forward, or in
    every layer with flash_attention_2. `masks.py` finds them without a sync."""
    # transformers calls it before a registered mask function; there is no option
    masking_utils.find_packed_sequence_indices = one_document
    # private: transformers' flash attention calls it and has no argument for it
    transformers.modeling_flash_attention_utils._is_packed_sequence = lambda position_ids, batch_size: False


def one_document(position_ids: torch.Tensor) -> None:
    """transformers' result if no row has several documents."""


def get_cached(saved: Any, *args: Any) -> Any:
    """torch's function, with its error as one line: recomputed from such a result, gradients would be wrong."""
    try:
        return get_unchanged(saved, *args)
    except RuntimeError as error:
        problem = "a layer of this model changes the result of a matmul or attention in place"
        raise base.UserError(f"--activation-checkpointing selective: {problem}; use full") from error


# private: selective checkpointing reads what it saved by it; the error passes through autograd
saved_results: Any = torch.utils.checkpoint._VersionWrapper
get_unchanged = saved_results.get_val
saved_results.get_val = get_cached


def compile_layers_that_set_attributes() -> None:
    """Allow torch.compile of a recomputed layer that sets an attribute, as a watched router does; the recomputation
    sets none."""
    # private: there is no public option
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True


def cast_before_all_gather(compiled: bool) -> None:
    """Replace torchao's cast of sharded weights before FSDP2's all-gather.

    torchao casts by eager operators, for even shards only, and loses the scale of the last step when --cpu-offload
    moves a weight. Here the cast is one kernel if `compiled`, a smaller shard is padded with rows of zeros, and the
    scale is kept.
    """
    from torchao.float8.float8_utils import tensor_to_scale
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    cast = torch.compile(cast_to_float8) if compiled else cast_to_float8

    def to(weight: WeightWithDynamicFloat8CastTensor, *args: Any, **options: Any) -> torch.Tensor:
        moved = torch.Tensor.to(weight, *args, **options)
        scale = weight._precomputed_scale  # private: torchao has no public names for the parts of its weights
        if moved is not weight and scale is not None and isinstance(moved, WeightWithDynamicFloat8CastTensor):
            moved._precomputed_scale = scale.to(moved.device)
        return moved

    def fsdp_pre_all_gather(
        weight: WeightWithDynamicFloat8CastTensor,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[torch.Tensor], tuple[torch.Tensor]]:
        # private: torchao has no public names for the parts of its weights
        master, scale, dtype = weight._tensor, weight._precomputed_scale, weight._dtype
        if scale is None:
            scale = tensor_to_scale(master, dtype, reduce_amax=True, device_mesh=mesh)
        bits = cast(master, scale, dtype)
        rows = math.ceil(outer_size[0] / mesh.size())  # of the largest shard
        if len(bits) < rows:
            padded = bits.new_zeros(rows, *bits.shape[1:])
            padded[: len(bits)] = bits
            bits = padded
        return (bits,), (scale,)

    WeightWithDynamicFloat8CastTensor.to = to
    WeightWithDynamicFloat8CastTensor.fsdp_pre_all_gather = fsdp_pre_all_gather


def cast_to_float8(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast as torchao does. Compiled, this reads the weight and writes a byte for each element; eager code makes fp32
    copies in between, 21 bytes of traffic for each element."""
    largest = torch.finfo(dtype).max
    return (weight.float() * scale).clamp(-largest, largest).to(dtype)

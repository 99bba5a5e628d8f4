"""Attention: which kernel a run takes, and its line in the header."""

import contextlib
import inspect
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, masking_utils
from transformers.integrations import sdpa_attention

from harness import base, flags, job
from harness.model import patches
from harness.model.configs import text_config
from harness.model.masks import restrict_attention_to_documents

# Layer types that attend to what their mask lets through, by the positions that they are given. Llama 4's, of
# chunked_attention, count positions by themselves; with minimax_m3_sparse or compressed_* documents reach each other.
RESTRICTABLE_LAYERS = {"full_attention", "sliding_attention", "indexed_attention"}
ONE_KERNEL = ("flash", "cudnn")  # choices of --attention that are sdpa with one of its kernels and no other


def cudnn_may_give_nan(config: PretrainedConfig, sequence_length: int, document_mask: bool) -> bool:
    """Whether cuDNN's attention may give NaN as the gradient of queries: on a Hopper, with a mask that is more than
    causal, where the length is 64 modulo 128 (pytorch issue 196678)."""
    text = config.get_text_config()
    windows = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size")]
    masked = document_mask or any(windows)
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    return masked and hopper and sequence_length % 128 == 64


def misses_cudnn(settings: flags.Settings, may_give_nan: bool, kernel: str, head_dim: int) -> bool:
    """Whether torch, left to itself, takes flash attention where it would take cuDNN's if it found that: on a Hopper or
    a data-centre Blackwell, for the sizes of heads that cuDNN's backward pass has."""
    left_to_torch = settings.explicit.get("attention", "auto") == "auto" and not may_give_nan
    prefers_cudnn = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in (9, 10)
    return left_to_torch and prefers_cudnn and kernel == "flash_attention" and head_dim <= 128 and head_dim % 8 == 0


def choose_attention(
    args: flags.Args, config: PretrainedConfig, precision: flags.Precision, sequence_length: int, document_mask: bool
) -> flags.Attention:
    """The kernel for `--attention`, `auto` decided, torch's switches set for it; a UserError where it does not run."""
    attention, cuda = args.attention, torch.cuda.is_available()
    without_cudnn = cudnn_may_give_nan(config, sequence_length, document_mask)
    if attention == "cudnn" and not (args.plan or cuda):
        raise base.UserError("--attention cudnn: needs an NVIDIA GPU; use sdpa")
    if attention == "cudnn" and without_cudnn:
        problem = (
            f"on a Hopper its gradients may be NaN with a mask at {sequence_length} tokens, which is 64 modulo 128"
        )
        raise base.UserError(f"--attention cudnn: {problem}; use sdpa, or --sequence-length {sequence_length + 64}")
    if attention == "flash_attention_2" and not (find_spec("flash_attn") and cuda):
        raise base.UserError("--attention flash_attention_2: needs a GPU and the package flash-attn; use sdpa")
    if attention == "flex_attention" and not cuda:
        raise base.UserError("--attention flex_attention: torch trains with it on a GPU only; use sdpa")
    for kernel in ("flash", "mem_efficient", "cudnn", "math"):
        allowed = attention not in ONE_KERNEL or kernel == attention
        if kernel == "cudnn" and without_cudnn:
            allowed = False
        getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(allowed)
    patches.repeat_shared_keys(precision == "fp32" and (cuda or args.plan))
    if attention != "auto":
        return attention
    family: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    # private: in public transformers only raises where a family cannot
    if document_mask and cuda and family._supports_flex_attn:
        return "flex_attention"  # it skips what is masked; the others compute it, and not by their fastest kernel
    return "sdpa" if family._supports_sdpa else "eager"  # private: no public name says what a family can


def any_attention_kernel() -> contextlib.AbstractContextManager:
    """A context in which sdpa takes whichever of its kernels runs, for steps that are not the run's own: a recorded
    one is on the CPU, which has not all of them."""
    kernels = torch.nn.attention.SDPBackend
    return torch.nn.attention.sdpa_kernel(
        [kernels.FLASH_ATTENTION, kernels.EFFICIENT_ATTENTION, kernels.CUDNN_ATTENTION, kernels.MATH]
    )


def describe_attention(settings: flags.Settings, config: PretrainedConfig, device: str) -> str:
    """The attention implementation and, for torch's own, the kernel that it chooses for this model and device; a
    UserError where there is none, a warning where it is not the one that torch takes elsewhere."""
    attention = config._attn_implementation  # private: in public it is only an argument of `from_config`
    if attention != "sdpa":
        return f"{attention} attention"
    try:
        text = config.get_text_config()
        heads = text.num_attention_heads
        sizes = heads, getattr(text, "num_key_value_heads", None) or heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    except Exception:  # some configs have no such figure, others one for each layer
        return "sdpa attention"
    length = settings.sequence_length
    dtype = torch.float32 if settings.precision == "fp32" else torch.bfloat16
    # one row, whatever the batch: torch's choice does not look at its size
    query, key = (torch.empty(1, length, n, head_dim, dtype=dtype, device=device, requires_grad=True) for n in sizes)
    query, key = query.transpose(1, 2), key.transpose(1, 2)
    mask = None
    if settings.document_mask:  # torch looks at its shape and the stride of its last dimension only
        mask = torch.empty(length, dtype=torch.bool, device=device).expand(1, 1, length, length)
    shared = query.shape != key.shape and sdpa_attention.use_gqa_in_sdpa(mask, key, key)
    if not shared:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    # private: torch.backends.cuda.can_use_flash_attention and its like say which could run, not which one torch prefers
    choice = torch._fused_sdp_choice(query, key, key, mask, is_causal=mask is None, enable_gqa=shared)
    kernel = torch.nn.attention.SDPBackend(choice).name.lower()
    if kernel == "error":
        raise base.UserError(
            f"--attention {settings.attention}: torch's kernel does not take this model's heads; use sdpa"
        )
    may_give_nan = cudnn_may_give_nan(config, length, settings.document_mask)
    if misses_cudnn(settings, may_give_nan, kernel, head_dim):
        job.warn(
            "--attention auto: torch takes flash attention, which is 1.7 to 2.3 times slower than cuDNN's on a Hopper "
            "(transformers 48163). A system's CUDA on LD_LIBRARY_PATH hides torch's cuDNN: unset it, and "
            "TORCH_CUDNN_SDPA_DEPRIORITIZED; --attention flash asks for flash"
        )
    if may_give_nan:
        kernel += f", as cuDNN's gradients may be NaN with a mask at {length} tokens"
    return f"sdpa attention ({kernel})"


def skip_packing_detection(model: nn.Module, name: str, document_mask: bool) -> None:
    """Keep transformers from looking for documents; with `document_mask`, restrict attention to them. A UserError if a
    family mixes tokens in other ways too."""
    patches.skip_packing_detection()
    kinds = set(getattr(text_config(model), "layer_types", None) or ())
    takes_positions = "position_ids" in inspect.signature(type(model).forward).parameters
    if document_mask and not (takes_positions and kinds <= RESTRICTABLE_LAYERS):
        problem = f"{name} cannot separate the documents of a sequence, as it is more than attention over positions"
        advice = "give --packing none, which pads each to a sequence of its own, or --no-document-mask, with which the "
        advice += "documents of a sequence see those before them"
        raise base.UserError(f"--document-mask (the default for conversations and labels): {problem}; {advice}")
    if document_mask:
        restrict_attention_to_documents(model, name)


def without_packing_detection() -> contextlib.AbstractContextManager[object]:
    """A context in which no row is taken for several documents, for tensors without data."""
    return mock.patch.object(masking_utils, "find_packed_sequence_indices", patches.one_document)

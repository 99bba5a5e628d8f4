"""Attention: the choice of a kernel, and its line in the header."""

import contextlib
from typing import Any

import torch
import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, modeling_flash_attention_utils
from transformers.integrations import sdpa_attention

from harness import base, flags, job
from harness.model import patches

ONE_KERNEL = ("flash", "cudnn")  # values of --attention that are sdpa restricted to one of its kernels
FLASH_PACKAGES = {  # values that are packages of their own, as pip names them
    "flash_attention_2": ("flash-attn", transformers.utils.is_flash_attn_2_available),
    "flash_attention_3": ("flash-attn-3", transformers.utils.is_flash_attn_3_available),
    "flash_attention_4": ("flash-attn-4", transformers.utils.is_flash_attn_4_available),
}
DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")  # of attention, in configs
MAX_MASK_BYTES = 2**30  # of sdpa's mask of a layer with a window, sequence_length squared


def window_sizes(config: PretrainedConfig) -> list[int]:
    """The tokens of a model's windows and chunks of attention."""
    text = config.get_text_config()
    sizes = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return [size for size in sizes if size]


def cudnn_may_give_nan(config: PretrainedConfig, sequence_length: int, document_mask: bool) -> bool:
    """True if cuDNN's attention may give NaN as the gradient of queries: on a Hopper, with a mask that is more than
    causal, if the length is 64 modulo 128 (pytorch issue 196678)."""
    masked = document_mask or any(window_sizes(config))
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    return masked and hopper and sequence_length % 128 == 64


def has_window(config: PretrainedConfig, sequence_length: int) -> bool:
    """True if a window or chunk of attention is smaller than a sequence, so that its layers need a mask."""
    layer_types = set(getattr(config.get_text_config(), "layer_types", None) or ())
    return layer_types != {"full_attention"} and any(window < sequence_length for window in window_sizes(config))


def misses_cudnn(settings: flags.Settings, may_give_nan: bool, kernel: str, head_dim: int) -> bool:
    """True if torch chooses flash attention because it does not find cuDNN: on a Hopper or a data-centre Blackwell, for
    the head sizes that cuDNN's backward pass supports."""
    left_to_torch = settings.explicit.get("attention", "auto") == "auto" and not may_give_nan
    prefers_cudnn = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in (9, 10)
    return left_to_torch and prefers_cudnn and kernel == "flash_attention" and head_dim <= 128 and head_dim % 8 == 0


def choose_attention(
    args: flags.Args, config: PretrainedConfig, precision: flags.Precision, sequence_length: int, document_mask: bool
) -> flags.Attention:
    """Resolve `--attention` and set torch's switches for it.

    Raises:
        UserError: the kernel does not run here.
    """
    attention, cuda = args.attention, torch.cuda.is_available()
    without_cudnn = cudnn_may_give_nan(config, sequence_length, document_mask)
    if attention == "cudnn" and not (args.plan or cuda):
        raise base.UserError("--attention cudnn: needs an NVIDIA GPU; use sdpa")
    if attention == "cudnn" and without_cudnn:
        problem = (
            f"on a Hopper its gradients may be NaN with a mask at {sequence_length} tokens, which is 64 modulo 128"
        )
        raise base.UserError(f"--attention cudnn: {problem}; use sdpa, or --sequence-length {sequence_length + 64}")
    is_capped = bool(getattr(config.get_text_config(), "attn_logit_softcapping", None))
    if is_capped and attention in ("sdpa", *ONE_KERNEL):
        # some versions of transformers leave the cap out, without a word
        problem = f"{config.model_type} caps scores, which this kernel does not"
        raise base.UserError(f"--attention {attention}: {problem}; use auto")
    if attention in FLASH_PACKAGES:
        check_flash_package(args, config)
    if attention == "flex_attention" and not (args.plan or cuda):
        raise base.UserError("--attention flex_attention: torch trains with it on a GPU only; use sdpa")
    dropout = [getattr(config.get_text_config(), name, None) for name in DROPOUTS]
    if attention == "flex_attention" and any(dropout):
        raise base.UserError(f"--attention flex_attention: {config.model_type} has attention dropout; use sdpa")
    if attention == "flash" and has_window(config, sequence_length):
        problem = f"torch's kernel takes no mask, and {config.model_type} has a window of fewer tokens than a sequence"
        raise base.UserError(f"--attention flash: {problem}; use sdpa or flex_attention")
    for kernel in ("flash", "mem_efficient", "cudnn", "math"):
        allowed = attention not in ONE_KERNEL or kernel == attention
        if kernel == "cudnn" and without_cudnn:
            allowed = False
        getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(allowed)
    patches.repeat_shared_keys(precision == "fp32" and (cuda or args.plan))
    if attention != "auto":
        return attention
    family: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    window = getattr(config.get_text_config(), "sliding_window", None) or sequence_length
    has_large_mask = window < sequence_length and sequence_length**2 > MAX_MASK_BYTES
    # private: in public transformers only raises where a family cannot
    if (document_mask or has_large_mask) and cuda and family._supports_flex_attn and not any(dropout):
        return "flex_attention"  # skips masked blocks; the others compute them, and not by their fastest kernel
    # private: no public name for what a family supports
    return "sdpa" if family._supports_sdpa and not is_capped else "eager"


def check_flash_package(args: flags.Args, config: PretrainedConfig) -> None:
    """Check that a package of FlashAttention is installed, except for a plan, and that transformers gives this model to
    it. For others it would fetch a kernel from the hub and run that.

    Raises:
        UserError: one of these is not so.
    """
    attention = args.attention
    package, is_available = FLASH_PACKAGES[attention]
    if not (args.plan or (torch.cuda.is_available() and is_available())):
        raise base.UserError(f"--attention {attention}: needs a GPU and the package {package}; use sdpa")
    family: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    # private: no public name for what a family supports; a list of kernels is that of attention with sinks
    kernels = getattr(family, "_compatible_flash_implementations", None)
    if not family._supports_flash_attn or (kernels is not None and attention not in kernels):
        raise base.UserError(
            f"--attention {attention}: transformers does not support it for {config.model_type}; use auto"
        )


def try_flash_package(attention: str, query: torch.Tensor, key: torch.Tensor) -> None:
    """Run a package of FlashAttention forward and backward on tensors (1, tokens, heads, head_dim).

    Raises:
        UserError: it does not take them, for example because of the head dimension or the GPU.
    """
    try:
        # private: transformers has no public function of tensors alone
        attend = modeling_flash_attention_utils._flash_attention_forward
        attend(query, key, key, None, query.shape[1], is_causal=True, implementation=attention).sum().backward()
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        problem = f"does not take heads of {query.shape[-1]} on this GPU ({reason})"
        raise base.UserError(f"--attention {attention}: {problem}; use sdpa") from error


def any_attention_kernel() -> contextlib.AbstractContextManager:
    """A context that allows all of sdpa's kernels, for a step of a plan: it runs on the CPU, which lacks some."""
    kernels = torch.nn.attention.SDPBackend
    return torch.nn.attention.sdpa_kernel(
        [kernels.FLASH_ATTENTION, kernels.EFFICIENT_ATTENTION, kernels.CUDNN_ATTENTION, kernels.MATH]
    )


def describe_attention(settings: flags.Settings, config: PretrainedConfig, device: str) -> str:
    """The attention implementation and, for sdpa, the kernel that torch chooses for this model and device. Warns if
    cuDNN was not found.

    Raises:
        UserError: no kernel takes this model's heads.
    """
    attention = config._attn_implementation  # private: the public name is an argument of `from_config` only
    if attention == "eager" and config.model_type in flags.model_types():
        return "the model's own attention"
    if attention != "sdpa" and attention not in FLASH_PACKAGES:
        return f"{attention} attention"
    try:
        text = config.get_text_config()
        heads = text.num_attention_heads
        sizes = heads, getattr(text, "num_key_value_heads", None) or heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    except Exception:  # some configs lack these fields, others have one for each layer
        return f"{attention} attention"
    length = settings.sequence_length
    dtype = torch.float32 if settings.precision == "fp32" else torch.bfloat16
    # one row: torch's choice does not depend on the batch size
    query, key = (torch.empty(1, length, n, head_dim, dtype=dtype, device=device, requires_grad=True) for n in sizes)
    if attention in FLASH_PACKAGES:
        try_flash_package(attention, query, key)
        return f"{attention} attention"
    query, key = query.transpose(1, 2), key.transpose(1, 2)
    mask = None
    if settings.document_mask:  # torch reads only its shape and the stride of its last dimension
        mask = torch.empty(length, dtype=torch.bool, device=device).expand(1, 1, length, length)
    shared = query.shape != key.shape and sdpa_attention.use_gqa_in_sdpa(mask, key, key)
    if not shared:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    # private: torch.backends.cuda.can_use_flash_attention and its like tell which could run, not torch's preference
    choice = torch._fused_sdp_choice(query, key, key, mask, is_causal=mask is None, enable_gqa=shared)
    kernel = torch.nn.attention.SDPBackend(choice).name.lower()
    if kernel == "error":
        raise base.UserError(
            f"--attention {settings.attention}: torch's kernel does not support this model's head size; use sdpa"
        )
    may_give_nan = cudnn_may_give_nan(config, length, settings.document_mask)
    if misses_cudnn(settings, may_give_nan, kernel, head_dim):
        job.warn(
            "--attention auto: torch takes flash attention, which is 1.7 to 2.3 times slower than cuDNN's on a Hopper "
            "(transformers 48163). A system's CUDA on LD_LIBRARY_PATH hides torch's cuDNN: unset it, and "
            "TORCH_CUDNN_SDPA_DEPRIORITIZED; to keep flash, give --attention flash"
        )
    if may_give_nan:
        kernel += f", as cuDNN's gradients may be NaN with a mask at {length} tokens"
    return f"sdpa attention ({kernel})"

"""Sampling: the model in evaluation mode, and generated text."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedTokenizerBase

from harness import base, flags, job


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards no parameter stays gathered and no random state is touched."""
    cuda = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=cuda):
            yield
    finally:
        model.train()
        reshard(model)


def reshard(model: nn.Module) -> None:
    """Frees every gathered parameter."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class TokenCount:
    """A streamer of `generate` that reports each token as progress."""

    def put(self, tokens: torch.Tensor) -> None:
        if tokens.dim() == 1:  # the prompt comes first, with two dimensions
            job.enter_phase("sampling")

    def end(self) -> None:
        pass


def check_generates(config: PretrainedConfig) -> None:
    """Raise a UserError if models of this config cannot generate text."""
    family: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not hasattr(family, "generate"):
        problem = f"{family.__name__} has no generate(), which samples need"
        raise base.UserError(f"--sample-prompt: {problem}; derive it from GenerationMixin too, or take no samples")


def sample(
    settings: flags.Settings,
    prompt: str,
    stop_ids: list[int],
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
) -> dict[str, Any]:
    """A dict of `prompt`; `text`, the prompt with its continuation, both without special tokens; `tokens`, the number
    of tokens generated; `ended`, True if the last of them is one of `stop_ids`. Every rank calls this, with
    the same random numbers."""
    encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).to(device)
    # the length changes with every token: compiled code and cuDNN would prepare each one
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with evaluating(model), torch.compiler.set_stance("force_eager"), sdpa_kernel(kernels):
        torch.manual_seed(settings.seed)
        tokens = model.generate(
            **{name: encoded[name] for name in ("input_ids", "attention_mask")},
            max_new_tokens=settings.sample_tokens,
            do_sample=True,
            temperature=0.6,
            top_k=20,
            use_cache=True,
            synced_gpus=dist.get_world_size() > 1,
            eos_token_id=stop_ids or None,  # None: never stops early
            pad_token_id=tokenizer.eos_token_id,
            streamer=TokenCount(),
        )
    shown, text = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (encoded["input_ids"][0], tokens[0]))
    assert isinstance(shown, str) and isinstance(text, str)  # decoded from one row of ids
    generated = tokens[0, encoded["input_ids"].shape[1] :].tolist()
    return {"prompt": shown, "text": text, "tokens": len(generated), "ended": generated[-1] in stop_ids}

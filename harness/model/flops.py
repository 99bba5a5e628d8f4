"""FLOPs: what a forward and a backward take, counted by torch."""

import contextlib
import copy
import re
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from harness.base.text import first_line

MOST_OPERATORS = 100_000  # of one count, which takes seconds; a dense model of 80 layers has 20,000


def flops_per_token(model, seq_len: int, causal: bool = False) -> int:
    """As `utils.get_model_flops_per_token`, which says what it returns and raises."""
    config = getattr(model, "config", model)
    rest, attention, half = count_flops(config, seq_len, causal)
    if causal and rest * (seq_len // 2) != count_flops(config, seq_len // 2, causal)[0] * seq_len:
        raise ValueError("no causal half: more grows with the sequence than softmax attention apart from the rest")
    return round((rest + (half if causal else attention)) / seq_len)


class FlopCounter(TorchDispatchMode):
    """Adds up what the operators inside take, backward too, by the table of torch.utils.flop_counter."""

    flops = convolutions = operators = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        self.operators += 1
        if self.operators > MOST_OPERATORS:
            raise OverflowError
        if formula := flop_registry.get(op.overloadpacket):
            angles = not torch.is_grad_enabled() and torch._C._current_graph_task_id() < 0 and args[0].shape[-1] == 1
            flops = 0 if angles else formula(*args, **(kwargs or {}), out_val=result)  # rotary, an outer product
            if op.overloadpacket is torch.ops.aten.convolution_backward:  # whose formula ignores groups
                flops = 2 * args[0].numel() * args[2][0].numel() * sum(args[10][:2])
            self.flops += flops
            self.convolutions += flops * ("convolution" in op.name())
        elif re.search("attention|_mm", op.name()):
            raise ValueError(f"torch has no count for {op.name()}")
        return result


def count_flops(config, seq_len: int, apart: bool = False) -> tuple[float, float, float]:
    """FLOPs of a forward and backward of one sequence as torch counts them: (all but softmax attention, softmax
    attention as its masks leave it, the causal half of that). Eager attention is in the first, unless `apart`.

    All layers run on the meta device, where only shapes are computed, so sharding and compilation do not matter. Each
    token meets its own experts only. Mamba and linear attention run transformers' code in torch; where that takes too
    many operators (a step for each token), four short sequences are counted and the parabola through them continued.
    A ValueError where the model does not run without data, or the count of a product is not known.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel, masking_utils
    from transformers.integrations import hub_kernels

    config, attended, windows = copy.deepcopy(config), [], set()

    def mask(batch_size, q_length, kv_length, local_size=None, dtype=None, **_):
        windows.update([local_size] if local_size else [])
        made = torch.zeros(batch_size, 1, q_length, kv_length, dtype=dtype)
        made.window = kv_length if square else min(local_size or kv_length, kv_length)
        return made

    def attention(module, query, key, value, attention_mask, **options):
        keys = key.shape[2]
        window = getattr(attention_mask, "window", None) or whole(keys)
        span = window if window == getattr(config.get_text_config(), "attention_chunk_size", None) else keys
        per_key = 6 * query.shape[:3].numel() * (query.shape[3] + value.shape[3])
        attended.append((per_key * keys, per_key * window, per_key * window * (2 * span - window) / (2 * span)))
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        biases = [x.sum() for x in (attention_mask, *options.values()) if torch.is_tensor(x) and x.requires_grad]
        return ((query @ key.mT + sum(biases)).softmax(-1) @ value).transpose(1, 2).contiguous(), None

    def whole(length: int) -> int:
        if min(windows, default=length) < length:
            raise ValueError("it has a sliding window, but does not say where")
        return length

    def build(attention: str | None):
        options = {"attn_implementation": attention, "experts_implementation": "batched_mm", "dtype": torch.float32}
        return AutoModelForCausalLM.from_config(config, **options).to("meta").eval()  # some make a tensor on the CPU

    def run(tokens: int) -> FlopCounter:
        attended.clear()
        ids = torch.zeros(1, tokens, dtype=torch.long)
        with FlopCounter() as counter:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return counter

    with (
        mock.patch.dict(AttentionInterface._global_mapping, counted=attention),
        mock.patch.dict(masking_utils.AttentionMaskInterface._global_mapping, counted=mask, eager=mask),
        # transformers reads the tokens in these, and would take kernels that are installed
        mock.patch.object(masking_utils, "find_packed_sequence_indices", lambda position_ids: None),
        mock.patch.object(PreTrainedModel, "warn_if_padding_and_no_attention_mask", lambda *_: None),
        mock.patch.object(hub_kernels, "is_torchdynamo_exporting", lambda: True),
        torch.device("meta"),
    ):
        try:
            model = build(config._attn_implementation)
            square = model.config._attn_implementation == "eager"  # whatever the windows
            eager, tells = square and not apart, model._can_set_attn_implementation()
            model = model if eager else build("counted" if tells else "eager")
            with contextlib.suppress(OverflowError):
                flops = run(seq_len).flops - sum(part[0] for part in attended)
                eager or tells or whole(seq_len)
                return flops, sum(part[1] for part in attended), sum(part[2] for part in attended)
            for unit in (128, 2):
                with contextlib.suppress(OverflowError):
                    counters = [run(unit * n) for n in (1, 2, 3, 4)]
                    eager or whole(seq_len)
                    one, two, three, four = (counter.flops for counter in counters)
                    padding = 2 * counters[0].convolutions - counters[1].convolutions  # of convolutions, once
                    # a parabola; what is rounded up to a chunk would let it begin above the padding
                    if four - 3 * three + 3 * two - one or 3 * one - 3 * two + three > padding:
                        raise ValueError("its FLOPs do not grow evenly with the sequence")
                    n = seq_len / unit
                    return one * (n - 2) * (n - 3) / 2 - two * (n - 1) * (n - 3) + three * (n - 1) * (n - 2) / 2, 0, 0
        except Exception as error:
            raise ValueError(f"torch cannot count it: {first_line(error).split('. ')[0]}") from error
    raise ValueError(f"torch does not count it: more than {MOST_OPERATORS:,} operators for eight tokens")


def known_flops(model: nn.Module, sequence_length: int) -> tuple[int, str]:
    """FLOPs per token, 0 where no figure can be trusted, and what to say of them."""
    try:
        flops = flops_per_token(model, sequence_length)
        return flops, f"{flops / 1e9:,.3f} GFLOP a token, counted by torch"
    except ValueError as error:
        return 0, f"FLOPs not known, so no MFU ({error})"

"""FLOPs of a forward and a backward: for which configs PaLM's formula holds (`utils.get_model_flops_per_token` has the
formula itself), and the count by operators for all others. Independent of weights, sharding and device."""

import contextlib
import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from harness.base.text import first_line
from harness.base.torch_internals import TorchDispatchMode, backward_is_running
from harness.base.transformers_internals import (
    attention_of,
    takes_any_attention,
    without_packing_detection,
    without_reading_tokens,
)

# Families whose FLOPs tests/model/test_flops.py has compared: the formula and the count by operators are equal.
DENSE_FAMILIES = (
    "cohere",
    "gemma",
    "glm4",
    "granite",
    "llama",
    "mistral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
)
MIXTURE_FAMILIES = ("qwen3_moe",)
MAX_OPERATORS = 100_000  # of one count, which takes seconds; a dense model of 80 layers has 20,000
SHORT_UNITS = (128, 2)  # tokens; where a count has too many operators, sequences of 1 to 4 of these are counted


def known_flops(
    model: nn.Module, sequence_length: int, flops_per_token: Callable[[nn.Module, int], int]
) -> tuple[int, str]:
    """FLOPs per token, 0 where no figure can be trusted, and the words for the header. `flops_per_token` is
    `utils.get_model_flops_per_token`."""
    try:
        flops = flops_per_token(model, sequence_length)
    except ValueError as error:
        return 0, f"FLOPs not known, so no MFU ({error})"
    source = "by the formula of PaLM" if formula_holds(model.config) else "counted by torch"
    return flops, f"{flops / 1e9:,.3f} GFLOP a token, {source}"


def formula_holds(config) -> bool:
    """Whether PaLM's formula gives what torch counts: a family that was compared, every layer of which has softmax
    attention over the whole sequence and the same kind of MLP."""
    layer_types = getattr(config, "layer_types", None) or ["full_attention"]
    if getattr(config, "sliding_window", None) is not None or set(layer_types) != {"full_attention"}:
        return False
    if config.model_type in DENSE_FAMILIES:
        return not hasattr(config, "num_experts")  # a field that the model would not read, but the formula would
    has_dense_layers = getattr(config, "mlp_only_layers", None) or getattr(config, "decoder_sparse_step", 1) != 1
    return config.model_type in MIXTURE_FAMILIES and not has_dense_layers


# ---- Count by operators ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SequenceFlops:
    """FLOPs of a forward and a backward of one sequence."""

    other: float  # all but softmax attention
    attention: float = 0  # softmax attention over the keys that its masks leave
    causal_attention: float = 0  # of those, the share that causal queries meet: half where there is no window


class TooManyOperatorsError(Exception):
    """A count has passed MAX_OPERATORS."""


def count_flops_per_token(config, seq_len: int, causal: bool = False) -> int:
    """FLOPs of a forward and a backward per token, as torch counts the operators.

    A ValueError where the model does not run without data, where the FLOPs of a product are not known, or where
    `causal` asks for a half that does not exist: attention that cannot be separated from the rest.
    """
    whole = count_flops(config, seq_len, attention_apart=causal)
    if not causal:
        return round((whole.other + whole.attention) / seq_len)
    half = count_flops(config, seq_len // 2, attention_apart=True)
    if whole.other * (seq_len // 2) != half.other * seq_len:
        raise ValueError("no causal half: more grows with the sequence than softmax attention apart from the rest")
    return round((whole.other + whole.causal_attention) / seq_len)


def count_flops(config, seq_len: int, attention_apart: bool = False) -> SequenceFlops:
    """FLOPs of one sequence as torch counts them. Eager attention is in `other`, unless `attention_apart`.

    All layers run on the meta device, where only shapes are computed, so sharding and compilation do not matter. Each
    token meets its own experts only. Mamba and linear attention run transformers' code in torch. Raises a ValueError
    where the model does not run without data, or where the FLOPs of a product are not known.
    """
    config = copy.deepcopy(config)
    stub = AttentionStub(config)
    try:
        with counted_attention(stub), torch.device("meta"):
            return count_on_meta(config, stub, seq_len, attention_apart)
    except TooManyOperatorsError:
        raise ValueError(f"torch does not count it: more than {MAX_OPERATORS:,} operators for eight tokens") from None
    except Exception as error:
        raise ValueError(f"torch cannot count it: {first_line(error).split('. ')[0]}") from error


def count_on_meta(config, stub: "AttentionStub", seq_len: int, attention_apart: bool) -> SequenceFlops:
    """Counts the whole sequence, or short ones where that takes too many operators (a step for each token)."""
    model = build(config, attention_of(config))
    is_eager = attention_of(model.config) == "eager"
    takes_stub = takes_any_attention(model)
    stub.ignores_windows = is_eager  # eager attention computes every score and masks it afterwards
    attention_in_other = is_eager and not attention_apart
    if not attention_in_other:
        model = build(config, "counted" if takes_stub else "eager")

    with contextlib.suppress(TooManyOperatorsError):
        flops = run(model, stub, seq_len).flops - sum(call.square for call in stub.calls)
        if not attention_in_other and not takes_stub:
            stub.refuse_windows(seq_len)
        attention = sum(call.windowed for call in stub.calls)
        return SequenceFlops(flops, attention, sum(call.causal for call in stub.calls))
    for unit in SHORT_UNITS:
        with contextlib.suppress(TooManyOperatorsError):
            counters = [run(model, stub, unit * length) for length in (1, 2, 3, 4)]
            if not attention_in_other:
                stub.refuse_windows(seq_len)
            return SequenceFlops(extrapolate(counters, seq_len / unit))
    raise TooManyOperatorsError


def build(config, attention: str | None):
    """The model of a config on the meta device, with that implementation of attention."""
    from transformers import AutoModelForCausalLM

    options = {"attn_implementation": attention, "experts_implementation": "batched_mm", "dtype": torch.float32}
    return AutoModelForCausalLM.from_config(config, **options).to("meta").eval()  # some make a tensor on the CPU


def run(model, stub: "AttentionStub", tokens: int) -> "FlopCounter":
    """Counts a forward and a backward of one sequence of `tokens`; `stub` notes the calls of attention."""
    stub.calls.clear()
    ids = torch.zeros(1, tokens, dtype=torch.long)
    with FlopCounter() as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return counter


def extrapolate(counters: list["FlopCounter"], length: float) -> float:
    """FLOPs at `length` by the parabola through the counts at lengths 1, 2 and 3, which the one at 4 confirms. Raises a
    ValueError where the FLOPs are no such parabola: where what is rounded up to a chunk makes it begin above zero.
    """
    one, two, three, four = (counter.flops for counter in counters)
    third_difference = four - 3 * three + 3 * two - one
    at_zero = 3 * one - 3 * two + three
    padding = 2 * counters[0].convolutions - counters[1].convolutions  # of convolutions, at any length the same
    if third_difference != 0 or at_zero > padding:
        raise ValueError("its FLOPs do not grow evenly with the sequence")
    return (
        one * (length - 2) * (length - 3) / 2
        - two * (length - 1) * (length - 3)
        + three * (length - 1) * (length - 2) / 2
    )


class FlopCounter(TorchDispatchMode):
    """Adds up the FLOPs of the operators inside, backward too, by the table of torch.utils.flop_counter."""

    def __init__(self):
        super().__init__()
        self.flops = self.convolutions = self.operators = 0  # convolutions: their share of the FLOPs

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = op(*args, **kwargs)
        self.operators += 1
        if self.operators > MAX_OPERATORS:
            raise TooManyOperatorsError
        formula = flop_registry.get(op.overloadpacket)
        if formula is None:
            if re.search("attention|_mm", op.name()):
                raise ValueError(f"torch has no count for {op.name()}")
            return result
        if op.overloadpacket is torch.ops.aten.convolution_backward:  # whose formula ignores groups
            grad_output, weight, output_mask = args[0], args[2], args[10]
            products = sum(output_mask[:2])  # the gradients of input and weight, where they are asked for
            flops = 2 * grad_output.numel() * weight[0].numel() * products
        elif is_rotary_product(args[0]):
            flops = 0
        else:
            flops = formula(*args, **kwargs, out_val=result)
        self.flops += flops
        if "convolution" in op.name():
            self.convolutions += flops
        return result


def is_rotary_product(first: torch.Tensor) -> bool:
    """Whether a product is that of positions and frequencies, the rotary angles: an outer product that takes no
    gradient."""
    return not torch.is_grad_enabled() and not backward_is_running() and first.shape[-1] == 1


# ---- Softmax attention, apart from all else --------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionCall:
    """FLOPs of one call of softmax attention, forward and backward."""

    square: float  # every query with every key
    windowed: float  # every query with the keys that its mask leaves
    causal: float  # every query with those of them that come before it


class AttentionStub:
    """What a counted model calls in place of softmax attention and its masks. It notes the FLOPs of each call, by the
    window of the call's mask, and computes the result by plain products, which a `FlopCounter` counts as a square."""

    def __init__(self, config):
        self.config = config
        self.ignores_windows = False
        self.windows: set[int] = set()  # of all masks so far
        self.calls: list[AttentionCall] = []

    def mask(self, batch_size, q_length, kv_length, local_size=None, dtype=None, **_) -> torch.Tensor:
        """A mask that lets everything through and has, as an attribute, its window in keys."""
        mask = torch.zeros(batch_size, 1, q_length, kv_length, dtype=dtype)
        mask.window = kv_length
        if local_size:
            self.windows.add(local_size)
            if not self.ignores_windows:
                mask.window = min(local_size, kv_length)
        return mask

    def attention(self, module, query, key, value, attention_mask, **options):
        """As a function of transformers' AttentionInterface."""
        keys = key.shape[2]
        window = getattr(attention_mask, "window", None)
        if window is None:
            self.refuse_windows(keys)
            window = keys
        chunk_size = getattr(self.config.get_text_config(), "attention_chunk_size", None)
        span = window if window == chunk_size else keys  # a chunk begins anew, a window slides along all keys
        flops_per_key = 6 * query.shape[:3].numel() * (query.shape[3] + value.shape[3])
        windowed = flops_per_key * window
        causal = windowed * (2 * span - window) / (2 * span)
        self.calls.append(AttentionCall(flops_per_key * keys, windowed, causal))

        queries_per_key = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(queries_per_key, 1), value.repeat_interleave(queries_per_key, 1)
        # a bias that takes a gradient has to get one
        extras = [attention_mask, *options.values()]
        bias = sum(extra.sum() for extra in extras if torch.is_tensor(extra) and extra.requires_grad)
        return ((query @ key.mT + bias).softmax(-1) @ value).transpose(1, 2).contiguous(), None

    def refuse_windows(self, length: int) -> None:
        """Raises a ValueError where a mask had a window shorter than `length` and it is not known where it belongs."""
        if self.windows and min(self.windows) < length:
            raise ValueError("it has a sliding window, but does not say where")


@contextlib.contextmanager
def counted_attention(stub: AttentionStub) -> Iterator[None]:
    """Inside, models of transformers can be built with `stub` as the implementation of attention named `counted`, and
    eager ones take its masks. None of them reads its tokens, which have no values, or takes a kernel from the hub."""
    from transformers import AttentionInterface, masking_utils

    AttentionInterface.register("counted", stub.attention)
    masking_utils.AttentionMaskInterface.register("counted", stub.mask)
    masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["eager"] = stub.mask
    try:
        with without_packing_detection(), without_reading_tokens():
            yield
    finally:
        del masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["eager"]

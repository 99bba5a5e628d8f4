"""Models of a few layers for tests of one step, and a guard against reads of the device."""

from torch.utils._python_dispatch import TorchDispatchMode

SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 16}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
MODELS = {
    "smollm3": SIZES | {"no_rope_layers": [1, 1, 1, 0], "tie_word_embeddings": True, "pad_token_id": None},
    "llama": SIZES,
    "qwen3_sliding": SIZES | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    "qwen3_moe": SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
END = 0  # token that ends a document


class NoReadBack(TorchDispatchMode):
    """Raises where a GPU would have to finish all that it was given before the host can go on."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.__name__.partition(".")[0]
        assert name not in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "unique", "masked_select"), name
        return op(*args, **kwargs or {})

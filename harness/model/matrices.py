"""Matrices: the weights of a model that an optimizer may orthogonalize, and the matrices in each: a fused projection
has several, a stack of experts one or two for each expert."""

import dataclasses

import torch
import transformers
from torch import nn

from harness.model.configs import text_config
from harness.model.optimization import is_matrix
from harness.model.weights import decoder_layers

# Projections whose outputs are queries, then keys, then values. In families of the second list such a projection mixes
# them by head and stays one matrix.
FUSED_ATTENTION = ("qkv_proj", "Wqkv", "c_attn")
MIXED_BY_HEAD = ("codegen", "gpt_bigcode", "minimax")


@dataclasses.dataclass(frozen=True, eq=False)
class MatrixWeight:
    """A parameter of two dimensions, output by input as a linear stores it, or of three with experts first.

    `outputs` are the outputs of each of its matrices. If it `is_transposed` it is stored input by output.
    """

    parameter: nn.Parameter
    outputs: tuple[range, ...]
    is_transposed: bool = False

    @property
    def shape(self) -> torch.Size:
        return self.parameter.shape

    @property
    def is_expert_stack(self) -> bool:
        return len(self.shape) == 3

    @property
    def kind(self) -> tuple:
        """Weights of one kind can be computed as one batch."""
        return self.shape, self.outputs, self.is_transposed

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(outputs, inputs) of each matrix."""
        inputs = self.shape[-2 if self.is_transposed else -1]
        return [(len(outputs), inputs) for outputs in self.outputs]

    def count(self) -> int:
        """The number of its matrices."""
        return len(self.outputs) * (self.shape[0] if self.is_expert_stack else 1)

    def split(self, rows: torch.Tensor, first_row: int = 0) -> list[torch.Tensor]:
        """A view of each matrix in `rows`, (..., rows, columns): rows of such weights from `first_row` on."""
        views = []
        for outputs in self.outputs:
            if self.is_transposed:
                views.append(rows[..., outputs.start : outputs.stop : outputs.step])
            else:
                start, stop = (max(row - first_row, 0) for row in (outputs.start, outputs.stop))
                views.append(rows[..., start : stop : outputs.step, :])
        return views


def matrix_weights(model: nn.Module) -> dict[str, MatrixWeight]:
    """The weights of a model that are matrices, by their names: weights of two dimensions in decoder layers, and stacks
    of experts; no embeddings, norms, biases, convolutions or single rows."""
    config = text_config(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, MatrixWeight] = {}
    for module in decoder_layers(model).modules():
        for own_name, parameter in module.named_parameters(recurse=False):
            name = names[id(parameter)]
            if name not in found and holds_matrices(module, own_name, parameter):
                is_transposed = is_stored_input_by_output(module, parameter)
                outputs = parameter.shape[-1 if is_transposed else -2]
                projection = name.split(".")[-2] if own_name == "weight" else own_name
                parts = matrix_outputs(config, module, projection, outputs)
                found[name] = MatrixWeight(parameter, parts, is_transposed)
    return found


def holds_matrices(module: nn.Module, own_name: str, parameter: nn.Parameter) -> bool:
    if not is_matrix(module, own_name, parameter) or min(parameter.shape[-2:]) == 1:  # one row, such as a gate's
        return False
    if parameter.dim() == 3:
        return not isinstance(module, nn.Conv1d)
    return parameter.dim() == 2 and own_name == "weight" and not isinstance(module, nn.Embedding)


def matrix_outputs(
    config: transformers.PretrainedConfig, module: nn.Module, projection: str, outputs: int
) -> tuple[range, ...]:
    """The outputs of each matrix in a projection."""
    if projection == "gate_up_proj" and not getattr(module, "is_concatenated", True):
        return range(0, outputs, 2), range(1, outputs, 2)
    sizes = [outputs]
    if projection == "gate_up_proj":
        sizes = [outputs // 2, outputs // 2]
    elif projection in FUSED_ATTENTION and config.model_type not in MIXED_BY_HEAD:
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        qkv_sizes = [heads * head_dim, key_heads * head_dim, key_heads * head_dim]
        if sum(qkv_sizes) == outputs:  # otherwise the layout is unknown
            sizes = qkv_sizes
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return tuple(range(end - size, end) for size, end in zip(sizes, ends, strict=True))


def is_stored_input_by_output(module: nn.Module, parameter: nn.Parameter) -> bool:
    """True for GPT-2's linears and the experts of some families: gate and up then have their outputs as columns, twice
    as many as down has rows."""
    if parameter.dim() == 2:
        return isinstance(module, transformers.pytorch_utils.Conv1D)
    up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if up is None or down is None or up.dim() != 3:
        return getattr(module, "is_transposed", False)
    return up.shape[2] == 2 * down.shape[1]

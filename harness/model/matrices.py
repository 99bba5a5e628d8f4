"""Matrices: which weights of a model are matrices that an optimizer may orthogonalize, and where each lies in its
parameter. A fused projection is several, a stack of experts one or two for each. Called by the optimizers' files."""

import dataclasses

import transformers
from torch import nn

from harness.model.weights import decoder_layers

# Projections whose outputs are queries, then keys, then values, and families in which others of that name mix them by
# head; those stay one matrix.
FUSED_ATTENTION = ("qkv_proj", "Wqkv", "c_attn")
MIXED_BY_HEAD = ("codegen", "gpt_bigcode", "minimax")


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A matrix inside a parameter of two dimensions or, of an expert, three.

    A linear's weight is stored output by input, so a row is a neuron; `is_transposed` is input by output.
    """

    parameter: int  # its place in a list of parameters
    length: int  # of the parameter's dimension 0, along which it is sharded
    rows: range  # of the last two dimensions
    columns: range
    expert: int | None = None
    is_transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), len(self.columns)

    @property
    def outputs_by_inputs(self) -> tuple[int, int]:
        return self.shape[::-1] if self.is_transposed else self.shape

    def of_parameter(self, index: int) -> "Matrix":
        """The same in another list of parameters."""
        return dataclasses.replace(self, parameter=index)

    def per_neuron(self, parameter_shape: tuple[int, ...]) -> "Matrix":
        """Where its neurons lie in a parameter that holds one number for each neuron (`neuron_shape`)."""
        neurons = self.columns if self.is_transposed else self.rows
        length = neuron_shape(parameter_shape, self.is_transposed)[0]
        return dataclasses.replace(self, length=length, rows=neurons, columns=range(1))


def neuron_shape(parameter_shape: tuple[int, ...], is_transposed: bool) -> tuple[int, ...]:
    """The shape of what holds one number for each neuron of a parameter."""
    *experts, rows, columns = parameter_shape
    return (*experts, columns if is_transposed else rows, 1)


def matrices_of_model(model: nn.Module) -> dict[str, list[Matrix]]:
    """The matrices of each parameter that has some, by the parameter's name: weights of two dimensions inside decoder
    layers, and stacks of experts. Embeddings, biases and convolutions are none."""
    layers = decoder_layers(model)
    config = model.config.get_text_config()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, list[Matrix]] = {}
    for module in layers.modules():
        for own_name, parameter in module.named_parameters(recurse=False):
            name = names[id(parameter)]
            if name not in found and is_weight_of_matrices(module, own_name, parameter):
                found[name] = split_weight(config, module, name, own_name, parameter, len(found))
    return found


def is_weight_of_matrices(module: nn.Module, own_name: str, parameter: nn.Parameter) -> bool:
    if parameter.dim() == 3:
        return not isinstance(module, nn.Conv1d) and "bias" not in own_name
    return parameter.dim() == 2 and own_name == "weight" and not isinstance(module, nn.Embedding)


def split_weight(config, module: nn.Module, name: str, own_name: str, parameter, index: int) -> list[Matrix]:
    """The matrices of one parameter."""
    *_, rows, columns = parameter.shape
    projection = name.split(".")[-2] if own_name == "weight" else own_name
    is_transposed = is_stored_input_by_output(module, parameter)
    outputs = columns if is_transposed else rows
    parts = [range(outputs)]
    if projection in FUSED_ATTENTION and config.model_type not in MIXED_BY_HEAD:
        parts = ranges_of(attention_sizes(config, outputs))
    elif projection == "gate_up_proj" and not getattr(module, "is_concatenated", True):
        parts = [range(0, outputs, 2), range(1, outputs, 2)]
    elif projection == "gate_up_proj":
        parts = ranges_of([outputs // 2, outputs // 2])
    experts = range(parameter.shape[0]) if parameter.dim() == 3 else [None]
    matrices = []
    for expert in experts:
        for part in parts:
            sides = (range(rows), part) if is_transposed else (part, range(columns))
            matrices.append(Matrix(index, parameter.shape[0], *sides, expert, is_transposed))
    return matrices


def is_stored_input_by_output(module: nn.Module, parameter: nn.Parameter) -> bool:
    """GPT-2's linears are, and the experts of some families: two thirds of such an expert's weights have the outputs
    of gate and up as columns, twice as many as its last third has rows."""
    if parameter.dim() == 2:
        return isinstance(module, transformers.pytorch_utils.Conv1D)
    up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if up is None or down is None or up.dim() != 3:
        return getattr(module, "is_transposed", False)
    return up.shape[2] == 2 * down.shape[1]


def attention_sizes(config, outputs: int) -> list[int]:
    """How many outputs are queries, keys and values, by the config; of another number of outputs it is not known, and
    they stay together."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    sizes = [heads * head_dim, key_heads * head_dim, key_heads * head_dim]
    return sizes if sum(sizes) == outputs else [outputs]


def ranges_of(sizes: list[int]) -> list[range]:
    """Ranges of these sizes, one after the other."""
    ranges, start = [], 0
    for size in sizes:
        ranges.append(range(start, start + size))
        start += size
    return ranges

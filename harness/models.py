"""Models: configs, tokenizers, attention kernels, float8 and pretrained weights, before anything is sharded. Called by
the script while it prepares and builds. It does not know meshes, optimizers or checkpoints."""

import dataclasses
import inspect
import json
import math
import os
import pathlib
import re
from collections.abc import Callable
from importlib.util import find_spec

import torch
import transformers
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import RemoteEntryNotFoundError
from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from safetensors import safe_open
from torch import nn
from torch.nn.attention import SDPBackend
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    conversion_mapping,
    masking_utils,
)
from transformers.integrations import sdpa_attention
from transformers.models.auto import tokenization_auto
from transformers.utils import is_flash_attn_3_available, is_flash_attn_4_available

import utils
from harness.base import versions
from harness.base.errors import UserError
from harness.base.hub import answer_from_cache_without_network
from harness.base.text import first_line
from harness.flags.rules import misfits_float8
from harness.flags.settings import ASSETS, PRESETS, Settings
from harness.job.terminal import is_first_rank

# A folder may name any class of transformers as its tokenizer's, and that class would ask on stdin whether to run the
# folder's code, whatever AutoTokenizer was told: no time to answer means that nobody is asked.
transformers.dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
any_class_from_name = tokenization_auto.tokenizer_class_from_name
use_gqa_in_sdpa = sdpa_attention.use_gqa_in_sdpa
MAX_TOKENS = 2**27  # of a microbatch: that many labels alone are 1 GiB, and none is ready before all of them are made
ONE_KERNEL = ("flash", "cudnn")  # choices of --attention that are sdpa with one of its kernels and no other
# What torch takes in the place of its own flash attention on a GPU of this major capability, if it is installed.
FLASH_KERNELS = {9: ("FA3", is_flash_attn_3_available), 10: ("FA4", is_flash_attn_4_available)}


def find_source(model: str) -> tuple[str, str]:
    """(where the config is, where weights and tokenizer are) of a preset, a local folder or a hub id."""
    if preset := PRESETS.get(model):
        return str(preset), json.loads(preset.read_text()).get("_name_or_path", str(preset.parent))
    path = pathlib.Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"--model {model}: the folder has no config.json")
        return str(path), str(path)
    if path.exists() or model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise UserError(f"--model {model}: no such folder")
    return model, model


def load_config(model: str):
    """The config of a preset, a local folder or a hub id."""
    source, _ = find_source(model)
    answer_from_cache_without_network(source)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds
        refuse_foreign_code(f"--model {model}", error)
        nowhere = f"not a preset ({', '.join(PRESETS)}), not a local folder, and not to be had from the hub"
        what = "its config.json cannot be used" if os.path.exists(source) else nowhere
        raise UserError(f"--model {model}: {what} ({first_line(error)})") from error
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UserError(f"--model {model}: {config.model_type} is no causal language model of transformers")
    if why := malformed(config.get_text_config()):
        raise UserError(f"--model {model}: its config.json cannot be used ({why})")
    if why := untrainable(config):
        raise UserError(f"--model {model}: {config.model_type} cannot be trained here: {why}")
    config.use_cache = False
    return config


def malformed(config) -> str:
    """What is wrong with the figures of a config, where transformers builds a model of them all the same; empty where
    nothing is."""
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value < 1:
            return f"{name} is {value}"
    heads, shared = getattr(config, "num_attention_heads", None), getattr(config, "num_key_value_heads", None)
    if isinstance(heads, int) and isinstance(shared, int) and (shared < 1 or heads % shared):
        return f"num_key_value_heads is {shared}, which does not divide {heads} attention heads"
    return ""


def choose_sequence_length(settings: Settings, config) -> int:
    """--sequence-length, by default 8192 or as many positions as the model has; a UserError where it has fewer and
    something is trained."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf
    length = settings.sequence_length or min(8192, positions)
    if length > positions and settings.num_steps:
        advice = f"give --sequence-length {positions} or less"
        raise UserError(f"--sequence-length {length}: {settings.model} has {positions} positions; {advice}")
    if settings.batch_size != "auto" and settings.batch_size * length > MAX_TOKENS:
        problem = f"{settings.batch_size * length:,} tokens in one microbatch are more than any device holds"
        raise UserError(f"--batch-size {settings.batch_size}: {problem}; give fewer than {MAX_TOKENS // length + 1:,}")
    return length


def refuse_foreign_code(what: str, error: Exception) -> None:
    """Raises a UserError if `error` is transformers' way to say that it would have to run the folder's code."""
    if "trust_remote_code" in str(error):
        reason = "it asks for code of its own (auto_map), which is never run"
        raise UserError(f"{what}: {reason}; choose one that transformers knows by itself") from error


def tokenizer_class_from_name(name: str) -> type | None:
    """transformers' tokenizer of that name; a ValueError where the name is that of anything else."""
    found = any_class_from_name(name)
    is_tokenizer = isinstance(found, type) and issubclass(found, transformers.PreTrainedTokenizerBase)
    if found is None or is_tokenizer or getattr(found, "is_dummy", False):  # a dummy says which package is missing
        return found
    raise ValueError(f"its tokenizer_class {name} is no tokenizer")


def untrainable(config) -> str:
    """Why a family would train wrong, or not on layers that are cut and have labels that are shifted already; empty
    where nothing says so (`loss.check_labels` and `make_real` refuse what shows only later)."""
    text, family = config.get_text_config(), AutoModelForCausalLM._model_mapping[type(config)]
    if "self.loss_function(" not in inspect.getsource(inspect.unwrap(family.forward)):
        return f"{family.__name__} computes a loss of its own, of labels that it may shift"
    reads = re.search(r"if .*is_decoder", inspect.getsource(inspect.getmodule(family)))  # some have it for nothing
    if reads and not getattr(text, "is_decoder", True):
        return "its tokens attend to later ones; set is_decoder to true in its config.json"
    if skipped := [name for name, value in vars(text).items() if name.endswith("layerdrop") and value]:
        return f"each rank would skip other layers; set {skipped[0]} to 0 in its config.json"
    return ""


def load_tokenizer(settings: Settings, config):
    """The tokenizer, its vocabulary checked against the model's; None where only synthetic tokens are read."""
    if settings.dataset == "synthetic" and not (settings.sample_prompt or settings.sample_prompts):
        return None
    source = settings.tokenizer or find_source(settings.model)[1]
    answer_from_cache_without_network(source)
    tokenization_auto.tokenizer_class_from_name = tokenizer_class_from_name
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds
        refuse_foreign_code(f"--tokenizer {source}", error)
        here = os.path.isdir(source)
        where = "the folder has no usable tokenizer" if here else "not a folder, and not to be had from the hub"
        synthetic = settings.dataset == "synthetic"
        without = "leave out the prompts" if synthetic else "use --dataset synthetic, which needs none"
        hint = f"give --tokenizer a folder ({ASSETS / 'demo'} has one), or {without}"
        if not here:
            hint = f"`hf auth login` where {source} is gated, or a network; else {hint}"
        if settings.tokenizer is None and settings.model in PRESETS:
            where += f"; the preset {settings.model} has its config alone here"
        raise UserError(f"--tokenizer {source}: {where} ({first_line(error)}); {hint}") from error
    vocabulary = config.get_text_config().vocab_size
    if (size := len(tokenizer)) > vocabulary:
        raise UserError(f"--tokenizer {source}: its vocabulary of {size} is larger than the model's {vocabulary}")
    return tokenizer


def read_generation_config(model: str) -> dict:
    """What `generate` does by default with the weights of a local folder or hub id: its generation_config.json or, as
    before there were such files, the fields of that kind in its config.json.

    Raises:
        OSError, ValueError: it cannot be had; it is no JSON object.
    """
    _, source = find_source(model)
    answer_from_cache_without_network(source)
    fields = GenerationConfig().to_dict().keys()
    for name in ("generation_config.json", "config.json"):
        path = pathlib.Path(source, name)
        if not os.path.isdir(source):
            try:
                path = pathlib.Path(hf_hub_download(source, name))
            except RemoteEntryNotFoundError:
                continue
        if path.exists():
            content = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(content, dict):
                raise ValueError(f"{name} is no JSON object")
            return {key: value for key, value in content.items() if name[0] == "g" or key in fields}
    return {}


def read_prompts(settings: Settings, config, tokenizer) -> list[str]:
    """The texts to be continued: those of --sample-prompt, then those of the file --sample-prompts, one a line."""
    prompts, path = [*(settings.sample_prompt or ())], settings.sample_prompts
    if path:
        try:
            lines = pathlib.Path(path).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is no UTF-8 text"
            raise UserError(f"--sample-prompts {path}: cannot be read ({why})") from error
        prompts += [line.strip() for line in lines if line.strip()]
        if not any(map(str.strip, lines)):
            raise UserError(f"--sample-prompts {path}: holds no prompt; give a file with one a line")
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    longest = max((len(tokenizer(prompt)["input_ids"]) for prompt in prompts), default=0)
    if longest and positions and longest + settings.sample_tokens > positions:
        limit = f"{settings.model}'s {positions} positions"
        raise UserError(f"--sample-tokens {settings.sample_tokens}: with the prompt more than {limit}")
    return prompts


def cudnn_may_give_nan(settings: Settings, config) -> bool:
    """Whether cuDNN's attention may give NaN as the gradient of queries: on a Hopper, with a mask that is more than
    causal, where the length is 64 modulo 128 (pytorch issue 196678)."""
    text = config.get_text_config()
    windows = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size")]
    masked = settings.document_mask or any(windows)
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    return masked and hopper and settings.sequence_length % 128 == 64


def choose_attention(settings: Settings, config) -> str:
    """The kernel for `--attention`, `auto` decided, torch's switches set for it; a UserError where it does not run."""
    attention, cuda = settings.attention, torch.cuda.is_available()
    without_cudnn = cudnn_may_give_nan(settings, config)
    if attention == "cudnn" and not (settings.plan or cuda):
        raise UserError("--attention cudnn: needs an NVIDIA GPU; use sdpa")
    if attention == "cudnn" and without_cudnn:
        length = settings.sequence_length
        why = f"on a Hopper its gradients may be NaN with a mask at {length} tokens, which is 64 modulo 128"
        raise UserError(f"--attention cudnn: {why}; use sdpa, or --sequence-length {length + 64}")
    if attention == "flash_attention_2" and not (find_spec("flash_attn") and cuda):
        raise UserError("--attention flash_attention_2: needs a GPU and the package flash-attn; use sdpa")
    if attention == "flex_attention" and not cuda:
        raise UserError("--attention flex_attention: torch trains with it on a GPU only; use sdpa")
    for kernel in ("flash", "mem_efficient", "cudnn", "math"):  # a plan runs on the CPU, which has not all of them
        allowed = settings.plan or attention not in ONE_KERNEL or kernel == attention
        allowed = allowed and not (kernel == "cudnn" and without_cudnn)
        getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(allowed)
    # On a GPU no fused kernel takes fp32 and heads that share keys: torch would compute all scores of a layer at once.
    shares = settings.precision != "fp32" or not (cuda or settings.plan)
    sdpa_attention.use_gqa_in_sdpa = use_gqa_in_sdpa if shares else lambda *_: False
    if attention != "auto":
        return attention
    kernel, installed = FLASH_KERNELS.get(torch.cuda.get_device_capability()[0] if cuda else 0, ("", None))
    if kernel in torch.nn.attention.list_flash_attention_impls() and installed():
        torch.nn.attention.activate_flash_attention_impl(kernel)  # in the place of torch's own flash attention
        torch.backends.cuda.enable_cudnn_sdp(False)  # which torch itself prefers on Hopper and Blackwell
    supported = AutoModelForCausalLM._model_mapping[type(config)]
    if settings.document_mask and cuda and supported._supports_flex_attn:
        return "flex_attention"  # it skips what is masked; the others compute it, and not by their fastest kernel
    return "sdpa" if supported._supports_sdpa else "eager"


def describe_attention(settings: Settings, config, device: str) -> str:
    """The attention implementation and, for torch's own, the kernel that it chooses for this model and device; a
    UserError where there is none."""
    if config._attn_implementation != "sdpa":
        return f"{config._attn_implementation} attention"
    try:
        text = config.get_text_config()
        heads = text.num_attention_heads
        sizes = heads, getattr(text, "num_key_value_heads", None) or heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    except Exception:  # some configs have no such figure, others one for each layer
        return "sdpa attention"
    length, dtype = settings.sequence_length, torch.float32 if settings.precision == "fp32" else torch.bfloat16
    query, key = (
        torch.empty(settings.batch_size, length, n, head_dim, dtype=dtype, device=device, requires_grad=True)
        for n in sizes
    )
    query, key = query.transpose(1, 2), key.transpose(1, 2)
    mask = torch.empty(1, 1, length, length, dtype=torch.bool, device=device) if settings.document_mask else None
    shared = query.shape != key.shape and sdpa_attention.use_gqa_in_sdpa(mask, key, key)
    key = key if shared else key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    options = {"is_causal": mask is None, "enable_gqa": shared}
    kernel = SDPBackend(torch._fused_sdp_choice(query, key, key, mask, **options)).name.lower()
    if kernel == "error":
        raise UserError(f"--attention {settings.attention}: torch's kernel does not take this model's heads; use sdpa")
    if kernel == "flash_attention":
        kernel = torch.nn.attention.current_flash_attention_impl() or kernel
    if cudnn_may_give_nan(settings, config):
        kernel += f", as cuDNN's gradients may be NaN with a mask at {length} tokens"
    return f"sdpa attention ({kernel})"


def on_meta(config, attention: str | None = None, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model without storage, with one of `--attention`'s kernels; by default with what transformers chooses."""
    # always given, None too: the config could name a kernel of the hub
    options = {"attn_implementation": "sdpa" if attention in ONE_KERNEL else attention, "trust_remote_code": False}
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
    except (ValueError, ImportError) as error:
        raise UserError(f"--attention {attention}: {first_line(error)}") from error
    except Exception as error:  # a negative size, an activation that nobody knows
        what = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"--model: transformers builds no model of its config.json ({what})") from error


def count_parameters(config) -> int:
    """Elements of all parameters, one that two modules share once."""
    return sum(parameter.numel() for parameter in on_meta(config).parameters())


def know_documents(model: nn.Module, name: str, document_mask: bool) -> None:
    """Tells transformers where documents begin, which it would find out by reading positions back from the device: a
    sync in every forward, or in every layer with flash_attention_2."""
    masking_utils.find_packed_sequence_indices = lambda ids: (ids == 0).cumsum(-1) if document_mask else None
    transformers.modeling_flash_attention_utils._is_packed_sequence = lambda position_ids, batch_size: False
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    takes_positions = "position_ids" in inspect.signature(type(model).forward).parameters
    if document_mask and not (takes_positions and kinds <= {"full_attention", "sliding_attention"}):
        raise UserError(f"--document-mask: {name} is more than attention over positions; leave the flag out")


def known_flops(model: nn.Module, sequence_length: int) -> tuple[int, str]:
    """FLOPs per token, 0 where no figure can be trusted, and what to say of them."""
    try:
        flops = utils.flops_per_token(model, sequence_length)
        return flops, f"{flops / 1e9:,.3f} GFLOP a token, counted by torch"
    except ValueError as error:
        return 0, f"FLOPs not known, so no MFU ({error})"


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The list of decoder layers: the outermost ModuleList with as many modules as the config has layers."""
    count = model.config.get_text_config().num_hidden_layers
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count}
    if not lists:
        raise UserError(f"--model: no list of {count} decoder layers found in {type(model).__name__}")
    return lists[min(lists, key=lambda name: name.count("."))]


def layer_period(config) -> tuple[nn.Module, int]:
    """The model on the meta device, and after how many layers its pattern repeats (SmolLM3: 4, one in four has no RoPE;
    the number of layers where nothing repeats)."""
    model, text = on_meta(config), config.get_text_config()
    layers = decoder_layers(model)
    lists = [value for value in vars(text).values() if isinstance(value, list) and len(value) == len(layers)]
    shapes = [[(name, p.shape) for name, p in layer.named_parameters()] for layer in layers]
    alike = [(shapes[index], *(value[index] for value in lists)) for index in range(len(layers))]
    periods = range(1, len(layers) // 3 + 1)
    return model, next((n for n in periods if alike[n:] == alike[:-n]), len(layers))


def use_liger(model: nn.Module) -> None:
    """Gives a model Liger's kernels for norms, SwiGLU and rotary positions, as Trainer does; the loss
    stays as it is. Called before anything wraps a layer's forward."""
    if not torch.cuda.is_available():
        raise UserError("--liger: its kernels need a GPU")
    if not find_spec("liger_kernel"):
        raise UserError("--liger: needs the package liger-kernel (pip install --no-deps liger-kernel)")
    from liger_kernel.transformers import monkey_patch

    kind = model.config.model_type
    if kind not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UserError(f"--liger: it has no kernels for {kind}")
    monkey_patch._apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=False)


def make_real(model: nn.Module, modules: list[nn.Module], device, weights, layer: int | None = None) -> None:
    """Gives the meta tensors of `modules` storage on `device` and their values: random, or read from `weights`.

    Parameters are drawn in fp32 and then rounded: in bf16 torch 2.11 draws others on a CPU, and coarser ones.
    """
    real: dict[torch.Tensor, torch.Tensor] = {}  # a tied parameter is one tensor under two names
    for module in modules:
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    if tensor not in real:
                        if isinstance(tensor, nn.Parameter):
                            drawn = torch.empty_like(tensor, device=device, dtype=torch.float32)
                            real[tensor] = nn.Parameter(drawn, requires_grad=tensor.requires_grad)
                        else:
                            real[tensor] = torch.empty_like(tensor, device=device)
                    tensors[name] = real[tensor]
    if weights:
        weights.load(layer, modules, device)
    wholes = [module for module in model.modules() if isinstance(module, transformers.PreTrainedModel)]
    owner = {part: whole for whole in wholes for part in whole.modules()}
    for module in reversed(modules):  # children before parents, as nn.Module.apply does; what was loaded stays
        owner[module]._init_weights(module)  # a part that is a model has rules of its own
    made = {id(tensor) for tensor in real.values()}
    for module in modules:
        for name, tensor in (module._parameters | module._buffers).items():
            if id(tensor) in made and not tensor._version and tensor.numel():  # nothing was written into it
                what = f"{type(module).__name__}.{name}"
                raise UserError(f"--model: {what} gets no value, from a checkpoint or when its layer is made by itself")
    for tensor, drawn in real.items():
        drawn.data = drawn.data.to(tensor.dtype)


def check_float8(settings: Settings) -> None:
    """Raises a UserError where --precision fp8 would not run, or compute wrong: the GPU has no float8 (Ada, Hopper,
    CDNA 3 and newer have it) and it is neither emulated nor planned; torchao is missing or old; the tokens do not fit.
    """
    if settings.precision != "fp8":
        return
    cuda = torch.cuda.is_available()
    has_float8 = cuda and (torch.version.hip or torch.cuda.get_device_capability() >= (8, 9))
    if not (has_float8 or settings.fp8_emulate or settings.plan):
        here = torch.cuda.get_device_name() if cuda else "a CPU"
        raise UserError(f"--precision fp8: needs a GPU with float8 (Ada, Hopper or newer), this is {here}; use bf16")
    if not find_spec("torchao"):
        raise UserError("--precision fp8: needs the package torchao (pip install torchao)")
    found, oldest = versions.installed("torchao"), ".".join(map(str, versions.OLDEST_TORCHAO))
    if versions.parts(found) < versions.OLDEST_TORCHAO:
        why = "its compiled casts may store NaN"
        raise UserError(f"--precision fp8: this is torchao {found}, {why}; install torchao {oldest} or newer")
    if settings.num_steps and (problem := misfits_float8(settings)):
        raise UserError(problem)


def takes_float8(module: nn.Module) -> bool:
    """Whether a module becomes a float8 linear: of one the tensor cores want both sizes in multiples of 16."""
    return isinstance(module, nn.Linear) and module.in_features % 16 == 0 and module.out_features % 16 == 0


def cast_to_float8(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As torchao casts. Compiled, it reads the weight and writes a byte for each element; eager it makes fp32 copies in
    between, 21 bytes of traffic for each element."""
    largest = torch.finfo(dtype).max
    return (weight.float() * scale).clamp(-largest, largest).to(dtype)


def cast_before_all_gather(compiled: bool) -> None:
    """Gives torchao's sharded weights, from now on, another way into FSDP2's all-gather than their own: one kernel
    where it is `compiled`, rows up to the size that each rank sends where the ranks do not divide them, and the scale
    that was found after the last step kept when --cpu-offload moves a weight to the device."""
    from torchao.float8.float8_utils import tensor_to_scale
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    cast = torch.compile(cast_to_float8) if compiled else cast_to_float8

    def to(weight, *args, **options):
        moved = torch.Tensor.to(weight, *args, **options)
        if moved is not weight and weight._precomputed_scale is not None:
            moved._precomputed_scale = weight._precomputed_scale.to(moved.device)
        return moved

    def fsdp_pre_all_gather(weight, mesh, outer_size, outer_stride, module, policy):
        scale, dtype, rows = weight._precomputed_scale, weight._dtype, -(-outer_size[0] // mesh.size())
        if scale is None:
            scale = tensor_to_scale(weight._tensor, dtype, reduce_amax=True, device_mesh=mesh)
        bits = cast(weight._tensor, scale, dtype)
        if len(bits) < rows:
            padded = bits.new_zeros(rows, *bits.shape[1:])
            padded[: len(bits)] = bits
            bits = padded
        return (bits,), (scale,)

    WeightWithDynamicFloat8CastTensor.to = to
    WeightWithDynamicFloat8CastTensor.fsdp_pre_all_gather = fsdp_pre_all_gather


def fp8_converter(recipe: str, emulate: bool, compiled: bool) -> Callable[[nn.Module], None]:
    """A function that swaps a module's linears for torchao's float8 ones, in place."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    config = dataclasses.replace(config, emulate=emulate, enable_fsdp_float8_all_gather=recipe == "tensorwise")
    if recipe == "tensorwise":
        cast_before_all_gather(compiled)

    def convert(layer: nn.Module) -> None:
        if not any(map(takes_float8, layer.modules())):
            why = "the decoder layers have no nn.Linear with sizes in multiples of 16"
            raise UserError(f"--precision fp8: {why}; use bf16")
        convert_to_float8_training(layer, config=config, module_filter_fn=lambda module, path: takes_float8(module))

    return convert


class PretrainedWeights:
    """The safetensors of a local folder or hub id, read one decoder layer at a time.

    transformers' own conversion rules are applied, so a checkpoint in another layout than the model's (experts stored
    one by one, say) loads as it does with from_pretrained.

    Raises:
        UserError: there are no safetensors, they cannot be read, or a weight of the model is not among them.
    """

    def __init__(self, model: nn.Module, layers: nn.ModuleList, source: str, dtype: torch.dtype):
        downloads_are_shown = is_first_rank() and not are_progress_bars_disabled()
        transformers.utils.logging.disable_progress_bar()  # of each layer; and with it those of downloads
        if downloads_are_shown:
            enable_progress_bars()
        self.model, self.source, self.dtype = model, source, dtype
        self.rules = conversion_mapping.get_model_conversion_mapping(model)
        loading = transformers.core_model_loading
        kinds = (loading.WeightRenaming, loading.WeightConverter)
        renamings, converters = ([rule for rule in self.rules if isinstance(rule, kind)] for kind in kinds)
        prefix, names = model.base_model_prefix, model.state_dict()
        path = next(path for path, module in model.named_modules() if module is layers)
        self.slices: dict[int | None, dict] = {}  # by decoder layer; None: embedding, final norm, head
        try:
            if not os.path.isdir(source):
                source = snapshot_download(source, allow_patterns=["*.safetensors", "*.json"])
            index = pathlib.Path(source, "model.safetensors.index.json")
            files = json.loads(index.read_text())["weight_map"].values() if index.exists() else ["model.safetensors"]
            for file in sorted(set(files)):
                if pathlib.PurePath(file).name != file:
                    raise ValueError(f"its index names {file}, which is not in the folder")
                tensors = safe_open(os.path.join(source, file), framework="pt")
                for key in tensors.keys():  # noqa: SIM118 - it is no dict
                    name, _ = loading.rename_source_key(key, renamings, converters, prefix, names)
                    layer = re.match(rf"{re.escape(path)}\.(\d+)\.", name)
                    self.slices.setdefault(layer and int(layer[1]), {})[key] = tensors.get_slice(key)
        except Exception as error:
            raise UserError(f"--init pretrained: no weights from {source} ({first_line(error)})") from error

    def load(self, layer: int | None, modules: list[nn.Module], device: torch.device) -> None:
        """Reads the tensors of one decoder layer (None: of all else) into the model's `modules`."""
        options = {"dtype": self.dtype, "weight_mapping": self.rules, "device_map": {"": device}}
        config = transformers.modeling_utils.LoadStateDictConfig(**options)
        tensors = self.slices.get(layer, {})
        transformers.core_model_loading.convert_and_load_state_dict_in_model(self.model, tensors, config)
        self.model.tie_weights()
        for path, module in self.model.named_modules():
            for name, weight in module.named_parameters(recurse=False) if module in modules else ():
                if not getattr(weight, "_is_hf_initialized", False):
                    missing = f"{path}.{name} of shape {tuple(weight.shape)}"
                    raise UserError(f"--init pretrained: {self.source} has no {missing}")

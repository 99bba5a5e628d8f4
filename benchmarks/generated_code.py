"""The code that the compiler generates for an H200, counted without one: kernels, launches and bytes of optimizer
updates and of a decoder layer in bf16 and float8. It measures no time.

python benchmarks/generated_code.py --model smollm3-3b --sequence-length 8192

It needs a CUDA build of torch, of which nothing runs: tensors are fake, and private parts of torch 2.11 are patched to
see a GPU. `VENV=.venv-floor ./setup.sh --floor` installs such a build.
"""

import argparse
import collections
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import torch
import torch._functorch.config
import torch.utils._pytree as pytree
import torch.utils._triton
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.device_interface import CudaInterface


class H200:
    name, major, minor, total_memory, multi_processor_count = "NVIDIA H200", 9, 0, 150 * 10**9, 132
    regs_per_multiprocessor, max_threads_per_multi_processor, warp_size = 65536, 2048, 32
    L2_cache_size, is_integrated, max_threads_per_block = 60 * 2**20, 0, 1024
    shared_memory_per_block, shared_memory_per_block_optin, shared_memory_per_multiprocessor = 49152, 232448, 233472


H200.gcnArchName = ""
torch.cuda.get_device_properties = lambda device=None: H200
torch.cuda.get_device_capability = lambda device=None: (9, 0)
torch.cuda.current_device, torch.cuda.device_count, torch.cuda._lazy_init = lambda: 0, lambda: 1, lambda: None
for holder in (CudaInterface, CudaInterface.Worker):
    holder.get_device_properties = staticmethod(lambda device=None: H200)
    holder.current_device = staticmethod(lambda: 0)
CudaInterface.is_available = staticmethod(lambda: True)
CudaInterface.get_compute_capability = staticmethod(lambda device=None: 90)
torch.utils._triton.has_triton = lambda: True
torch.utils._triton.triton_hash_with_backend = lambda: "none"
torch._functorch.config.force_non_lazy_backward_lowering = True

from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import metrics
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from harness.flags import PRESETS
from harness.model.optimizers import adamw, muon

ELEMENT_BYTES = {"*fp32": 4, "*bf16": 2}
Kernel = tuple[str, int]  # name, or the operator that is called; bytes that it reads and writes


def lower(graph: torch.fx.GraphModule, inputs: list) -> tuple[list[Kernel], str]:
    """The kernels of a graph in order, and the generated code."""
    mode = next(i for i in inputs if isinstance(i, torch.Tensor)).fake_mode

    def to_cuda(value):
        if not isinstance(value, torch.Tensor):
            return value
        with mode:
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cuda:0")

    for node in graph.graph.nodes:
        for key in {"val", "example_value"} & node.meta.keys():
            node.meta[key] = pytree.tree_map(to_cuda, node.meta[key])
        node.meta.pop("tensor_meta", None)
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda:0")}
    inputs = [to_cuda(i) for i in inputs]
    view_to_reshape(graph)
    with V.set_fake_mode(mode):
        post_grad_passes(graph, False)
        lowering = GraphLowering(graph, example_inputs=inputs, shape_env=mode.shape_env, is_inference=False)
        with V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()):
            lowering.run(*inputs)
            metrics.reset()
            code, _ = lowering.codegen()
            kernels = []
            for node in lowering.scheduler.nodes:
                name = "generated"
                if type(node).__name__ == "ExternKernelSchedulerNode":
                    name = str(getattr(node.node, "python_kernel_name", None) or getattr(node.node, "op_overload", ""))
                kernels.append((name, node.get_read_write_buffers_sizes()))
    return [kernel for kernel in kernels if kernel[1]], getattr(code, "value", code)


def update_counts(update, tensors: list[tuple], *options) -> tuple[int, int, float]:
    """(kernels, launches, bytes per element) of an elementwise update of equal tensors, from the generated code."""
    codes: list[str] = []

    def backend(graph, inputs):
        codes.append(lower(graph, inputs)[1])
        raise StopIteration

    aot = aot_autograd(
        inference_compiler=backend,
        fw_compiler=backend,
        keep_inference_input_mutations=True,
        decompositions=select_decomp_table(),
    )
    torch._dynamo.reset()
    try:
        torch.compile(update, backend=aot, fullgraph=True, dynamic=False)(tensors, *options)
    except Exception:
        if not codes:
            raise
    moved = 0
    launches = re.findall(r"^\s+(triton_\w+)\.run\(", codes[0], re.MULTILINE)
    sources = dict(re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", codes[0], re.DOTALL))
    for name in launches:
        dtypes = dict(re.findall(r"'(\w+)': '(\*\w+)'", sources[name]))
        whole = re.findall(r"tl\.(?:load|store)\((\w+) \+ \(x\d\)", sources[name])
        moved += sum(ELEMENT_BYTES[dtypes[pointer]] for pointer in whole)
    return len(sources), len(launches), moved / len(tensors)


def print_updates() -> None:
    fp32, bf16 = torch.float32, torch.bfloat16
    scale, skip, rate, shrinks_to = (torch.empty(()) for _ in range(4))

    def tensors(*dtypes: torch.dtype) -> list[tuple]:
        return [tuple(torch.empty(2**22, dtype=dtype) for dtype in dtypes) for _ in range(adamw.GROUP)]

    betas = 1e-8, 0.9, 0.95
    for name, moments in (("adamw", fp32), ("adamw-bf16", bf16)):
        rows = [(*row, torch.empty(())) for row in tensors(fp32, fp32, moments, moments)]
        print_counts(name, update_counts(adamw.update, rows, scale, skip, rate, shrinks_to, *betas))
    print_counts("muon, momenta", update_counts(muon.move_momenta, tensors(fp32, fp32, bf16), scale, skip))
    print_counts("muon, weights", update_counts(muon.add_updates, tensors(fp32, bf16), rate, shrinks_to, skip))


def print_counts(name: str, counts: tuple[int, int, float]) -> None:
    kernels, launches, moved = counts
    print(f"{name:16} {kernels} kernel, {launches} launches for {adamw.GROUP} tensors, {moved:g} bytes per element")


def print_step(model) -> None:
    """Compiled calls of AdamW for the model on one rank, and FLOPs of Muon's iterations."""
    rows = [(parameter.view(-1),) for parameter in model.parameters() if parameter.numel() >= adamw.MIN_COMPILED]
    calls = sum(1 for _ in adamw.groups_of_equal_size(rows))
    total = sum(1 for _ in model.parameters())
    print(f"adamw            {calls} compiled calls for {len(rows)} of {total} tensors; torch's kernel has the others")
    for name, ratio in (("on the matrices", float("inf")), ("on Gram matrices", muon.newton_schulz.GRAM_RATIO)):
        muon.newton_schulz.GRAM_RATIO = ratio
        muon.newton_schulz.product_dtype = lambda x: x.dtype
        with FlopCounterMode(display=False) as counter:
            for weight in muon.matrix_weights(model).values():
                for matrix in weight.split(weight.parameter.detach()):
                    muon.newton_schulz.orthogonalize(matrix[None])
        print(f"muon             {counter.get_total_flops() / 1e12:.1f} TFLOP, iterating {name} where it may")


def print_layer(config, recipe: str | None, length: int) -> None:
    """Kernels and bytes of the first decoder layer. Its float8 weights are cast in the layer, not before the gather."""
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    layer_type = type(whole.model.layers[0])
    graphs: list[torch.fx.GraphModule] = []

    def partition(*args, **options):
        graphs.extend(min_cut_rematerialization_partition(*args, **options))
        return tuple(graphs)

    def stop(graph, inputs):
        raise StopIteration

    torch.set_default_dtype(torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        layer = layer_type(config, 0)
        if recipe:
            from torchao.float8 import Float8LinearConfig, _auto_filter_for_recipe, convert_to_float8_training

            takes = _auto_filter_for_recipe(recipe, filter_fqns=[])  # as harness/model/float8.py
            own = Float8LinearConfig.from_recipe_name(recipe)
            convert_to_float8_training(layer, config=own, module_filter_fn=takes)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        hidden = torch.randn(1, length, config.hidden_size, requires_grad=True)
        rotary = [torch.randn(1, length, head_dim) for _ in range(2)]
        names, parameters = zip(*layer.named_parameters(), strict=True)

        def forward(hidden, cos, sin, *parameters):
            options = {"position_embeddings": (cos, sin)}
            return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (hidden,), options)

        compiled = aot_function(
            forward, fw_compiler=stop, bw_compiler=stop, partition_fn=partition, decompositions=select_decomp_table()
        )
        try:
            compiled(hidden, *rotary, *parameters)
        except (RuntimeError, StopIteration):
            if not graphs:
                raise
        for phase, graph in zip(("forward", "backward"), graphs, strict=True):
            inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
            kernels, _ = lower(graph, inputs)
            generated = [size for name, size in kernels if name == "generated"]
            others = collections.Counter(name.split(".")[-1].lstrip("_") for name, _ in kernels if name != "generated")
            texts = [f"{len(generated)} generated kernels, {sum(generated) / 1e6:,.0f} MB"]
            texts += [f"{count} {name}" for name, count in others.items() if "mm" in name]
            print(f"layer, {recipe or 'bf16':10} {phase:8} {'; '.join(texts)}")
    torch.set_default_dtype(torch.float32)


def cudnn(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **_):
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    return attend(query, key, value, None, True, 0.0, True, False, scale=scaling)[0].transpose(1, 2).contiguous(), None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm3-3b", choices=sorted(PRESETS), help="a dense preset [smollm3-3b]")
    parser.add_argument("--sequence-length", type=int, default=8192, help="[8192]")
    args = parser.parse_args()
    ALL_ATTENTION_FUNCTIONS.register("cudnn_only", cudnn)
    config = AutoConfig.from_pretrained(PRESETS[args.model])
    config._attn_implementation = "cudnn_only"
    print(f"torch {torch.__version__}, {args.model}, batch 1 x {args.sequence_length}, generated for an H200")
    with FakeTensorMode(allow_non_fake_inputs=True):
        print_updates()
    with torch.device("meta"):
        print_step(AutoModelForCausalLM.from_config(config))
    for recipe in (None, "tensorwise", "rowwise"):
        print_layer(config, recipe, args.sequence_length)


if __name__ == "__main__":
    main()

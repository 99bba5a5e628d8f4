"""torchao's AdamW with 8-bit states. Its update gets local tensors: compiled with DTensors it ends with SIGSEGV on
float8 weights and with a compiler error on bf16 weights."""

from typing import Any

import torch
import torch._dynamo.utils  # private: the recompile limit has no public name

from harness import flags
from harness.model.optimization import OptimizerKind, local


def build(groups: list[dict], settings: flags.Settings) -> torch.optim.Optimizer:
    return adamw8bit()(groups, lr=settings.lr, betas=settings.betas)


def adamw8bit() -> Any:
    """The class, made on the first call: torchao is imported only if it is used."""
    from torchao.optim import AdamW8bit as Torchaos
    from torchao.optim.adam import single_param_adam
    from torchao.optim.subclass_8bit import OptimState8bit

    class AdamW8bit(Torchaos):
        @torch.no_grad()
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.update = torch.compile(single_param_adam, fullgraph=True, dynamic=False)
            for group in self.param_groups:
                for parameter in group["params"]:
                    # private: torchao makes its states in the first step, too late to load a checkpoint into them
                    exp_avg, exp_avg_sq = (self._new_buffer(parameter, signed) for signed in (True, False))
                    self.state[parameter] = {"step": torch.tensor(0.0), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}

        @staticmethod
        def _subclass_zeros(tensor: torch.Tensor, signed: bool, block_size: int) -> torch.Tensor:
            # fp32, in which the update computes, for bf16 weights too: torch cannot compile a view of another dtype
            return OptimState8bit.zeros(tensor.shape, signed, block_size, tensor.device, dtype=torch.float32)

        @torch.no_grad()
        def step(self) -> None:
            # private: the update is compiled for each shape, and the recompile limit has no public name
            with torch._dynamo.utils.disable_cache_limit():
                for group in self.param_groups:
                    options = group["lr"], *group["betas"], group["weight_decay"], group["eps"]
                    for parameter in group["params"]:
                        if parameter.grad is None:
                            continue
                        state = self.state[parameter]
                        state["step"] += 1
                        tensors = local(parameter), local(parameter.grad), state["step"]
                        moments = local(state["exp_avg"]), local(state["exp_avg_sq"]), None
                        self.update(*tensors, *moments, *options, self.is_adamw, self.bf16_stochastic_round)

    return AdamW8bit


def compute_tables() -> None:
    """Compute torchao's code tables from real tensors, which a plan lacks; torchao caches them."""
    from torchao.optim import subclass_8bit

    subclass_8bit.get_qmap_signed()
    subclass_8bit.get_qmap_unsigned()


OPTIMIZER = OptimizerKind(build, package="torchao", stands_in_for=("adamw", "adamw-bf16"), before_plan=compute_tables)

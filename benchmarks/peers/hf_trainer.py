"""transformers' Trainer: bf16 autocast, Liger's kernels or torch.compile, accelerate's FSDP2 on several GPUs, DDP on
several CPU ranks; with --strategy fsdp2 transformers' own FSDP2, which shards a folder's weights as it loads them.
AdamW is Trainer's; Muon with AdamW is one optimizer passed to it."""

import argparse
import tempfile
from importlib.util import find_spec

import torch
import torch.distributed as dist
from common import Clock, build_model, build_optimizers, build_windows, device, leave, make_parser, world_of_one
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.distributed import DistributedConfig

parser = make_parser(__doc__)
parser.add_argument("--strategy", choices=["default", "fsdp2"], default="default")
cuda = device().type == "cuda"
parser.add_argument(
    "--liger",
    action=argparse.BooleanOptionalAction,
    default=cuda and bool(find_spec("liger_kernel")),
    help="Liger's kernels, eager, as torch.compile fails in one of them [on a GPU, where they are installed]",
)
args = parser.parse_args()
if args.liger and not (cuda and find_spec("liger_kernel")):
    parser.error("--liger: needs a GPU and the package liger-kernel")
args.compile = args.compile and not args.liger
if args.strategy == "fsdp2":
    world_of_one()
    dist.init_process_group("nccl" if device().type == "cuda" else "gloo")
    shards_of = DistributedConfig(fsdp_size=dist.get_world_size(), fsdp_mixed_precision=args.precision == "bf16")
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32, attn_implementation="sdpa", distributed_config=shards_of
    ).train()
    model.config.use_cache = False
else:
    model = build_model(args)
clock = Clock(args, model)
shards = clock.world > 1 and cuda and args.strategy == "default"


class OneOptimizer(torch.optim.Optimizer):
    """Muon and AdamW as one optimizer, for Trainer with a constant learning rate and no resume."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]):
        self.optimizers = optimizers
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})

    def step(self, closure=None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


class TimedTrainer(Trainer):
    def compute_loss(self, *args, **kwargs):
        result = super().compute_loss(*args, **kwargs)
        self.newest_loss = (result[0] if isinstance(result, tuple) else result).detach()
        return result


class Steps(TrainerCallback):
    def on_step_end(self, *_, **__):
        clock.step(trainer.newest_loss, liger=args.liger, compiled=args.compile, precision=args.precision)


with tempfile.TemporaryDirectory() as folder:
    settings = TrainingArguments(
        folder,
        max_steps=args.num_steps,
        per_device_train_batch_size=args.batch_size,
        bf16=args.precision == "bf16",
        torch_compile=args.compile,
        use_liger_kernel=args.liger,
        optim="adamw_torch_fused",
        fsdp=True if shards else None,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": model._no_split_modules} if shards else None,
        use_cpu=not cuda,
        remove_unused_columns=False,  # the model passes shift_labels to its loss
        learning_rate=3e-4,
        lr_scheduler_type="constant",
        weight_decay=0.1,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        train_sampling_strategy="sequential",
        dataloader_num_workers=int(cuda),
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    data = build_windows(args, model.config.vocab_size)
    optimizer = OneOptimizer(build_optimizers(args, model)) if args.optimizer == "muon" else None
    trainer = TimedTrainer(
        model=model, args=settings, train_dataset=data, callbacks=[Steps()], optimizers=(optimizer, None)
    )
    trainer.train()
leave()

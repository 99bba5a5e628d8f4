"""transformers' Trainer: bf16 autocast, torch.compile, Liger kernels where installed, FSDP2 on several GPUs."""

import tempfile
from importlib.util import find_spec

from common import Clock, RandomTokens, build_model, device, leave, parse_args
from transformers import Trainer, TrainerCallback, TrainingArguments

args = parse_args(__doc__)
model = build_model(args)
clock = Clock(args, model)
liger = bool(find_spec("liger_kernel")) and device().type == "cuda"


class TimedTrainer(Trainer):
    def compute_loss(self, *args, **kwargs):
        result = super().compute_loss(*args, **kwargs)
        self.newest_loss = (result[0] if isinstance(result, tuple) else result).detach()
        return result


class Steps(TrainerCallback):
    def on_step_end(self, *_, **__):
        clock.step(trainer.newest_loss, liger="yes" if liger else "not installed", precision="autocast, fp32 weights")


with tempfile.TemporaryDirectory() as folder:
    settings = TrainingArguments(
        folder,
        max_steps=args.num_steps,
        per_device_train_batch_size=args.batch_size,
        bf16=True,
        torch_compile=args.compile,
        use_liger_kernel=liger,
        optim="adamw_torch_fused",
        fsdp=True if clock.world > 1 else None,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": model._no_split_modules}
        if clock.world > 1
        else None,
        use_cpu=device().type == "cpu",
        dataloader_num_workers=1,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    data = RandomTokens(args, model.config.vocab_size)
    trainer = TimedTrainer(model=model, args=settings, train_dataset=data, callbacks=[Steps()])
    trainer.train()
leave()

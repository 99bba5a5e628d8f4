"""Startup: what the script does before its heavy imports, which take seconds, warn, and can be interrupted too."""

import gc
import logging
import os
import sys
import warnings

from harness import flags
from harness.job import host, signals, terminal

NOISY_LOGGERS = ("torchao", "torch.utils._pytree", "torch._higher_order_ops", "transformers", "accelerate")


def begin(settings: flags.Settings) -> None:
    """Listens to signals, and prepares the threads and the environment, by which torch is loaded."""
    signals.listen(settings)
    if not settings.json:  # a plan as JSON is all that stdout has
        terminal.say(f"train_fsdp {settings.model}; loading torch")
    host.set_threads(settings)
    if not sys.warnoptions:  # `python -W default train_fsdp.py` shows all warnings
        silence_libraries()
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the name before torch 2.9, which the new one would override
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("WANDB_SILENT", "true")
    gc.disable()  # until `World`: imports make no garbage, and looking for it takes a fifth of their time


def silence_libraries() -> None:
    """Turns off the warnings of libraries, in this process and in those that it starts."""
    warnings.filterwarnings("ignore")
    os.environ |= {"PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error", "KINETO_LOG_LEVEL": "6"}
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost store prints 30 lines of warnings otherwise
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)

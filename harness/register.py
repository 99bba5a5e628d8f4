"""Register: what a file of --import may add, to the tables of the program's own entries. docs/OWN.md has examples.

    from harness import register

    register.dataset("squares", records)               --dataset squares
    register.schedule("triangle", factor)              --lr-scheduler triangle
    register.optimizer("sgd", OptimizerKind(build))    --optimizer sgd
    register.metric("weight_norm", function)           logged by every run with this file
    register.loss_term("z_loss", function)             trained with the loss of every run with this file

An architecture is registered with transformers: `AutoConfig.register` and `AutoModelForCausalLM.register`. Every rank
runs the file. A name that exists raises UserError.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from harness import base, flags, report
from harness import model as models

SPLITS = ("train", "validation", "test", "none")  # values of --dataset-split and --eval-split


def dataset(name: str, records: Callable[[], Iterable[Any]], version: str = "", limit: int | None = None) -> None:
    """Add a data set. It is written once into the cache, as JSON lines, and read as that file.

    Args:
        records: yields texts, lists of token ids, or dicts with the fields of a line of JSON (docs/DATA.md); the same
            ones in each call.
        version: another one than before, or another content of the --import files, writes the records again.
        limit: number of records to take, for an endless function; None takes all.
    """

    def read() -> Iterator[Any]:
        with blaming_file():
            yield from records()

    if name in SPLITS or (name not in flags.DATASETS and flags.is_eval_dataset(name)):
        raise base.UserError(f"dataset {name}: the name is that of a split or a file; choose another one")
    if limit is not None and not (isinstance(limit, int) and limit > 0):
        raise base.UserError(f"dataset {name}: limit is {limit!r}; give a positive integer")
    add(flags.DATASETS, name, flags.Dataset(read, version, limit), "dataset", ("demo", "synthetic"))


def schedule(name: str, factor: Callable[[int, int, int], float]) -> None:
    """Add a learning-rate schedule. `factor(step, steps, warmup)` is what --lr is multiplied with after `step` of
    `steps` optimizer steps; `warmup` is --warmup-steps. A resume calls it with its step: it keeps nothing between
    calls."""

    @blaming_file()
    def checked(step: int, steps: int, warmup: int) -> float:
        value = factor(step, steps, warmup)
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise base.UserError(f"schedule {name}: it gave no number ({base.first_line(error)})") from error

    add(flags.SCHEDULES, name, flags.Schedule(factor=checked), "schedule")


def optimizer(name: str, kind: models.OptimizerKind) -> None:
    """Add an optimizer, as the files of harness/model/optimizers/ have it."""
    if not isinstance(kind, models.OptimizerKind):
        found = type(kind).__name__
        raise base.UserError(f"optimizer {name}: {found} instead of an OptimizerKind; give OptimizerKind(build)")
    add(flags.OPTIMIZERS, name, flags.Optimizer("", kind=kind), "optimizer")


def metric(
    name: str,
    function: Callable[[nn.Module, report.StepResult], float | torch.Tensor],
    reduce: str = "mean",
    unit: str = "",
    description: str = "",
    on_console: bool = False,
) -> None:
    """Add a metric of log lines.

    Args:
        function: takes the model, whose parameters are DTensors and have no gradients any more, and this rank's result
            of the step; it returns a number. Every rank calls it, so it may use collectives.
        reduce: over the ranks, one of `report.REDUCTIONS`.
        on_console: True to print it in the console's lines too.
    """
    if reduce not in report.REDUCTIONS:
        raise base.UserError(f"metric {name}: no reduction {reduce!r}; give one of {', '.join(report.REDUCTIONS)}")
    row = report.Metric(name, f"train/{name}", unit, description, chart=name, on_console=on_console)
    add_row("metric", row._replace(function=blaming_file()(function), reduce=reduce))


def loss_term(
    name: str,
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    description: str = "",
    on_console: bool = False,
) -> None:
    """Add a term to the training loss, logged by its name. `function(logits, target)` takes fp32 (tokens, vocab) and
    (tokens, 1), and returns each token's value, fp32 (tokens,), whose mean over the trained tokens is added."""
    add_row("loss term", report.Metric(name, f"train/{name}", "", description, chart=name, on_console=on_console))
    models.TERMS[name] = function


def add_row(kind: str, row: report.Metric) -> None:
    if not row.key.isidentifier():  # Prometheus takes no other characters
        raise base.UserError(f"{kind} {row.key}: give a name of letters, digits and _")
    add(report.METRICS, row.key, row, kind, report.RESERVED_KEYS)


def add(table: dict[str, Any], name: str, row: object, kind: str, reserved: tuple[str, ...] = ()) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise base.UserError(f"{kind} {name!r}: give a name of letters, digits, _, . and -")
    if name in table or name in reserved:
        raise base.UserError(f"{kind} {name}: the name exists already; choose another one")
    table[name] = row
    flags.REGISTERED.append(f"{kind} {name}")


@contextlib.contextmanager
def blaming_file() -> Iterator[None]:
    """Raise errors inside as UserErrors of the --import file. Also a decorator."""
    try:
        yield
    except Exception as error:
        raise flags.describe_fault(error, base.one_or_more(flags.IMPORTED)) from error

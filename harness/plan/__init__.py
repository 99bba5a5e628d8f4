"""Plan: what a configuration will need and give, without a GPU: one step on fake tensors, a GPU's rates, time, memory,
cost, and what fits or is faster. `print_plan` is --plan, `measure_device` --measure, `resolve` decides what the flags
left open, `choose_batch_size` and `planning_in_background` plan a run that trains."""

from harness.base import doors

__getattr__, __all__ = doors.open_door(
    __name__,
    {
        "predict": "Recipe",
        "resolving": "resolve",
        "planning": "print_plan make_plan",
        "search": "memory_advice",
        "measure": "measure_device",
        "own_plan": "planning_in_background predicted_figures",
    },
)

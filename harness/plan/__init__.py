"""Plan: predict memory, time and cost of a configuration without a GPU, from one step on fake tensors and a GPU's
rates, and find what fits or is faster. `print_plan` is --plan; `choose_batch_size` and `planning_in_background` plan a
run that trains."""

from harness.plan.own_plan import choose_batch_size, planning_in_background, plans_itself, predicted_metrics
from harness.plan.planning import make_plan, print_plan
from harness.plan.recipe import Recipe
from harness.plan.search import memory_advice

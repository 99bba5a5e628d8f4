"""Plan: what a configuration will need and give: one step on fake tensors, rates of a GPU, time, memory, cost, and the
search for something faster."""

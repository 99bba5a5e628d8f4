"""Newton-Schulz: a stack of matrices made orthogonal by a few matrix products."""

import torch

from harness.model.precision import cpu_multiplies_bf16

DTYPE = torch.bfloat16  # of the iteration, and of what ranks send each other for it; tests compute in fp32
EPS = 1e-7  # torch.optim.Muon's
# a, b, c of a step's polynomial a x + b x^3 + c x^5 of the singular values. Keller Jordan's, which torch.optim.Muon has
# too: https://kellerjordan.github.io/posts/muon/
POLYNOMIAL = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Matrices (count, rows, columns) with their singular values moved to about 1, in DTYPE; the singular vectors stay.

    Where the rows are more, it works on the transposed matrices: its products are then as small as they can be.
    """
    _, rows, columns = matrices.shape
    x = matrices.to(DTYPE)
    if rows > columns:
        x = x.mT
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    exact = dtype_of_products(x)
    a, b, c = POLYNOMIAL
    for _ in range(ITERATIONS):
        wide = x.to(exact)
        gram = (wide @ wide.mT).to(DTYPE).to(exact)
        odd = torch.baddbmm(gram, gram, gram, beta=b, alpha=c).to(DTYPE).to(exact)
        x = torch.baddbmm(wide, odd, wide, beta=a).to(DTYPE)
    return x.mT if rows > columns else x


def dtype_of_products(x: torch.Tensor) -> torch.dtype:
    """That of `x`, but fp32 on a CPU without instructions for bf16, where bf16 may take fifty times as long: a GPU sums
    up products of bf16 in fp32 too, so the results, rounded to bf16, are the same but for the order of the sums. The
    plan of a GPU replaces this, as its tensors are on the CPU."""
    return torch.float32 if x.device.type == "cpu" and not cpu_multiplies_bf16() else x.dtype

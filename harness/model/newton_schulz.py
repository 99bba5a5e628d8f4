"""Newton-Schulz: orthogonalizes a stack of matrices by a few matrix products."""

import torch

from harness.model.precision import cpu_multiplies_bf16

DTYPE = torch.bfloat16  # dtype of the iteration and of the tensors that ranks exchange for it; tests use fp32
EPS = 1e-7  # torch.optim.Muon's
# a, b, c of a step's polynomial a x + b x^3 + c x^5 of the singular values. Keller Jordan's, as in torch.optim.Muon:
# https://kellerjordan.github.io/posts/muon/
POLYNOMIAL = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Matrices (count, rows, columns) with their singular values moved to about 1, in DTYPE; the singular vectors stay.

    With more rows than columns it works on the transposed matrices, which makes its products smaller.
    """
    _, rows, columns = matrices.shape
    x = matrices.to(DTYPE)
    if rows > columns:
        x = x.mT
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    exact = product_dtype(x)
    a, b, c = POLYNOMIAL
    for _ in range(ITERATIONS):
        wide = x.to(exact)
        gram = (wide @ wide.mT).to(DTYPE).to(exact)
        odd = torch.baddbmm(gram, gram, gram, beta=b, alpha=c).to(DTYPE).to(exact)
        x = torch.baddbmm(wide, odd, wide, beta=a).to(DTYPE)
    return x.mT if rows > columns else x


def product_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of `x`, but fp32 on a CPU without bf16 instructions, on which bf16 may take fifty times as long. A GPU
    sums products of bf16 in fp32 too, so results rounded to bf16 differ by the order of the sums only. The plan of a
    GPU replaces this function, as its tensors are on the CPU."""
    return torch.float32 if x.device.type == "cpu" and not cpu_multiplies_bf16() else x.dtype

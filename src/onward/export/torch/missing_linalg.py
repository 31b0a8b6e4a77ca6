"""Linear algebra that exporters lack or write wrongly, in functions that they know.

`patches.traceable` puts them where modules look them up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from onward.errors import ExportError

# Elimination is written out step by step.
_LARGEST_MATRIX = 32


def _require_small(result: str, matrices: torch.Tensor) -> int:
    size = int(matrices.shape[-1])
    if size > _LARGEST_MATRIX:
        raise ExportError(
            f"{result} of {size} x {size} matrices cannot be exported: {_LARGEST_MATRIX} rows are the most"
        )
    return size


_product = torch.matmul


def _matmul(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A matrix times a vector as a matrix of one column: onnxruntime errs on transposed matrices and vectors."""
    if self.dim() > 1 and other.dim() == 1:
        return _product(self, other.unsqueeze(-1)).squeeze(-1)
    return _product(self, other)


def _adjoint(self: torch.Tensor) -> torch.Tensor:
    """The last two axes exchanged, and conjugated where there is something to conjugate."""
    return self.transpose(-2, -1).conj() if self.is_complex() else self.transpose(-2, -1)


def _transposed(self: torch.Tensor) -> torch.Tensor:
    return self.transpose(-2, -1)


def _vdot(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Σ x·y of two vectors."""
    if input.is_complex():
        raise ExportError("vdot of complex numbers cannot be exported")
    return (input * other).sum()


def _inv(A: torch.Tensor, **unused: Any) -> torch.Tensor:
    """X with A·X = 1: elimination with pivots, then 2X − X·A·X, which has the inverse's own gradient.

    The elimination passes no gradient: d(2X − X·A·X) = −X·dA·X is that of A⁻¹, and the step refines X besides. A second
    step makes second derivatives right too.
    """
    if A.dim() == 2:
        return _inv(A.unsqueeze(0)).squeeze(0)
    size = _require_small("the inverse", A)
    if A.shape[-2] != size:
        raise ExportError(f"an inverse of matrices of shape {tuple(A.shape[-2:])} does not exist")
    matrix = A.detach()
    unit = torch.eye(size, dtype=A.dtype)
    rows = torch.cat([matrix, torch.zeros_like(matrix) + unit], -1)
    for column in range(size):
        below = rows[..., column:, column].abs()
        pick = torch.cat([torch.zeros_like(rows[..., :column, column]), below], -1).argmax(-1)
        chosen = F.one_hot(pick, size).to(A.dtype)
        own = torch.zeros_like(chosen) + unit[column]
        # exchange two rows: the chosen one, and the one in its place
        pivot = (rows * chosen.unsqueeze(-1)).sum(-2, keepdim=True)
        here = (rows * own.unsqueeze(-1)).sum(-2, keepdim=True)
        rows = torch.where((chosen > 0).unsqueeze(-1), here, rows)
        rows = torch.where((own > 0).unsqueeze(-1), pivot, rows)
        scaled = pivot / pivot[..., column : column + 1]
        factor = rows[..., column : column + 1] * (1 - own).unsqueeze(-1)
        rows = torch.where((own > 0).unsqueeze(-1), scaled, rows - factor * scaled)
    inverse = rows[..., size:].detach()
    for _ in range(2):
        inverse = 2 * inverse - inverse @ A @ inverse
    return inverse


def _solve(A: torch.Tensor, B: torch.Tensor, *, left: bool = True, **unused: Any) -> torch.Tensor:
    """X with A·X = B"""
    inverse = _inv(A)
    if not left:
        return B @ inverse
    if B.dim() == A.dim() - 1 and B.shape == A.shape[:-1]:
        return (inverse @ B.unsqueeze(-1)).squeeze(-1)
    return inverse @ B


def _cholesky(input: torch.Tensor, upper: bool = False, **unused: Any) -> torch.Tensor:
    """L with L·Lᵀ = A, column by column."""
    size = _require_small("the Cholesky factor", input)
    columns: list[torch.Tensor] = []
    for index in range(size):
        remainder = input[..., index]
        for column in columns:
            remainder = remainder - column * column[..., index : index + 1]
        below = (torch.arange(size) >= index).to(input.dtype)
        columns.append(remainder * below / remainder[..., index : index + 1].sqrt())
    factor = torch.stack(columns, -1)
    return factor.transpose(-2, -1) if upper else factor


def _cholesky_solve(B: torch.Tensor, L: torch.Tensor, upper: bool = False) -> torch.Tensor:
    """X with L·Lᵀ·X = B"""
    return _inv(L.transpose(-2, -1) @ L if upper else L @ L.transpose(-2, -1)) @ B


def _slogdet(A: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    determinant = torch.det(A)
    return determinant.sign(), determinant.abs().log()


def _cov(
    self: torch.Tensor, *, correction: int = 1, fweights: Any = None, aweights: Any = None
) -> torch.Tensor:
    """Covariances of the rows."""
    if fweights is not None or aweights is not None:
        raise ExportError("cov with weights cannot be exported: weight the rows before it")
    x = self.unsqueeze(0) if self.dim() < 2 else self
    centred = x - x.mean(1, keepdim=True)
    covariance = centred @ centred.transpose(0, 1) / (x.shape[1] - correction)
    return covariance.reshape(()) if self.dim() < 2 else covariance


def _corrcoef(self: torch.Tensor) -> torch.Tensor:
    """Covariances over the spreads of both rows, within −1 and 1."""
    covariance = _cov(self)
    spread = covariance.diagonal().sqrt()
    return (covariance / spread.unsqueeze(1) / spread.unsqueeze(0)).clamp(-1, 1)


def _vander(x: torch.Tensor, N: int | None = None, increasing: bool = False) -> torch.Tensor:
    """Powers of the elements as columns."""
    count = int(x.shape[-1]) if N is None else N
    powers = [torch.ones_like(x)]
    for _ in range(count - 1):
        powers.append(powers[-1] * x)
    return torch.stack(powers[:count] if increasing else powers[:count][::-1], -1)


def _cdist(
    x1: torch.Tensor, x2: torch.Tensor, p: float = 2.0, compute_mode: str | None = None
) -> torch.Tensor:
    """Distances of all pairs of rows; the gradient of a distance of zero is zero, as torch's is."""
    apart = x1.unsqueeze(-2) - x2.unsqueeze(-3)
    if p == 0:
        return (apart != 0).to(apart.dtype).sum(-1)
    if p == 1:
        return apart.abs().sum(-1)
    if p == torch.inf:
        return apart.abs().amax(-1)
    total = (apart * apart if p == 2 else apart.abs().pow(p)).sum(-1)
    some = total > 0
    return torch.where(
        some, torch.where(some, total, torch.ones_like(total)).pow(1 / p), torch.zeros_like(total)
    )


def _pdist(input: torch.Tensor, p: float = 2.0) -> torch.Tensor:
    """The distances of all pairs of different rows, in the order of the upper triangle."""
    rows, columns = torch.triu_indices(int(input.shape[0]), int(input.shape[0]), 1)
    return _cdist(input, input, p)[rows, columns]


# where a function is looked up, its name, and what stands in for it
MISSING: list[tuple[Any, str, Any]] = [
    *((owner, name, _matmul) for owner in (torch, torch.Tensor) for name in ("matmul", "mv")),
    (torch.Tensor, "__matmul__", _matmul),
    *((torch.Tensor, name, property(_adjoint)) for name in ("H", "mH")),
    (torch.Tensor, "mT", property(_transposed)),
    (torch, "vdot", _vdot),
    *((owner, "inverse", _inv) for owner in (torch, torch.Tensor)),
    (torch.linalg, "inv", _inv),
    (torch.linalg, "solve", _solve),
    *((owner, "cholesky", _cholesky) for owner in (torch, torch.Tensor, torch.linalg)),
    *((owner, "cholesky_solve", _cholesky_solve) for owner in (torch, torch.Tensor)),
    *((owner, "slogdet", _slogdet) for owner in (torch, torch.Tensor, torch.linalg)),
    *((owner, "cov", _cov) for owner in (torch, torch.Tensor)),
    *((owner, "corrcoef", _corrcoef) for owner in (torch, torch.Tensor)),
    *((owner, "vander", _vander) for owner in (torch, torch.linalg)),
    (torch, "cdist", _cdist),
    *((owner, "pdist", _pdist) for owner in (torch, F)),
]

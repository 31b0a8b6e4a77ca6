"""Make transformers 4's attention masks traceable: it builds them with vmap, which the tracer cannot follow.

Version 5 broadcasts indices instead; so does this, for as long as the context lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from torch import Tensor

__all__ = ["traceable_masks"]

_Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@contextmanager
def traceable_masks() -> Iterator[None]:
    """Swap the vmap of `transformers.masking_utils` for broadcasting; nothing to do on version 5."""
    import transformers
    from transformers import masking_utils

    if int(transformers.__version__.split(".")[0]) >= 5:
        yield
        return
    # The second makes plain indexing possible under vmap, with an operator that has no export.
    swaps = {"_vmap_for_bhqkv": _broadcast, "TransformGetItemToIndex": nullcontext}
    originals = {name: getattr(masking_utils, name) for name in swaps if hasattr(masking_utils, name)}
    for name in originals:
        setattr(masking_utils, name, swaps[name])
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(masking_utils, name, original)


def _broadcast(mask: _Mask, bh_indices: bool = True) -> _Mask:
    """A mask over whole index vectors from one over single indices."""

    def over(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        queries, keys = query.reshape(-1, 1), key.reshape(1, -1)
        if not bh_indices:
            return mask(batch, head, queries, keys)
        found = mask(batch.reshape(-1, 1, 1, 1), head.reshape(1, -1, 1, 1), queries, keys)
        return found.expand(batch.shape[0], head.shape[0], query.shape[0], key.shape[0])

    return over

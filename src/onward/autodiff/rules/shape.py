"""Gradients of operators that rearrange data without computing: reshape, transpose, expand, tile.

Slice, Pad, Split and Concat are in `slicing`, the Gather and Scatter families in `indexing`.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onward.autodiff.registry import gradient_rule, no_gradient
from onward.graph.nodes import optional_input


def reshape_like(op, value, like):
    """A value in another's shape; where the dimensions' symbols tell it, by a constant."""
    sizes = _target(value.shape, like.shape)
    if sizes is not None:
        target = np.asarray(sizes, np.int64)
        return op.Reshape(value, target, allowzero=1 if 0 in like.shape else None)
    # A shape that the run computes may have a zero, which means an empty axis and not "as the input".
    return op.Reshape(value, op.shape(like), allowzero=1)


def _target(have: ir.Shape | None, want: ir.Shape | None) -> list[int] | None:
    """What Reshape must be told: sizes, 0 for a symbol that is already in place, −1 for a single unknown."""
    if want is None:
        return None
    target: list[int] = []
    for axis, dim in enumerate(want):
        in_place = have is not None and axis < have.rank() and have[axis] == dim
        if isinstance(dim, int):
            target.append(dim)
        elif dim.value is not None and in_place:
            target.append(0)
        else:
            target.append(-1)
    # Beside −1 no size may be 0, which a symbol in place could be; and 0 means one thing or the other.
    if target.count(-1) > 1 or (-1 in target and 0 in target):
        return None
    copied = any(size == 0 and not isinstance(dim, int) for size, dim in zip(target, want))
    return None if copied and 0 in want else target


def size_of(op, value, axis):
    """One dimension: a number where it is known, else an int64 vector of length 1."""
    static = op.static_dim(value, axis)
    return op.dim(value, axis) if static is None else static


def total(op, sizes):
    """The sum of sizes: a number where all are."""
    number = sum(size for size in sizes if isinstance(size, int))
    symbolic = None
    for size in sizes:
        if not isinstance(size, int):
            symbolic = size if symbolic is None else op.Add(symbolic, size)
    if symbolic is None:
        return number
    return op.Add(symbolic, [number]) if number else symbolic


def difference(op, size, parts):
    """A size without some parts of it: a number where all are."""
    part = total(op, parts)
    if isinstance(size, int) and isinstance(part, int):
        return size - part
    if isinstance(part, int) and part == 0:
        return size
    return op.Sub(*([value] if isinstance(value, int) else value for value in (size, part)))


def padded(op, value, pads):
    """Zeros around a value; `pads` has (axis, before, after), numbers or int64 vectors of length 1."""
    needed = [pad for pad in pads if not all(isinstance(count, int) and count == 0 for count in pad[1:])]
    if not needed:
        return value
    axes, before, after = zip(*needed)
    return op.Pad(value, op.concat_shape(*before, *after), None, list(axes))


@gradient_rule("Reshape", "Flatten")
def reshape(op, node, dz):
    """z = x in another shape   ⇒   dx = dz in x's"""
    return reshape_like(op, dz, node.inputs[0])


@gradient_rule("Squeeze")
def squeeze(op, node, dz):
    """z = x without some axes of size 1   ⇒   dx = dz with them"""
    axes = optional_input(node, 1)
    return reshape_like(op, dz, node.inputs[0]) if axes is None else op.Unsqueeze(dz, axes)


@gradient_rule("Unsqueeze")
def unsqueeze(op, node, dz):
    """z = x with more axes of size 1   ⇒   dx = dz without them"""
    axes = node.inputs[1]
    constant = op.const_value(axes)
    # Squeeze reads an empty list as "all".
    if constant is not None and constant.size == 0:
        return dz
    # onnxruntime's Unsqueeze takes a scalar for the axes, its Squeeze does not.
    vector = axes.shape is not None and axes.shape.rank() == 1
    return op.Squeeze(dz, axes if vector else op.Reshape(axes, [-1]))


@gradient_rule("Transpose")
def transpose(op, node, dz):
    """z = x permuted by p   ⇒   dx = dz permuted by p⁻¹"""
    perm = node.attributes.get_ints("perm", None)
    if perm is None:
        return op.Transpose(dz)
    return op.Transpose(dz, perm=[int(axis) for axis in np.argsort(perm)])


@gradient_rule("Expand", broadcasts=True)
def expand(op, node, dz):
    """z = x broadcast   ⇒   dx = Σ dz over what was broadcast"""
    return dz


@gradient_rule("Tile")
def tile(op, node, dz):
    """z = x repeated rₐ times along each axis a   ⇒   dx = Σ of the repetitions of dz"""
    x, repeats = node.inputs
    constant = op.const_value(repeats)
    if constant is None:
        # (r₀, n₀, r₁, n₁, …): each axis as its repetitions and itself.
        pairs = op.Concat(op.Unsqueeze(repeats, [1]), op.Unsqueeze(op.shape(x), [1]), axis=1)
        split = op.Reshape(dz, op.Reshape(pairs, [-1]), allowzero=1)
        return op.ReduceSum(split, list(range(0, 2 * op.rank(x), 2)), keepdims=0)
    parts, repeated = [], []
    for axis, count in enumerate(constant.tolist()):
        if count != 1:
            repeated.append(len(parts))
            parts.append(count)
        parts.append(size_of(op, x, axis))
    if not repeated:
        return dz
    return op.ReduceSum(op.Reshape(dz, op.concat_shape(*parts), allowzero=1), repeated, keepdims=0)


@gradient_rule("DepthToSpace")
def depth_to_space(op, node, dz):
    """z = blocks of channels laid out in space   ⇒   dx = the blocks of dz gathered into channels"""
    block = node.attributes["blocksize"].as_int()
    if node.attributes.get_string("mode", "DCR") == "DCR":
        return op.SpaceToDepth(dz, blocksize=block)
    x = node.inputs[0]
    batch, height, width = (size_of(op, x, axis) for axis in (0, 2, 3))
    channels = size_of(op, dz, 1)
    # CRD has no inverse among the operators of the dialect's opset, so that it is written out.
    split = op.Reshape(dz, op.concat_shape(batch, channels, height, block, width, block), allowzero=1)
    return reshape_like(op, op.Transpose(split, perm=[0, 1, 3, 5, 2, 4]), x)


@gradient_rule("SpaceToDepth")
def space_to_depth(op, node, dz):
    """z = blocks of space gathered into channels   ⇒   dx = the channels of dz laid out in space"""
    return op.DepthToSpace(dz, blocksize=node.attributes["blocksize"].as_int(), mode="DCR")


@gradient_rule("ReverseSequence")
def reverse_sequence(op, node, dz):
    """z = x with each sequence reversed   ⇒   dx = dz with each reversed again"""
    attributes = node.attributes
    return op.ReverseSequence(
        dz,
        node.inputs[1],
        batch_axis=attributes.get_int("batch_axis", 1),
        time_axis=attributes.get_int("time_axis", 0),
    )


@gradient_rule("Trilu")
def trilu(op, node, dz):
    """z = a triangle of x   ⇒   dx = that triangle of dz"""
    return op.Trilu(dz, optional_input(node, 1), upper=node.attributes.get_int("upper", 1))


@gradient_rule("Range")
def arange(op, node, dz):
    """zᵢ = a + i·d   ⇒   da = Σ dzᵢ,  dd = Σ i·dzᵢ; the limit decides only how many there are"""
    # Counted in integers: a Range of floats may have one element more or fewer by rounding.
    index = op.Cast(op.Range(0, op.Size(dz), 1), to=op.dtype(dz))
    return op.ReduceSum(dz, keepdims=0), None, op.ReduceSum(op.Mul(dz, index), keepdims=0)


no_gradient("Shape", "Size", because="of a shape only")

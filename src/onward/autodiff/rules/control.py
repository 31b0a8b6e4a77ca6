"""Gradients of Loop and Scan: their bodies are differentiated.

Each iteration of a backward node recomputes the forward body from the saved state of that iteration, then runs the
body's gradient. The state at the start of each iteration is saved in additional outputs of the forward node: stacked
where its shape is the same in every iteration, else as a sequence. Random numbers are saved too, never drawn again.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onward.autodiff import subgraphs
from onward.autodiff.forms.iterations import layout, read_loop, read_scan
from onward.autodiff.registry import gradient_rule
from onward.autodiff.saved.iterated_values import saved_from_loop, saved_from_scan
from onward.autodiff.sequences import add, zeros
from onward.graph.nodes import captured_values
from onward.graph.shapes.bodies import describe


def _loop_bodies(node, varying, mattering):
    parts = read_loop(node)
    return [(parts.body, *parts.activity(varying, mattering))]


@gradient_rule("Loop", bodies=_loop_bodies)
def loop(op, node, *dys):
    """sₜ₊₁, eₜ = f(t, sₜ, c)   ⇒   from the last iteration to the first:
    dsₜ, δc = f'ᵀ(t, sₜ, c)·(dsₜ₊₁, deₜ),   dc = Σ δc
    """
    parts = read_loop(node)
    arriving = {value for value, dy in zip(node.outputs, dys) if dy is not None}
    sources, targets = parts.activity(op.active, arriving)
    live = [i for i, (a, b) in enumerate(parts.states) if a in sources and b in targets]
    captured = [value for value in captured_values(node) if value in sources]

    inner = subgraphs.body_builder(op, "body")
    number = inner.input(f"{op.scope}/number", ir.DataType.INT64, [])
    going = inner.input(f"{op.scope}/going", ir.DataType.BOOL, [])
    ds = {i: subgraphs.body_input(inner, parts.entering[i], "ds") for i in live}
    sums = [subgraphs.body_input(inner, value, "sum") for value in captured]

    iteration = subgraphs.argument(inner, parts.body.inputs[0], "iteration")
    begins = {value: subgraphs.argument(inner, value, "begin") for value in parts.entering}
    random_numbers = {
        d: subgraphs.argument(inner, d.like, "random") for d in subgraphs.random_values(parts.body)
    }
    # A recomputed iteration did run, so that its condition was true.
    true = op.constant(np.asarray(True), name="true")
    results = subgraphs.inline(
        inner, parts.body, [iteration, true, *begins.values()], drawn_values=random_numbers
    )
    outcome = results[1 : 1 + len(parts.leaving)]
    scan_gradients = {i: dy for i, dy in enumerate(dys[len(parts.leaving) :]) if dy is not None}
    de = {i: subgraphs.argument(inner, parts.emitted[i], "de") for i in scan_gradients}
    inner_gradients = subgraphs.differentiate_body(
        inner,
        [(outcome[i], ds[i]) for i in live]
        + [(results[1 + len(parts.leaving) + i], dy) for i, dy in de.items()],
        [*(begins[parts.entering[i]] for i in live), *captured],
    )
    likes = [parts.entering[i] for i in live] + captured
    before = [inner_gradients[begins[parts.entering[i]]] for i in live]
    added = [_added(inner, total, inner_gradients[value]) for value, total in zip(captured, sums)]
    subgraphs.close(inner, [going, *before, *added], [going, *likes])

    keep = subgraphs.used({**begins, **random_numbers})
    trips, record = saved_from_loop(op, parts, list(keep))
    with inner.inserting_first():
        if keep or subgraphs.used({"iteration": iteration, **de}):
            now = inner.Sub(op.Sub(trips, 1), number)  # a Loop only counts upwards
            subgraphs.bind(iteration, now)
            for key, placeholder in keep.items():
                piece = record[key].at(inner, now)
                describe(piece, placeholder.type, placeholder.shape)
                subgraphs.bind(placeholder, piece)
            for i, placeholder in subgraphs.used(de).items():
                piece = inner.Gather(scan_gradients[i], now, axis=0)
                describe(piece, placeholder.type, placeholder.shape)
                subgraphs.bind(placeholder, piece)
    first = [zeros(op, node.outputs[i]) if dys[i] is None else dys[i] for i in live]
    first += [zeros(op, value) for value in captured]
    outer = [parts.initial[i] for i in live] + captured
    gradients = subgraphs.emit(op, "Loop", [trips, None, *first], {"body": inner}, likes=outer)
    return subgraphs.by_value(op, outer, gradients)


def _scan_bodies(node, varying, mattering):
    parts = read_scan(node)
    return [(parts.body, *parts.activity(varying, mattering))]


@gradient_rule("Scan", bodies=_scan_bodies)
def scan(op, node, *dys):
    """sₜ₊₁, eₜ = f(sₜ, xₜ, c)   ⇒   from the last iteration to the first:
    dsₜ, dxₜ, δc = f'ᵀ(sₜ, xₜ, c)·(dsₜ₊₁, deₜ),   dc = Σ δc
    """
    parts = read_scan(node)
    arriving = {value for value, dy in zip(node.outputs, dys) if dy is not None}
    sources, targets = parts.activity(op.active, arriving)
    live = [i for i, (a, b) in enumerate(parts.states) if a in sources and b in targets]
    sliced = [i for i, value in enumerate(parts.slices) if value in sources]
    captured = [value for value in captured_values(node) if value in sources]
    count = len(parts.leaving)

    inner = subgraphs.body_builder(op, "body")
    ds = {i: subgraphs.body_input(inner, parts.entering[i], "ds") for i in live}
    sums = [subgraphs.body_input(inner, value, "sum") for value in captured]
    begins = {value: subgraphs.argument(inner, value, "begin") for value in parts.entering}
    pieces = {value: subgraphs.argument(inner, value, "x") for value in parts.slices}
    random_numbers = {
        d: subgraphs.argument(inner, d.like, "random") for d in subgraphs.random_values(parts.body)
    }
    results = subgraphs.inline(
        inner, parts.body, [*begins.values(), *pieces.values()], drawn_values=random_numbers
    )
    de = {
        i: subgraphs.argument(inner, value, "de")
        for i, value in enumerate(parts.emitted)
        if dys[count + i] is not None
    }
    inner_gradients = subgraphs.differentiate_body(
        inner,
        [(results[i], ds[i]) for i in live] + [(results[count + i], dy) for i, dy in de.items()],
        [*(begins[parts.entering[i]] for i in live), *(pieces[parts.slices[i]] for i in sliced), *captured],
    )
    before = [inner_gradients[begins[parts.entering[i]]] for i in live]
    added = [_added(inner, total, inner_gradients[value]) for value, total in zip(captured, sums)]
    dx = {i: inner_gradients[pieces[parts.slices[i]]] for i in sliced}
    dx = {i: value for i, value in dx.items() if value is not None}
    subgraphs.close(
        inner,
        [*before, *added, *dx.values()],
        [*(parts.entering[i] for i in live), *captured, *(parts.slices[i] for i in dx)],
    )

    # Scan inputs of the backward node: (value, placeholder in the body, axis, direction in the forward node).
    axes_in, ways_in = layout(node, "input", len(parts.slices))
    axes_out, ways_out = layout(node, "output", len(parts.emitted))
    walked = [
        (parts.scanned[i], pieces[parts.slices[i]], axes_in[i], ways_in[i]) for i in range(len(parts.slices))
    ]
    walked += [(dys[count + i], dy, axes_out[i], ways_out[i]) for i, dy in de.items()]
    keep = subgraphs.used({**begins, **random_numbers})
    walked += [(value, keep[key], 0, 0) for key, value in saved_from_scan(op, parts, list(keep)).items()]
    used = [row for row in walked if subgraphs.used({0: row[1]})]
    used = used or walked[:1]  # a Scan needs an input that sets the number of iterations
    inner.add_inputs([placeholder for _, placeholder, _, _ in used])
    first = [zeros(op, node.outputs[i]) if dys[i] is None else dys[i] for i in live]
    first += [zeros(op, value) for value in captured]
    outer = [parts.initial[i] for i in live] + captured + [parts.scanned[i] for i in dx]
    gradients = subgraphs.emit(
        op,
        "Scan",
        [*first, *(value for value, _, _, _ in used)],
        {
            "body": inner,
            "num_scan_inputs": len(used),
            "scan_input_axes": [axis for _, _, axis, _ in used],
            # Backwards through what the forward node went through forwards.
            "scan_input_directions": [1 - way for _, _, _, way in used],
            "scan_output_axes": [axes_in[i] for i in dx] or None,
            "scan_output_directions": [1 - ways_in[i] for i in dx] or None,
        },
        likes=outer,
    )
    return subgraphs.by_value(op, outer, gradients)


def _added(op, total: ir.Value, part: ir.Value | None) -> ir.Value:
    return total if part is None else add(op, total, part)

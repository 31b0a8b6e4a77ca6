"""Gradients of RNN, GRU and LSTM.

In each, everything a backward step multiplies with (a, f, …) is known before the backward pass starts, so it
is computed for all steps at once; a step itself is a few products with it and one with R.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onward.autodiff.forms.recurrence import Activation, Recurrence, read_activations, scan
from onward.autodiff.registry import gradient_rule
from onward.autodiff.saved.optional_outputs import saved_runs


@gradient_rule("RNN")
def rnn(op, node, dy, dy_h=None):
    """h′ = f(x·Wᵀ + h·Rᵀ + b)   ⇒   with a = f′:  dz = dh′·a,  dh = dz·R,  dW = Σ dzᵀ·x,  dR = Σ dzᵀ·h"""
    layer = Recurrence.read(op, node, gates=1)
    functions = read_activations(node, defaults=["Tanh"], directions=len(layer.directions))
    runs = saved_runs(layer, functions, _rnn_widths, _rnn_forward)
    gradients = _DirectionGradients()
    hold = layer.hold()
    for d, (f,), run in zip(layer.directions, functions, runs):
        h = run["hs"]
        slope = layer.where_valid(f.derivative(op, h, run["z"]), 0.0)

        def step(op, states, elements, r=d.r):
            (dh,), (a, *more) = states, elements
            keep = more.pop(0) if hold is not None else None
            dh = op.Add(dh, more[0]) if more else dh
            dz = op.Mul(dh, a)
            back = op.MatMul(dz, r)
            return [back if keep is None else op.Add(back, op.Mul(dh, keep))], [dz]

        sequences = [slope, hold, layer.sequence_gradient(dy, d)]
        (dh,), (dz,) = scan(
            op,
            step,
            states=[layer.state_gradient(dy_h, d)],
            sequences=[v for v in sequences if v is not None],
            reverse=not d.reverse,
        )
        rows = layer.flat(dz, layer.hidden)
        previous = layer.flat(layer.previous(d, h, d.h), layer.hidden)
        gradients.add(op, layer, d, rows, rows_r=rows, dr=op.Gemm(rows, previous, transA=1), dh=dh)
    return gradients.gradients(layer)


def _rnn_widths(layer, d, functions):
    (f,) = functions
    return {"hs": 1, "z": f.needs_argument}


def _rnn_forward(op, layer, d, functions):
    (f,) = functions
    projected = layer.project(d, _sum(op, d.bias_w, d.bias_r))

    def step(op, states, elements):
        (h,), (x, *mask) = states, elements
        z = op.Gemm(h, d.r, x, transB=1)
        after = f.apply(op, z)
        after = op.Where(mask[0], after, h) if mask else after
        return [after], [after, z] if f.needs_argument else [after]

    (last,), (states, *z) = scan(
        op, step, states=[d.h], sequences=_masked(layer, projected), reverse=d.reverse
    )
    return {"h": last, "hs": states, "z": z[0] if z else None}


@gradient_rule("LSTM")
def lstm(op, node, dy, dy_h=None, dy_c=None):
    """i, o, f = f(·), g = g(·), c′ = f·c + i·g, h′ = o·h(c′)   ⇒   with
    a = f′·[g, h(c′), c] and g′·i, e = o·h′(c′):  dc += dh·e,  dz = [dc, dh, dc, dc]·a,  dc ← dc·f,  dh ← dz·R

    Peepholes P add to what is known beforehand: e += a_o·P_o, f += a_i·P_i + a_f·P_f.
    """
    layer = Recurrence.read(op, node, gates=4)
    functions = read_activations(node, defaults=["Sigmoid", "Tanh", "Tanh"], directions=len(layer.directions))
    # onnxruntime does not clip what the last activation reads: the cell state itself
    functions = [(f, g, dataclasses.replace(h, clip=None)) for f, g, h in functions]
    runs = saved_runs(layer, functions, _lstm_widths, _lstm_forward)
    gradients = _DirectionGradients()
    hold, size = layer.hold(), layer.hidden
    coupled = node.attributes.get_int("input_forget", 0) == 1
    for d, (f, g, h), run in zip(layer.directions, functions, runs):
        i, o, forget, candidate, squashed = (
            run[name] for name in ("i", "o", "forget", "candidate", "squashed")
        )
        cells, before = run["cs"], None
        z, z_candidate = (
            (None, None) if run["z"] is None else op.Split(run["z"], [3 * size, size], axis=2, outputs=2)
        )
        slope_g = op.Mul(g.derivative(op, candidate, z_candidate), i)
        if _is_plain_lstm(layer, d, (f, g, h)):
            # f′·y = (1 − f)·(f·y), and f·y is at hand
            products = (i, run["written"]), (o, run["hs"]), (forget, run["retained"])
            a = op.Concat(
                *(op.Mul(op.Sub(1.0, gate), product) for gate, product in products), slope_g, axis=2
            )
        else:
            before = layer.previous(d, cells, d.c)
            factors = [candidate, squashed, before]
            if coupled:
                forget = op.Sub(1.0, i)
                factors = [op.Sub(candidate, before), squashed, op.Mul(before, 0.0)]
            slope = f.derivative(op, op.Concat(i, o, run["forget"], axis=2), z)
            a = op.Concat(op.Mul(slope, op.Concat(*factors, axis=2)), slope_g, axis=2)
        e = op.Mul(h.derivative(op, squashed, cells), o)
        if d.peephole is not None:
            p_i, p_o, p_f = op.Split(d.peephole, axis=0, num_outputs=3, outputs=3)
            a_i, a_o, a_f, _ = op.Split(a, axis=2, num_outputs=4, outputs=4)
            e = op.Add(e, op.Mul(a_o, p_o))
            forget = op.Add(forget, op.Add(op.Mul(a_i, p_i), op.Mul(a_f, p_f)))

        def step(op, states, elements, r=d.r):
            (dh, dc), (a, e, forget, *more) = states, elements
            keep = more.pop(0) if hold is not None else None
            dh = op.Add(dh, more[0]) if more else dh
            dc = op.Add(dc, op.Mul(dh, e))
            # One product for all four gates, with what is known beforehand.
            dz = op.Mul(op.Concat(dc, dh, dc, dc, axis=1), a)
            back = op.MatMul(dz, r)
            back = back if keep is None else op.Add(back, op.Mul(dh, keep))
            return [back, op.Mul(dc, forget)], [dz]

        sequences = [
            layer.where_valid(a, 0.0),
            layer.where_valid(e, 0.0),
            layer.where_valid(forget, 1.0),
            hold,
            layer.sequence_gradient(dy, d),
        ]
        (dh, dc), (dz,) = scan(
            op,
            step,
            states=[layer.state_gradient(dy_h, d), layer.state_gradient(dy_c, d)],
            sequences=[v for v in sequences if v is not None],
            reverse=not d.reverse,
        )
        rows = layer.flat(dz, 4 * size)
        previous = layer.flat(layer.previous(d, run["hs"], d.h), size)
        dp = None
        if d.peephole is not None:
            dz_i, dz_o, dz_f, _ = op.Split(dz, axis=2, num_outputs=4, outputs=4)
            read = [(dz_i, before), (dz_o, cells), (dz_f, before)]
            dp = op.Concat(*(op.ReduceSum(op.Mul(p, q), [0, 1], keepdims=0) for p, q in read), axis=0)
        gradients.add(
            op, layer, d, rows, rows_r=rows, dr=op.Gemm(rows, previous, transA=1), dh=dh, dc=dc, dp=dp
        )
    return gradients.gradients(layer)


def _is_plain_lstm(layer, d, functions):
    """Whether all that the backward pass reads are results of a step's own operators: it then copies no state."""
    f, g, h = functions
    usual = f == Activation("sigmoid") and not g.needs_argument and not h.needs_argument
    coupled = layer.node.attributes.get_int("input_forget", 0) == 1
    return usual and layer.mask is None and d.peephole is None and not coupled


def _lstm_widths(layer, d, functions):
    f, g, _ = functions
    plain = _is_plain_lstm(layer, d, functions)
    return {
        **dict.fromkeys(("i", "o", "forget", "candidate", "squashed", "hs"), 1),
        **dict.fromkeys(("retained", "written"), plain),
        "cs": not plain,
        "z": 4 * (f.needs_argument or g.needs_argument),
    }


def _lstm_forward(op, layer, d, functions):
    f, g, h = functions
    size = layer.hidden
    coupled = layer.node.attributes.get_int("input_forget", 0) == 1
    projected = layer.project(d, _sum(op, d.bias_w, d.bias_r))
    peepholes = None
    if d.peephole is not None:
        peepholes = op.Split(d.peephole, axis=0, num_outputs=3, outputs=3)
    keep_z = f.needs_argument or g.needs_argument
    plain = _is_plain_lstm(layer, d, functions)
    names = [
        "i",
        "o",
        "forget",
        "candidate",
        "squashed",
        *(["retained", "written"] if plain else ["hs", "cs"]),
    ]
    names += ["z"] if keep_z else []

    def move(op, cell, i, forget, candidate):
        retained, written = op.Mul(op.Sub(1.0, i) if coupled else forget, cell), op.Mul(i, candidate)
        return retained, written, op.Add(retained, written)

    def step(op, states, elements):
        (hidden, cell), (x, *mask) = states, elements
        z = op.Gemm(hidden, d.r, x, transB=1)
        if peepholes is None:
            z_gates, z_candidate = op.Split(z, [3 * size, size], axis=1, outputs=2)
            i, o, forget = op.Split(f.apply(op, z_gates), axis=1, num_outputs=3, outputs=3)
            candidate = g.apply(op, z_candidate)
            retained, written, after = move(op, cell, i, forget, candidate)
        else:
            p_i, p_o, p_f = peepholes
            z_i, z_o, z_f, z_candidate = op.Split(z, axis=1, num_outputs=4, outputs=4)
            z_i = op.Add(z_i, op.Mul(cell, p_i))
            z_f = op.Add(z_f, op.Mul(cell, p_f))
            i, forget, candidate = f.apply(op, z_i), f.apply(op, z_f), g.apply(op, z_candidate)
            retained, written, after = move(op, cell, i, forget, candidate)
            z_o = op.Add(z_o, op.Mul(after, p_o))
            o = f.apply(op, z_o)
            z = op.Concat(z_i, z_o, z_f, z_candidate, axis=1) if keep_z else z
        squashed = h.apply(op, after)
        output = op.Mul(o, squashed)
        if mask:
            after, output = op.Where(mask[0], after, cell), op.Where(mask[0], output, hidden)
        values = {"i": i, "o": o, "forget": forget, "candidate": candidate, "squashed": squashed, "z": z}
        values |= {"retained": retained, "written": written, "hs": output, "cs": after}
        return [output, after], [values[name] for name in names]

    (last, cell), results = scan(
        op, step, states=[d.h, d.c], sequences=_masked(layer, projected), reverse=d.reverse
    )
    run = {"h": last, "c": cell, **dict(zip(names, results))}
    if plain:
        run["hs"] = op.Mul(run["o"], run["squashed"])
    return run


@gradient_rule("GRU")
def gru(op, node, dy, dy_h=None):
    """z, r = f(·), n = g(·), h′ = (1 − z)·n + z·h, where r scales h·Rₙᵀ + bₙ =: q (linear_before_reset) or h

    ⇒   with a_z = (h − n)·f′, a_n = (1 − z)·g′, a_r = f′·q (or f′·h):  dz = dh·a_z,  dn = dh·a_n, and
    linear:  dr = dn·a_r,  dq = dn·r,  dh ← dh·z + [dz, dr, dq]·R
    else:    s = dn·Rₙ,  dr = s·a_r,  dh ← dh·z + s·r + [dz, dr]·R
    """
    linear = node.attributes.get_int("linear_before_reset", 0) == 1
    layer = Recurrence.read(op, node, gates=3)
    functions = read_activations(node, defaults=["Sigmoid", "Tanh"], directions=len(layer.directions))
    runs = saved_runs(layer, functions, _gru_widths, _gru_forward_linear if linear else _gru_forward)
    gradients = _DirectionGradients()
    size = layer.hidden
    for d, (f, g), run in zip(layer.directions, functions, runs):
        before = layer.previous(d, run["hs"], d.h)
        z, r = op.Split(run["gates"], axis=2, num_outputs=2, outputs=2)
        slope_z, slope_r = op.Split(
            f.derivative(op, run["gates"], run["z"]), axis=2, num_outputs=2, outputs=2
        )
        a_z = op.Mul(op.Sub(before, run["candidate"]), slope_z)
        a_n = op.Mul(op.Sub(1.0, z), g.derivative(op, run["candidate"], run["z_candidate"]))
        a_r = op.Mul(slope_r, run["inner"] if linear else before)
        a_n, keep = layer.where_valid(a_n, 0.0), layer.where_valid(z, 1.0)
        more = layer.sequence_gradient(dy, d)
        more = [] if more is None else [more]
        states = [layer.state_gradient(dy_h, d)]
        if linear:
            slopes = op.Concat(layer.where_valid(a_z, 0.0), op.Mul(a_n, a_r), op.Mul(a_n, r), axis=2)

            def linear_step(op, states, elements, r=d.r):
                (dh,), (slopes, keep, *more) = states, elements
                dh = op.Add(dh, more[0]) if more else dh
                dz = op.Mul(op.Concat(dh, dh, dh, axis=1), slopes)
                return [op.Add(op.Mul(dh, keep), op.MatMul(dz, r))], [dz, dh]

            (dh,), (dz, dhs) = scan(
                op, linear_step, states=states, sequences=[slopes, keep, *more], reverse=not d.reverse
            )
            gates, _ = op.Split(dz, [2 * size, size], axis=2, outputs=2)
            rows = layer.flat(op.Concat(gates, op.Mul(dhs, a_n), axis=2), 3 * size)
            rows_r = layer.flat(dz, 3 * size)
            dr = op.Gemm(rows_r, layer.flat(before, size), transA=1)
        else:
            r_gates, r_candidate = op.Split(d.r, [2 * size, size], axis=0, outputs=2)
            a_z = layer.where_valid(a_z, 0.0)

            def step(op, states, elements, r_gates=r_gates, r_candidate=r_candidate):
                (dh,), (a_z, a_n, a_r, r, keep, *more) = states, elements
                dh = op.Add(dh, more[0]) if more else dh
                dn = op.Mul(dh, a_n)
                s = op.MatMul(dn, r_candidate)
                dz = op.Concat(op.Mul(dh, a_z), op.Mul(s, a_r), axis=1)
                back = op.Gemm(dz, r_gates, op.Add(op.Mul(dh, keep), op.Mul(s, r)))
                return [back], [dz, dn]

            (dh,), (dz, dn) = scan(
                op, step, states=states, sequences=[a_z, a_n, a_r, r, keep, *more], reverse=not d.reverse
            )
            rows = rows_r = layer.flat(op.Concat(dz, dn, axis=2), 3 * size)
            dr = op.Concat(
                op.Gemm(layer.flat(dz, 2 * size), layer.flat(before, size), transA=1),
                op.Gemm(layer.flat(dn, size), layer.flat(op.Mul(before, r), size), transA=1),
                axis=0,
            )
        gradients.add(op, layer, d, rows, rows_r=rows_r, dr=dr, dh=dh)
    return gradients.gradients(layer)


def _gru_widths(layer, d, functions):
    f, g = functions
    linear = layer.node.attributes.get_int("linear_before_reset", 0) == 1
    return {
        "hs": 1, "gates": 2, "candidate": 1, "inner": linear, "z": 2 * f.needs_argument,
        "z_candidate": g.needs_argument,
    }  # fmt: skip


def _gru_forward(op, layer, d, functions):
    f, g = functions
    size = layer.hidden
    projected = layer.project(d, _sum(op, d.bias_w, d.bias_r))
    r_gates, r_candidate = op.Split(d.r, [2 * size, size], axis=0, outputs=2)

    def step(op, states, elements):
        (h,), (x, *mask) = states, elements
        x_gates, x_candidate = op.Split(x, [2 * size, size], axis=1, outputs=2)
        z_gates = op.Gemm(h, r_gates, x_gates, transB=1)
        gates = f.apply(op, z_gates)
        z, r = op.Split(gates, axis=1, num_outputs=2, outputs=2)
        z_candidate = op.Gemm(op.Mul(r, h), r_candidate, x_candidate, transB=1)
        return _gru_step_end(op, (f, g), h, z, mask, gates, z_gates, z_candidate, [])

    return _gru_run(op, layer, d, functions, step, projected, inner=False)


def _gru_forward_linear(op, layer, d, functions):
    f, g = functions
    size = layer.hidden
    bias, inner_bias = d.bias_w, None
    if d.bias_r is not None:
        zeros, ones = [0.0] * size, [1.0] * size
        chosen = op.CastLike([*ones, *ones, *zeros], d.bias_r)
        # Of the candidate's recurrent bias r scales a part, so that it cannot join the input's.
        bias = op.Add(bias, op.Mul(d.bias_r, chosen))
        inner_bias = op.Sub(d.bias_r, op.Mul(d.bias_r, chosen))
    projected = layer.project(d, bias)

    def step(op, states, elements):
        (h,), (x, *mask) = states, elements
        x_gates, x_candidate = op.Split(x, [2 * size, size], axis=1, outputs=2)
        product = op.Gemm(h, d.r, inner_bias, transB=1)
        h_gates, inner = op.Split(product, [2 * size, size], axis=1, outputs=2)
        z_gates = op.Add(x_gates, h_gates)
        gates = f.apply(op, z_gates)
        z, r = op.Split(gates, axis=1, num_outputs=2, outputs=2)
        z_candidate = op.Add(x_candidate, op.Mul(r, inner))
        return _gru_step_end(op, (f, g), h, z, mask, gates, z_gates, z_candidate, [inner])

    return _gru_run(op, layer, d, functions, step, projected, inner=True)


def _gru_step_end(op, functions, h, z, mask, gates, z_gates, z_candidate, inner):
    f, g = functions
    candidate = g.apply(op, z_candidate)
    after = op.Add(candidate, op.Mul(z, op.Sub(h, candidate)))
    after = op.Where(mask[0], after, h) if mask else after
    arguments = [z_gates] if f.needs_argument else []
    arguments += [z_candidate] if g.needs_argument else []
    return [after], [after, gates, candidate, *inner, *arguments]


def _gru_run(op, layer, d, functions, step, projected, *, inner):
    f, g = functions
    (last,), (hs, gates, candidate, *optional) = scan(
        op, step, states=[d.h], sequences=_masked(layer, projected), reverse=d.reverse
    )
    return {
        "h": last,
        "hs": hs,
        "gates": gates,
        "candidate": candidate,
        "inner": optional.pop(0) if inner else None,
        "z": optional.pop(0) if f.needs_argument else None,
        "z_candidate": optional.pop(0) if g.needs_argument else None,
    }


def _masked(layer, projected):
    return [projected] if layer.mask is None else [projected, layer.mask]


def _sum(op, a, b):
    return None if a is None else op.Add(a, b)


class _DirectionGradients:
    """Gradients of each direction, gathered into those of the node's inputs."""

    def __init__(self) -> None:
        self.parts: dict[str, list[ir.Value]] = {}

    def add(self, op, layer, d, rows, *, rows_r, dr, dh, dc=None, dp=None):
        """`rows`: gradient of the gates' x·Wᵀ over all steps; `rows_r`: the same of h·Rᵀ."""
        db = None
        if d.bias_w is not None:
            own = op.sum_leading(rows, 1)
            db = op.Concat(own, own if rows_r is rows else op.sum_leading(rows_r, 1), axis=0)
        parts = {
            "x": op.Gemm(rows, d.w),
            "w": op.Gemm(rows, layer.rows, transA=1),
            "r": dr,
            "b": db,
            "h": dh,
            "c": dc,
            "p": dp,
        }
        for name, value in parts.items():
            if value is not None:
                self.parts.setdefault(name, []).append(value)

    def gradients(self, layer):
        """One gradient for each input of the node, in its order."""

        def stacked(name, *, state=False):
            return layer.stack(self.parts[name], state=state) if name in self.parts else None

        return (
            layer.input_gradient(self.parts["x"]),
            stacked("w"),
            stacked("r"),
            stacked("b"),
            None,
            stacked("h", state=True),
            stacked("c", state=True),
            stacked("p"),
        )

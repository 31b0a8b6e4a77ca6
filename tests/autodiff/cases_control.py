"""Cases of If, Loop and Scan: whole models, since a body makes the operator."""

from __future__ import annotations

import numpy as np
from cases import Case, normal

_HEAD = '<ir_version: 10, opset_import: ["": 21]> g '


def _floats(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    return {name: normal(rng, shape) for name, shape in shapes.items()}


def _case(op: str, label: str, text: str, *, reference: str = "onnx", **feeds: np.ndarray) -> Case:
    return Case(op, label=label, text=_HEAD + text, feeds=dict(feeds), reference=reference)


_TWO_BRANCHES = """(bool p, float[N] a, float[N] b) => (float[N] y) {
    y = If (p) <
        then_branch = then () => (float[N] u) { v = Mul(a, b)  u = Mul(v, a) },
        else_branch = otherwise () => (float[N] w) { w = Add(b, b) }
    >
}"""

CASES = [
    _case(
        "Loop",
        "a_branch_that_returns_its_own_initializer",
        """(float[3] x) => (float[3] y)
            <int64 trips = {3}, int64 zero = {0}> {
            y = Loop (trips, , x) <
                body = turn (int64 i, bool going, float[3] state) => (bool on, float[3] next) {
                    first = Equal(i, zero)
                    factor = If (first) <
                        then_branch = then () => (float[3] own) <float[3] own = {2, 3, 4}> { },
                        else_branch = otherwise () => (float[3] same) { same = Identity(state) }
                    >
                    next = Mul(factor, x)
                    on = Identity(going)
                }
            >
        }""",
        **_floats(x=(3,)),
    ),
    _case("If", "then", _TWO_BRANCHES, p=np.array(True), **_floats(a=(3,), b=(3,))),
    _case("If", "else", _TWO_BRANCHES, p=np.array(False), **_floats(a=(3,), b=(3,))),
    _case(
        "If",
        "several_outputs_one_captured_as_is",
        """(bool p, float[N] a, float[M] b) => (float[N] y, float[M] z) {
            y, z = If (p) <
                then_branch = then () => (float[N] u, float[M] v) { u = Mul(a, a)  v = Identity(b) },
                else_branch = otherwise () => (float[N] s, float[M] t) { s = Identity(a)  t = Mul(b, b) }
            >
        }""",
        p=np.array(True),
        **_floats(a=(3,), b=(2,)),
    ),
    _case(
        "If",
        "one_value_twice",
        """(bool p, float[N] a) => (float[N] y, float[N] z) {
            y, z = If (p) <
                then_branch = then () => (float[N] u, float[N] v) { u = Mul(a, a)  v = Identity(u) },
                else_branch = otherwise () => (float[N] s, float[N] t) { s = Identity(a)  t = Identity(a) }
            >
        }""",
        p=np.array(True),
        **_floats(a=(3,)),
    ),
    _case(
        "If",
        "captured_through_two_bodies",
        """(bool p, bool q, float[N] a, float[N] b) => (float[N] y) {
            aa = Mul(a, a)
            y = If (p) <
                then_branch = then () => (float[N] u) {
                    inside = Mul(b, aa)
                    u = If (q) <
                        then_branch = deep () => (float[N] d) { d = Mul(inside, a) },
                        else_branch = deeper () => (float[N] e) { e = Mul(inside, aa) }
                    >
                },
                else_branch = otherwise () => (float[N] w) { w = Add(b, b) }
            >
        }""",
        p=np.array(True),
        q=np.array(False),
        **_floats(a=(3,), b=(3,)),
    ),
    _case(
        "If",
        "branches_of_other_shapes",
        """(bool p, float[N, 2] a) => (float[K, 2] y) {
            y = If (p) <
                then_branch = then () => (float[N, 2] u) { u = Mul(a, a) },
                else_branch = otherwise () => (float[1, 2] w) {
                    axes = Constant <value = int64[1] {0}> ()
                    w = ReduceSum <keepdims = 1> (a, axes)
                }
            >
        }""",
        p=np.array(False),
        **_floats(a=(3, 2)),
    ),
    _case(
        "Loop",
        "trips_state_captured",
        """(int64 n, float[N] x, float[N] c) => (float[N] y) {
            y = Loop (n, , x) <body = body (int64 i, bool on, float[N] s) => (bool more, float[N] t) {
                more = Identity(on)
                u = Mul(s, s)
                t = Mul(u, c)
            }>
        }""",
        n=np.array(3),
        **_floats(x=(3,), c=(3,)),
    ),
    _case(
        "Loop",
        "no_turn",
        """(int64 n, float[N] x, float[N] c) => (float[N] y) {
            y = Loop (n, , x) <body = body (int64 i, bool on, float[N] s) => (bool more, float[N] t) {
                more = Identity(on)
                t = Mul(s, c)
            }>
        }""",
        n=np.array(0),
        **_floats(x=(3,), c=(3,)),
    ),
    _case(
        "Loop",
        "emits_and_stops_by_condition",
        """(float[2, 3] x, float[3] c) => (float[2, 3] y, float[T, 3] e, float[T, 2, 3] f) {
            yes = Constant <value = bool {1}> ()
            limit = Constant <value = int64 {2}> ()
            axes = Constant <value = int64[1] {0}> ()
            y, e, f = Loop (, yes, x) <
                body = body (int64 i, bool on, float[2, 3] s) => (bool more, float[2, 3] t, float[3] u, float[2, 3] v) {
                    more = Less(i, limit)
                    t = Mul(s, c)
                    u = ReduceSum <keepdims = 0> (t, axes)
                    v = Mul(s, t)
                }
            >
        }""",
        **_floats(x=(2, 3), c=(3,)),
    ),
    _case(
        "Loop",
        "uses_the_turn_number",
        """(float[N] x, float[4, N] table) => (float[N] y, float[T, N] e) {
            n = Constant <value = int64 {4}> ()
            y, e = Loop (n, , x) <
                body = body (int64 i, bool on, float[N] s) => (bool more, float[N] t, float[N] u) {
                    more = Identity(on)
                    row = Gather <axis = 0> (table, i)
                    t = Mul(s, row)
                    u = Mul(row, row)
                }
            >
        }""",
        **_floats(x=(2,), table=(4, 2)),
    ),
    _case(
        "Loop",
        "linear_needs_nothing_kept",
        """(int64 n, float[N] x) => (float[N] y) {
            y = Loop (n, , x) <body = body (int64 i, bool on, float[N] s) => (bool more, float[N] t) {
                more = Identity(on)
                t = Add(s, s)
            }>
        }""",
        n=np.array(3),
        **_floats(x=(3,)),
    ),
    _case(
        "Loop",
        "states_swap_and_one_is_constant",
        """(int64 n, float[N] x, float[N] z) => (float[N] a, float[N] b, float k, int64 j) {
            zero = Constant <value = float {0.5}> ()
            none = Constant <value = int64 {0}> ()
            one = Constant <value = int64 {1}> ()
            a, b, k, j = Loop (n, , x, z, zero, none) <
                body = body (int64 i, bool on, float[N] p, float[N] q, float r, int64 m)
                    => (bool more, float[N] u, float[N] v, float w, int64 o) {
                    more = Identity(on)
                    u = Mul(p, q)
                    v = Identity(p)
                    w = Add(r, r)
                    o = Add(m, one)
                }
            >
        }""",
        n=np.array(3),
        **_floats(x=(3,), z=(3,)),
    ),
    _case(
        "Loop",
        "state_that_grows",
        """(int64 n, float[A, 2] x, float[1, 2] c) => (float[B, 2] y) {
            y = Loop (n, , x) <body = body (int64 i, bool on, float[S, 2] s) => (bool more, float[T, 2] t) {
                more = Identity(on)
                axes = Constant <value = int64[1] {0}> ()
                sum = ReduceSum <keepdims = 1> (s, axes)
                row = Mul(sum, c)
                square = Mul(s, s)
                t = Concat <axis = 0> (square, row)
            }>
        }""",
        n=np.array(3),
        **_floats(x=(1, 2), c=(1, 2)),
    ),
    _case(
        "Loop",
        "state_that_grows_and_emits",
        """(int64 n, float[A, 2] x, float[1, 2] c) => (float[B, 2] y, float[T, 1, 2] e) {
            y, e = Loop (n, , x) <
                body = body (int64 i, bool on, float[S, 2] s) => (bool more, float[T, 2] t, float[1, 2] row) {
                    more = Identity(on)
                    axes = Constant <value = int64[1] {0}> ()
                    sum = ReduceSum <keepdims = 1> (s, axes)
                    row = Mul(sum, c)
                    square = Mul(s, s)
                    t = Concat <axis = 0> (square, row)
                }
            >
        }""",
        n=np.array(2),
        **_floats(x=(1, 2), c=(1, 2)),
    ),
    _case(
        "Loop",
        "loop_in_a_loop",
        """(int64 n, float[N] x, float[N] c) => (float[N] y) {
            y = Loop (n, , x) <body = body (int64 i, bool on, float[N] s) => (bool more, float[N] t) {
                more = Identity(on)
                sc = Mul(s, c)
                t = Loop (n, , s) <body = deep (int64 j, bool yes, float[N] u) => (bool again, float[N] v) {
                    again = Identity(yes)
                    v = Mul(u, sc)
                }>
            }>
        }""",
        n=np.array(2),
        **_floats(x=(2,), c=(2,)),
    ),
    _case(
        "Loop",
        "if_in_a_loop",
        """(int64 n, float[N] x, float[N] c) => (float[N] y) {
            one = Constant <value = int64 {1}> ()
            y = Loop (n, , x) <body = body (int64 i, bool on, float[N] s) => (bool more, float[N] t) {
                more = Identity(on)
                early = Less(i, one)
                t = If (early) <
                    then_branch = then () => (float[N] u) { u = Mul(s, c) },
                    else_branch = otherwise () => (float[N] v) { v = Mul(s, s) }
                >
            }>
        }""",
        n=np.array(3),
        **_floats(x=(2,), c=(2,)),
    ),
    _case(
        "Scan",
        "state_input_output_captured",
        """(float[N] h, float[T, N] x, float[N] c) => (float[N] y, float[T, N] e) {
            y, e = Scan <num_scan_inputs = 1, body = body (float[N] s, float[N] v) => (float[N] t, float[N] u) {
                sv = Mul(s, v)
                t = Mul(sv, c)
                u = Mul(t, t)
            }> (h, x)
        }""",
        **_floats(h=(2,), x=(3, 2), c=(2,)),
    ),
    _case(
        "Scan",
        "axes_and_directions",
        """(float[2] h, float[2, T] x, float[T, 2] z) => (float[2] y, float[2, T] e, float[T, 2] f) {
            y, e, f = Scan <num_scan_inputs = 2, scan_input_axes = [1, 0], scan_input_directions = [1, 0],
                scan_output_axes = [-1, 0], scan_output_directions = [0, 1],
                body = body (float[2] s, float[2] v, float[2] w) => (float[2] t, float[2] u, float[2] r) {
                    sv = Mul(s, v)
                    t = Add(sv, w)
                    u = Mul(t, w)
                    r = Mul(v, v)
                }> (h, x, z)
        }""",
        **_floats(h=(2,), x=(2, 3), z=(3, 2)),
    ),
    _case(
        "Scan",
        "two_states_no_output",
        """(float[N] a, float b, float[T, N] x) => (float[N] y, float z) {
            y, z = Scan <num_scan_inputs = 1, body = body (float[N] s, float r, float[N] v) => (float[N] t, float q) {
                t = Mul(s, v)
                sum = ReduceSum <keepdims = 0> (t)
                q = Mul(r, sum)
            }> (a, b, x)
        }""",
        **_floats(a=(2,), b=(), x=(3, 2)),
    ),
    _case(
        "Scan",
        "no_state",
        """(float[T, N] x, float[N] c) => (float[T, N] e) {
            e = Scan <num_scan_inputs = 1, body = body (float[N] v) => (float[N] u) { u = Mul(v, c) }> (x)
        }""",
        **_floats(x=(3, 2), c=(2,)),
    ),
    _case(
        "Scan",
        "in_a_scan",
        """(float[N] h, float[T, K, N] x) => (float[N] y) {
            y = Scan <num_scan_inputs = 1, body = body (float[N] s, float[K, N] v) => (float[N] t) {
                t = Scan <num_scan_inputs = 1, body = deep (float[N] p, float[N] q) => (float[N] r) {
                    pq = Mul(p, q)
                    r = Add(pq, s)
                }> (s, v)
            }> (h, x)
        }""",
        **_floats(h=(2,), x=(2, 2, 2)),
    ),
]

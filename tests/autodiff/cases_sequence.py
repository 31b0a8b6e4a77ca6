"""Cases of the operators on sequences and optionals: whole models, from tensors to tensors."""

from __future__ import annotations

import numpy as np
from cases import Case, normal

_HEAD = '<ir_version: 10, opset_import: ["": 21]> g '


def _case(op: str, label: str, text: str, *, shapes: dict[str, tuple[int, ...]], **ints: np.ndarray) -> Case:
    rng = np.random.default_rng(3)
    feeds = {name: normal(rng, shape) for name, shape in shapes.items()}
    return Case(op, label=label, text=_HEAD + text, feeds={**feeds, **ints})


def _at(position: int) -> str:
    return f"i = Constant <value = int64 {{{position}}}> ()"


THREE = {"a": (2,), "b": (2,), "c": (2,)}
OTHER = {"a": (2,), "b": (3,), "c": (1,)}

CASES = [
    *(
        _case(
            "SequenceAt",
            f"position_{position}",
            f"""(float[A] a, float[B] b, float[C] c) => (float[D] y) {{
                s = SequenceConstruct(a, b, c)  {_at(position)}  e = SequenceAt(s, i)  y = Mul(e, e)
            }}""",
            shapes=OTHER,
        )
        for position in (0, 1, -1, -3)
    ),
    _case(
        "SequenceAt",
        "position_fed_and_used_twice",
        """(float[A] a, float[B] b, int64 i) => (float[D] y) {
            s = SequenceConstruct(a, b)  d = SequenceAt(s, i)  e = SequenceAt(s, i)  f = SequenceAt(s, i)
            de = Mul(d, e)  y = Mul(de, f)
        }""",
        shapes={"a": (2,), "b": (2,)},
        i=np.array(-1),
    ),
    _case(
        "SequenceConstruct",
        "one_value_twice_and_the_sequence_read_twice",
        """(float[N] a, float[N] b) => (float[M] y, float[N] z) {
            s = SequenceConstruct(a, b, a)
            y = ConcatFromSequence <axis = 0> (s)
            i = Constant <value = int64 {1}> ()
            e = SequenceAt(s, i)
            z = Mul(e, e)
        }""",
        shapes={"a": (2,), "b": (2,)},
    ),
    *(
        _case(
            "SequenceInsert",
            f"position_{position}",
            f"""(float[A] a, float[B] b, float[C] c) => (float[D] y) {{
                aa = Mul(a, a)  bb = Mul(b, c)
                s = SequenceConstruct(a, b)  {_at(position)}  t = SequenceInsert(s, aa, i)
                u = SequenceInsert(t, bb)
                y = ConcatFromSequence <axis = 0> (u)
            }}""",
            shapes=THREE,
        )
        for position in (0, 1, 2, -1, -2)
    ),
    *(
        _case(
            "SequenceErase",
            f"position_{position}",
            f"""(float[A] a, float[B] b, float[C] c) => (float[D] y) {{
                s = SequenceConstruct(a, b, c, b)  {_at(position)}  t = SequenceErase(s, i)
                u = SequenceErase(t)
                y = ConcatFromSequence <axis = 0> (u)
            }}""",
            shapes=OTHER,
        )
        for position in (0, 2, -1, -2)
    ),
    _case(
        "SplitToSequence",
        "one_each",
        """(float[3, N] x) => (float[1, N] y) {
            s = SplitToSequence(x)  i = Constant <value = int64 {1}> ()  e = SequenceAt(s, i)  y = Mul(e, e)
        }""",
        shapes={"x": (3, 2)},
    ),
    _case(
        "SplitToSequence",
        "axis_without_its_dimension",
        """(float[N, 3] x) => (float[N] y) {
            s = SplitToSequence <axis = -1, keepdims = 0> (x)
            i = Constant <value = int64 {-1}> ()
            e = SequenceAt(s, i)
            y = Mul(e, e)
        }""",
        shapes={"x": (2, 3)},
    ),
    _case(
        "SplitToSequence",
        "equal_parts",
        """(float[N, 5] x) => (float[N, K] y) {
            n = Constant <value = int64 {2}> ()
            s = SplitToSequence <axis = 1> (x, n)
            i = Constant <value = int64 {2}> ()
            e = SequenceAt(s, i)
            y = Mul(e, e)
        }""",
        shapes={"x": (2, 5)},
    ),
    _case(
        "SplitToSequence",
        "given_sizes",
        """(float[M, N] x, int64[3] sizes) => (float[M, K] y) {
            s = SplitToSequence <axis = 1> (x, sizes)
            i = Constant <value = int64 {1}> ()
            e = SequenceAt(s, i)
            y = Mul(e, e)
        }""",
        shapes={"x": (2, 6)},
        sizes=np.array([1, 3, 2]),
    ),
    _case(
        "ConcatFromSequence",
        "sizes_differ",
        """(float[A, 2] a, float[B, 2] b) => (float[C, 2] y) {
            s = SequenceConstruct(a, b)
            e = SequenceErase(s)
            t = SequenceInsert(e, b)
            z = ConcatFromSequence <axis = -2> (t)
            y = Mul(z, z)
        }""",
        shapes={"a": (1, 2), "b": (3, 2)},
    ),
    _case(
        "ConcatFromSequence",
        "constructed",
        """(float[A, 2] a, float[B, 2] b) => (float[C, 2] y) {
            s = SequenceConstruct(a, b)  z = ConcatFromSequence <axis = 0> (s)  y = Mul(z, z)
        }""",
        shapes={"a": (1, 2), "b": (3, 2)},
    ),
    _case(
        "ConcatFromSequence",
        "new_axis",
        """(float[N, 2] a, float[N, 2] b) => (float[N, 2, 2] y) {
            s = SequenceConstruct(a, b)  z = ConcatFromSequence <axis = -1, new_axis = 1> (s)  y = Mul(z, z)
        }""",
        shapes={"a": (3, 2), "b": (3, 2)},
    ),
    _case(
        "SequenceMap",
        "sequences_a_tensor_and_a_captured_value",
        """(float[A] a, float[A] b, float[A] c, float[A] d) => (float[B] y, float[A, K] z) {
            s = SequenceConstruct(a, b)
            r = SequenceConstruct(b, c)
            t, u = SequenceMap(s, r, c) <
                body = body (float[N] p, float[N] q, float[N] k) => (float[N] v, float[N] w) {
                    pq = Mul(p, q)  v = Mul(pq, d)  w = Mul(p, k)
                }
            >
            y = ConcatFromSequence <axis = 0> (t)
            z = ConcatFromSequence <axis = 1, new_axis = 1> (u)
        }""",
        shapes={"a": (2,), "b": (2,), "c": (2,), "d": (2,)},
    ),
    _case(
        "Optional",
        "there_and_back",
        """(float[A] a) => (float[A] y) {
            o = Optional(a)  e = OptionalGetElement(o)  y = Mul(e, e)
        }""",
        shapes={"a": (3,)},
    ),
    _case(
        "OptionalGetElement",
        "of_a_sequence",
        """(float[A] a, float[B] b) => (float[C] y) {
            s = SequenceConstruct(a, b)
            o = Optional(s)
            t = OptionalGetElement(o)
            u = OptionalGetElement(o)
            z = ConcatFromSequence <axis = 0> (t)
            w = ConcatFromSequence <axis = 0> (u)
            y = Mul(z, w)
        }""",
        shapes={"a": (1,), "b": (2,)},
    ),
    _case(
        "Loop",
        "state_is_a_sequence",
        """(int64 n, float[A] a) => (float[B] y) {
            s = SequenceConstruct(a)
            t = Loop (n, , s) <
                body = body (int64 i, bool on, seq(float[A]) p) => (bool more, seq(float[A]) q) {
                    more = Identity(on)
                    last = Constant <value = int64 {-1}> ()
                    e = SequenceAt(p, last)
                    f = Mul(e, a)
                    q = SequenceInsert(p, f)
                }
            >
            y = ConcatFromSequence <axis = 0> (t)
        }""",
        shapes={"a": (2,)},
        n=np.array(2),
    ),
    _case(
        "If",
        "branches_give_sequences",
        """(float[A] a, float[A] b, bool p) => (float[B] y) {
            s = If (p) <
                then_branch = then () => (seq(float[A]) t) { t = SequenceConstruct(a, b) },
                else_branch = otherwise () => (seq(float[A]) u) { u = SequenceConstruct(b) }
            >
            z = ConcatFromSequence <axis = 0> (s)
            y = Mul(z, z)
        }""",
        shapes={"a": (2,), "b": (2,)},
        p=np.array(True),
    ),
]

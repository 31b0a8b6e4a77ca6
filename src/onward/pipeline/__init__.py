"""Run an exported folder or a deployed file without torch: text, images, sound or rows in; labels, vectors or text out.

Begin with `load`. `onward.tasks` turns output arrays into
answers; `onward.data` turns images and audio into arrays.
"""

from __future__ import annotations

from onward.pipeline.load import Pipeline, load
from onward.tasks.classifier import Classifier

__all__ = ["Classifier", "Pipeline", "load"]

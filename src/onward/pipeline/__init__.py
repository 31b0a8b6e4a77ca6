"""Run an exported folder or a deployed file without torch: text, images, sound or rows in; labels, vectors or text out.

Begin with `load`. `classifier` runs one file that `onward deploy` wrote. `postprocess` turns output arrays into
results; `onward.data` turns images and audio into arrays.
"""

from __future__ import annotations

from onward.pipeline.classifier import Classifier
from onward.pipeline.load import Pipeline, load

__all__ = ["Classifier", "Pipeline", "load"]

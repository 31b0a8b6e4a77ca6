"""Run an exported Hugging Face folder without torch: text, images or sound in; labels, vectors or text out.

Begin with `load`. `preprocess` turns images and sound into arrays, `postprocess` turns output arrays into results.
"""

from __future__ import annotations

from onward.pipeline.load import Pipeline, load

__all__ = ["Pipeline", "load"]

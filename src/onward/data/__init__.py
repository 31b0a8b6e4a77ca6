"""Reads training data: arrays, tables, folders of images or audio, text.

Begin with `read`: it turns files into arrays for a model's inputs. `match_inputs` matches arrays to inputs. `images`,
`tables`, `text` and `sound` each handle one kind of data. `preprocessing` describes the preprocessing, and is stored
in the run and the deployed model, so that inference does the same; `augment` is for training only.
"""

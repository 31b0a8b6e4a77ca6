"""Reads training data: arrays, tables, folders of images or audio, text.

Begin with `read`: it turns files into arrays for a model's inputs. `match_inputs` matches arrays to inputs. `images`,
`tables`, `text` and `sound` each handle one kind of data, `boxes`, `masks`, `lettering`, `tagged`, `pairs` and
`conversations` what one task alone reads. What was done to the data is a `Preprocessing` of `onward.info`, which is
stored in the run and the deployed model, so that inference does the same; `augment` is for training only.
"""

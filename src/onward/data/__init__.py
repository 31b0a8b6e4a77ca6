"""Training data from what people have: arrays, tables, folders of pictures or sounds, texts.

Begin with `read`: it turns files into arrays for a model's inputs. `inputs` matches arrays to inputs. `images`,
`tables`, `text` and `sound` each know one kind of data. `preprocessing` is what was done to it, as data that goes
into the run and the deployed model, so that inference does the same; `augment` is what is done in training only.
"""

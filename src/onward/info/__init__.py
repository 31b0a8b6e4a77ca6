"""What a model is for: its task, labels, preprocessing and origin.

`model_info` has the class, `metadata` reads it from a model's metadata and writes it there, `preprocessing` describes
how an input is made of the user's data. Everything here is plain data: `onward.hub` reads the files around a model.
"""

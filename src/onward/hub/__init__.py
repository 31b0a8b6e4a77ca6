"""Models as files and folders of any origin: what they say of themselves, read into one `ModelInfo`.

`read_info` is the door. `onward.info` has the class, and reads and writes the metadata of a model's own file.
"""

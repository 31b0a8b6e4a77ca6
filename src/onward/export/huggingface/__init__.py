"""Export Hugging Face models. Begin with `from_transformers`: `find_model` loads the model, `tasks` says what its task
needs, `wrappers` gives it plain tensors in and out, `trace` exports and checks it, `folder` writes the result.
"""

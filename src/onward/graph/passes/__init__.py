"""Passes over whole graphs, each independent of the others: graph in, changed graph out.

`randomness`, `running_stats` and `gelu` prepare a forward graph for training; `inference_mode` converts training
mode to inference mode; `schedule`, `specialize`, `known_shapes` and `row_gradients` make a training graph faster;
`batch_norm` makes one that CUDA can run; `lora` adds and merges adapters; `head` replaces the last layer.
"""

"""Passes over whole graphs, each independent of the others: onnx-ir model in, changed model out.

`randomness`, `running_stats`, `sizes` and `gelu` prepare a forward graph for training, `precision`, `gradient_order`
and `finish` a training graph for its file; `inference_mode` converts training mode to inference mode; `lora` adds and
merges adapters, `head` replaces the last layer, `open_batch` lets a fixed batch be any; `dequantization`
and `separate_examples` are for language models. What runs when a session is made is in `proto`.
"""

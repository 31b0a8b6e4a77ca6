"""Rewrites of protobuf, in place, while a session is made.

They run at every start of training, some for every new batch shape, on a device that only trains: an onnx-ir model of
the same graph would take longer to make than they run, and onnx-ir itself a quarter of a second to import. What runs
when artifacts are made is in `passes`, on onnx-ir.

`accumulation` settles how gradients are accumulated, `known_shapes` puts in the sizes of a batch, `conv_forms` and
`small_images` choose other forms of convolutions, `static_masks` those of attention, `device_forms` those that CUDA
has; `optimizer_models` splits and fuses those of the optimizer. `replacements` is how nodes are replaced.
"""

"""Pipeline parallelism. Begin with `pipeline_parallel`: `split` cuts a model into stages, `models` builds the graphs of
each, `schedule` moves micro-batches through them, `packing` sends several tensors as one.
"""

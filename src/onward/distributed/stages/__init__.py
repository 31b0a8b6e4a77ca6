"""Pipeline parallelism. Begin with `pipeline_parallel`: `split` cuts a graph into stages, `models` builds the models of
each, `schedule` moves micro-batches through them, `packing` sends several tensors as one.
"""

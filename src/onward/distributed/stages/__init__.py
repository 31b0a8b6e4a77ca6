"""Pipeline parallelism. Begin with `pipeline`: `split` cuts a model into stages, `models` builds each stage's graphs,
`schedule` moves micro-batches through them, `gather` collects the state on rank 0.
"""

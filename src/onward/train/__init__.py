"""Training runs: `Trainer` and its parts.

Begin with `trainer`. Batches, metrics, callbacks, schedules, history and report each have a module. Built on
`onward.api` alone: this package never imports `autodiff` or torch.
"""

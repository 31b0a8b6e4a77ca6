"""Training runs: `Trainer` and what it is made of.

Begin with `trainer`. Batches, metrics, callbacks, schedules, history and report each have a module. Built on
`onward.api` alone: this package never imports the differentiator or torch.
"""

"""What a training run is made of: batches, metrics, callbacks, history, report."""

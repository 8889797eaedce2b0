"""From a model, a batch, a loss and an optimizer to one graph of the whole training step."""

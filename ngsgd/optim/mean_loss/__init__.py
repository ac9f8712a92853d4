"""Number of samples of the mean losses of which an optimizer has the gradients."""

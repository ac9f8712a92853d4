"""Parts of LocalSGD: ranks, tensors that they exchange, and the outer state."""

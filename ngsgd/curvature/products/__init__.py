"""Products of vectors with Jacobians and Hessian blocks along the autograd graph."""

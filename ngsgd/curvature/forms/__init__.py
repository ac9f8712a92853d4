"""Forms in which gradients of samples and Kronecker factors are held."""

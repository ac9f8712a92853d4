"""Methods that use products with second derivatives or differences of gradients."""

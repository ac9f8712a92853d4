"""Methods with one factor for the inputs and one for the outputs of a layer."""

"""The Free Spoken Digit Dataset, with an alignment that is part of the package."""

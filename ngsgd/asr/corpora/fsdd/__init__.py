"""The Free Spoken Digit Dataset, with an alignment that ships with the package."""

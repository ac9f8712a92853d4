"""Audio, filterbanks, normalization and augmentation."""

"""The synthetic digits corpus: speech made on this machine by a synthesizer."""

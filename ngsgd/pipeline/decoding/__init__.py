"""Recognition with a trained model: other test sets, streams, recordings."""

"""Speech: corpora, features, HMM-state topology, decoding and scoring.  No training code."""

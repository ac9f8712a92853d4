"""Speaker adaptation: LDA and MLLT projections, and fMLLR from mixtures of tied states."""

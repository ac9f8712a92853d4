"""Prepared data on nodes that do not see its folder: fetched by digest into a cache of the node."""

"""Checks and measurements for machines with a GPU: correctness, speed and memory in a few minutes.
"""

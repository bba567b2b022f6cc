"""Serving a model step by step: sequences, their paged cache, batches, and the walk through the stages."""

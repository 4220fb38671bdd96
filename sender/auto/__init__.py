"""Choosing the method for a request: what the quality bound allows, what fits, and what is the quickest."""

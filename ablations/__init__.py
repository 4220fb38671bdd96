"""Experiments that compare methods, transports and encodings, and write reports with plots."""
